"""Memory, limits and kernel settings, at and around each threshold."""

from __future__ import annotations

import pathlib

import pytest

from tests import small_checkpoint
from tests.hosts import GIB, Host
from tests.preflight.conftest import Bench, expect

KVM = ("QEMU", "Standard PC (Q35 + ICH9, 2009)")


@pytest.mark.parametrize(
    ("size", "level"), [(64 * GIB, "ok"), (16 * GIB, "ok"), (8 * GIB, "warn"), (64 * 2**20, "fail")]
)
def test_shared_memory(bench: Bench, size: int, level: str) -> None:
    found = bench.finding("shared-memory", Host(mark=".dockerenv"), shm=size)
    expect(found, level, refs=("W24", "W25") if level != "ok" else ())
    if level != "ok":
        assert "--shm-size 32g" in found.fix


def test_shared_memory_of_a_pod(bench: Bench) -> None:
    found = bench.finding("shared-memory", Host(mark="run/secrets/kubernetes.io"), shm=64 * 2**20)
    expect(found, "fail", "64 MiB", "medium: Memory")


def test_shared_memory_that_a_dead_server_left_full(bench: Bench) -> None:
    found = bench.finding("shared-memory", shm=64 * GIB, shm_used=60 * GIB)
    expect(found, "warn", "4.0 GiB left of 64 GiB", refs=("F34",))


def test_no_shared_memory(bench: Bench) -> None:
    expect(bench.finding("shared-memory", Host(mounts=())), "warn", "not mounted", refs=("W24",))


@pytest.mark.parametrize(
    ("limit", "level"), [("1024", "warn"), ("65535", "warn"), ("65536", "ok"), ("unlimited", "ok")]
)
def test_open_files(bench: Bench, limit: str, level: str) -> None:
    expect(
        bench.finding("open-files", Host(open_files=limit)),
        level,
        limit,
        refs=("F19",) if level == "warn" else (),
    )


def test_locked_memory(bench: Bench) -> None:
    found = bench.finding("locked-memory", Host(locked_memory="65536"))
    expect(found, "warn", "64 KiB", "memlock=-1", "IPC_LOCK", refs=("W28",))


def test_locked_memory_with_the_capability(bench: Bench) -> None:
    bench.case(Host(locked_memory="65536"))
    (bench.folder / "root/proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    expect(bench.finding("locked-memory"), "ok")
    (bench.folder / "root/proc/self/status").write_text(
        "Name:\tx\nCapEff:\t00000000a80425fb\n"
    )  # docker's default
    expect(bench.finding("locked-memory"), "warn")


@pytest.mark.parametrize(("value", "level"), [(0, "ok"), (1, "warn"), (2, "warn")])
def test_numa_balancing(bench: Bench, value: int, level: str) -> None:
    found = bench.finding("numa-balancing", Host(numa_balancing=value))
    expect(found, level, refs=("W29",) if value else ())
    assert not value or "sysctl -w kernel.numa_balancing=0" in found.fix


def test_iommu(bench: Bench) -> None:
    expect(bench.finding("iommu"), "ok")


def test_iommu_translation(bench: Bench) -> None:
    expect(bench.finding("iommu", Host(command_line="ro quiet")), "warn", "iommu=pt")


def test_iommu_is_the_hosts_business(bench: Bench) -> None:
    assert bench.findings("iommu", Host(command_line="ro quiet", hypervisor=KVM)) == []


@pytest.mark.parametrize(
    ("limit", "level"), [("max", "ok"), (400 * GIB, "ok"), (155 * GIB, "warn"), (64 * GIB, "fail")]
)
def test_a_memory_limit_against_flash(bench: Bench, limit: object, level: str) -> None:
    found = bench.finding("memory", Host(memory_max=str(limit)), model="deepseek-v4-flash")
    expect(found, level, refs=("F11", "W43") if level != "ok" else ())
    if level != "ok":
        assert "149 GiB of weights" in found.found
        assert "137" in found.why


def test_main_memory_below_the_checkpoint(bench: Bench) -> None:
    found = bench.finding("memory", Host(ram_bytes=512 * GIB), model="deepseek-v4-pro")
    expect(found, "warn", "512 GiB of main memory for 805 GiB", refs=("F29",))


def test_engram_tables_of_v41(bench: Bench, tmp_path: pathlib.Path) -> None:
    model = small_checkpoint.write(tmp_path / "v41", model_type="deepseek_v41")
    short = Host(ram_available=100 * GIB)
    ok, found = bench.findings("memory", short, model=str(model))
    assert ok.level == "ok"
    expect(found, "fail", "183 GiB", "engram-config")


@pytest.mark.parametrize(("available", "level"), [(8 * GIB, "ok"), (1 * GIB, "warn")])
def test_the_no_gpu_mode(bench: Bench, available: int, level: str) -> None:
    host = Host(card=None, ram_available=available)
    expect(bench.finding("memory", host, device="cpu", tp=1), level, "2.5 GiB")


def test_a_memory_limit_binds_the_no_gpu_mode_too(bench: Bench) -> None:
    host = Host(card=None, memory_max=str(3 * GIB))
    expect(bench.finding("memory", host, device="cpu", tp=4), "warn", "3.0 GiB", "6.3 GiB")


@pytest.mark.parametrize("name", ["shared-memory", "open-files", "locked-memory", "numa-balancing", "iommu"])
def test_what_the_no_gpu_mode_does_not_need(bench: Bench, name: str) -> None:
    assert bench.findings(name, Host(card=None, open_files="1024"), device="cpu") == []
