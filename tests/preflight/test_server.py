"""vLLM, caches and port, with the real ones of this machine."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest

from dsv4_deploy.preflight import server
from tests import as_user
from tests.hosts import Host
from tests.preflight.conftest import Bench, expect

NO_GPU = Host(card=None)


def test_the_vllm_of_this_environment(bench: Bench) -> None:
    expect(bench.finding("vllm", NO_GPU, device="cpu"), "ok", "0.32.0")


def test_a_launcher_that_is_named(bench: Bench) -> None:
    found = bench.finding("vllm", NO_GPU, device="cpu", environ={"DSV4_VLLM_COMMAND": "/bin/true serve"})
    expect(found, "ok", "/bin/true", "not checked")


def test_a_launcher_that_is_not_there(bench: Bench) -> None:
    found = bench.finding("vllm", NO_GPU, device="cpu", environ={"DSV4_VLLM_COMMAND": "/no/such/vllm"})
    expect(found, "fail", "/no/such/vllm")


def test_a_free_port(bench: Bench) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    expect(bench.finding("port", NO_GPU, device="cpu", port=number), "ok", str(number))


def test_a_port_in_use_has_an_owner_and_a_neighbour(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = bench.finding("port", NO_GPU, device="cpu", port=number)
    expect(found, "fail", f"port {number} is in use by", f"pid {os.getpid()}", refs=("F76", "W52"))
    free = int(found.fix.rsplit("--port ", 1)[1].rstrip("."))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free))


@as_user.only_root
def test_a_port_below_1024_for_a_user(bench: Bench) -> None:
    if int(pathlib.Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 1024:
        pytest.skip("this kernel gives low ports to everybody")
    case = bench.case(NO_GPU, device="cpu", port=81)

    def judge() -> str:
        (found,) = server.port(case)
        return f"{found.level} {found.found} {found.why}"

    text = as_user.run(judge)
    assert text.startswith("fail cannot listen on 127.0.0.1 port 81"), text
    assert "below 1024 are for root" in text


def test_an_address_that_is_none(bench: Bench) -> None:
    found = bench.finding("port", NO_GPU, device="cpu", host="300.1.1.1")
    assert (found.level, "300.1.1.1" in found.found, "--port" in found.fix) == ("fail", True, False)


def test_our_own_server_on_the_port(bench: Bench) -> None:
    expect(bench.finding("port", NO_GPU, device="cpu", our_pid=4242), "ok", "4242")


def test_caches(bench: Bench) -> None:
    expect(bench.finding("caches"), "ok")


def test_a_home_that_cannot_be_written(bench: Bench) -> None:
    """/proc is a directory in which not even root can make one."""
    found = bench.findings("caches", environ={"HOME": "/proc/self/nowhere"})
    assert {finding.level for finding in found} == {"fail"}
    assert {finding.fix.split()[1] for finding in found} == {
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "AITER_JIT_DIR",
    }
    expect(found[0], "fail", "not writable", refs=("F36", "W34"))


def test_a_cache_that_a_variable_moves(bench: Bench, tmp_path: pathlib.Path) -> None:
    environ = {"HOME": "/proc/self/nowhere", "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    expect(bench.finding("caches", NO_GPU, device="cpu", environ=environ), "ok")
