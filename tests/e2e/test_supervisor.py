"""The supervisor over real vLLM: probes under load, a hang, a drain that loses nothing, and three ways to die.

Four starts of vLLM in all: one for load, hang and drain, and one that is restarted twice for the deaths. The load lasts
a minute here, and ten with SOAK_SECONDS=600 (`make soak`). What vLLM's own /health says meanwhile is printed beside
each verdict; docs/health.md has the table.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dsv4_deploy.serve import procs
from dsv4_deploy.serve.command import installed_version
from tests.e2e.conftest import Deployment, free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(installed_version() is None, reason="no vLLM in this environment"),
]

PROBE_TIMEOUT_S = 5.0  # the chart's
TRIAGED_AS = {"VLLM::EngineCore": "D11", "VLLM::Worker": "D10"}
SOAK_S = float(os.environ.get("SOAK_SECONDS", "60"))
CLIENTS = 64
STALL_S = 20.0
CANARY_S = 5.0
READY_WINDOW_S = 15.0
POLL_S = 2.0
# From the last moment that vLLM may need to notice a death to the answer of a probe that comes every second.
DEATH_BOUND_S = 10.0


class Serve:
    """`dsv4-deploy serve` with the tiny model, its output in a file, and its side port."""

    def __init__(self, root: pathlib.Path, *more: str) -> None:
        self.root = root
        self.port, self.health_port = free_port(), free_port()
        env = {**os.environ, "DSV4_STATE_DIR": str(root / "state"), "DSV4_CACHE_DIR": str(root / "cache")}
        self.deployment = Deployment(self.port, env)
        self.log = root / "output"
        arguments = ["--device", "cpu", "--port", str(self.port), "--health-port", str(self.health_port)]
        watch = ["--stall-timeout", str(STALL_S), "--canary-period", str(CANARY_S)]
        watch += ["--ready-window", str(READY_WINDOW_S)]
        self.termination_log = root / "termination-log"
        self.termination_log.touch()
        watch += ["--termination-log", str(self.termination_log)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsv4_deploy", "serve", *arguments, *watch, *more],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.http = httpx.Client(trust_env=False, timeout=30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def health_url(self) -> str:
        return f"http://127.0.0.1:{self.health_port}"

    def probe(self, name: str) -> tuple[int, str]:
        try:
            answer = self.http.get(f"{self.health_url}/{name}z")
            return answer.status_code, answer.json()["reason"]
        except httpx.TransportError:
            return 0, "nothing answers"

    def vllm_health(self) -> str:
        """What vLLM's own /health says: a status, or that nothing answers."""
        try:
            return str(self.http.get(f"{self.url}/health", timeout=5).status_code)
        except httpx.TransportError:
            return "no answer"

    def wait(self, name: str, status: int, timeout: float) -> float:
        """Seconds until that probe has that status."""
        began = time.monotonic()
        while self.probe(name)[0] != status:
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() - began < timeout, f"{name}: {self.probe(name)}\n{self.tail()}"
            time.sleep(0.2)
        return time.monotonic() - began

    def wait_named(self, cause: str) -> None:
        """Until /livez also gives the id that triage found; that takes the end of the group and a look at the log."""
        deadline = time.monotonic() + 60
        while f"({cause}: " not in (text := self.probe("live")[1]):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)

    def wait_started(self) -> None:
        self.wait("startup", 200, 900)

    def metrics(self) -> dict[str, float]:
        found = {}
        for line in self.http.get(f"{self.health_url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def members(self) -> list[procs.Process]:
        record = json.loads((self.root / "state" / str(self.port) / "state.json").read_text())
        return [one for one in procs.members(record["instance"], None) if one.pid != self.process.pid]

    def process_called(self, title: str) -> int:
        (pid,) = [one.pid for one in self.members() if procs.title(one.pid).startswith(title)]
        return pid

    def api_server(self) -> int:
        (pid,) = [
            one.pid
            for one in self.members()
            if b"\0serve\0" in pathlib.Path(f"/proc/{one.pid}/cmdline").read_bytes()
        ]
        return pid

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(180)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The server for load, hang and drain, in this order."""
    one = Serve(tmp_path_factory.mktemp("serve"), "--drain-timeout", "300")
    try:
        one.wait_started()
        yield one
    finally:
        one.close()


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def test_started_means_answered(serve: Serve) -> None:
    metrics = serve.metrics()
    warmed = {name for name in metrics if name.startswith("dsv4_warm_up_seconds")}
    assert len(warmed) == 3, "short, past the window, past the index's top-k"
    for name in ("startup", "ready", "live"):
        asked = serve.deployment.run("probe", name, "--health-port", str(serve.health_port))
        assert asked.returncode == 0, asked.stdout
    # The names that counters.py reads, from the real server.
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:iteration_tokens_total_count",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
    ):
        assert f'{name}{{engine="0",model_name="tiny"}}' in metrics, name
    assert metrics["dsv4_requests_accepted_total"] >= 4, "three prompts and their tokenization"
    assert any(name.startswith("dsv4_patch_info{") for name in metrics)


def test_probes_never_fail_while_64_clients_saturate_the_server(serve: Serve) -> None:
    bad: list[tuple[float, str, str]] = []
    done = [0]

    async def client(http: httpx.AsyncClient, number: int, until: float) -> None:
        sent = 0
        while time.monotonic() < until:
            answer = await http.post("/v1/completions", json=body(f"client {number}, request {sent}", 8))
            assert answer.status_code == 200, answer.text
            done[0] += 1
            sent += 1

    async def prober(http: httpx.AsyncClient, until: float) -> int:
        probes = 0
        while time.monotonic() < until:
            for name in ("readyz", "livez"):
                answer = await http.get(f"{serve.health_url}/{name}")
                probes += 1
                if answer.status_code != 200:
                    bad.append((until - time.monotonic(), name, answer.text))
            await asyncio.sleep(1.0)
        return probes

    async def run() -> int:
        limits = httpx.Limits(max_connections=CLIENTS + 4)
        async with (
            httpx.AsyncClient(base_url=serve.url, trust_env=False, timeout=600, limits=limits) as http,
            httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S) as side,
        ):
            until = time.monotonic() + SOAK_S
            clients = [asyncio.create_task(client(http, number, until)) for number in range(CLIENTS)]
            probes = await prober(side, until)
            await asyncio.gather(*clients)
            return probes

    before = serve.metrics()
    probes = asyncio.run(run())
    after = serve.metrics()
    canaries = sum(
        after[f'dsv4_canaries_total{{result="{result}"}}']
        - before[f'dsv4_canaries_total{{result="{result}"}}']
        for result in ("ok", "failed", "refused")
    )
    print(f"{done[0]} requests, {probes} probes, {len(bad)} failures, {canaries:.0f} canaries")
    assert bad == []
    assert probes >= SOAK_S, "two a second were asked for"
    assert done[0] >= CLIENTS
    assert canaries <= 0.01 * done[0]


def test_a_hang_is_found_within_its_bound_and_it_recovers(serve: Serve) -> None:
    engine = serve.process_called("VLLM::EngineCore")
    began = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    try:
        not_ready = serve.wait("ready", 503, READY_WINDOW_S + CANARY_S + 15)
        serve.wait("live", 503, CANARY_S + POLL_S + STALL_S + 15)
        took = time.monotonic() - began
        plain = serve.vllm_health()
        reason = serve.probe("live")[1]
    finally:
        os.kill(engine, signal.SIGCONT)
    print(
        f"SIGSTOP of the engine core: /readyz 503 after {not_ready:.1f} s, /livez after {took:.1f} s, /health {plain}"
    )
    assert plain == "200", "which is why vLLM's /health is not enough"
    assert "no progress for" in reason
    # The bound of plan/watch.py, and one second for a probe that comes every second.
    assert took <= CANARY_S + POLL_S + STALL_S + 5
    serve.wait("live", 200, 120)
    serve.wait("ready", 200, 120)


def test_a_drain_loses_nothing_and_takes_nothing_new(serve: Serve) -> None:
    requests, tokens = 220, 12

    async def run() -> tuple[list[httpx.Response], list[tuple[float, str]], float]:
        limits = httpx.Limits(max_connections=requests + 20)
        async with httpx.AsyncClient(base_url=serve.url, trust_env=False, timeout=900, limits=limits) as http:
            before = accepted_total((await http.get("/metrics")).text)
            accepted = [
                asyncio.create_task(http.post("/v1/completions", json=body(f"request {number}", tokens)))
                for number in range(requests)
            ]
            deadline = time.monotonic() + 120
            while accepted_total((await http.get("/metrics")).text) < before + requests:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            signalled = time.monotonic()
            serve.process.send_signal(signal.SIGTERM)
            while (await asyncio.to_thread(serve.probe, "ready"))[0] == 200:
                assert time.monotonic() < signalled + 30
            late = []
            while serve.process.poll() is None:
                sent = time.monotonic() - signalled
                try:
                    answer = await http.post("/v1/completions", json=body("too late", 1), timeout=60)
                    late.append((sent, f"{answer.status_code}"))
                    if answer.status_code == 503:
                        assert answer.headers["retry-after"] == "1"
                except httpx.TransportError as error:
                    late.append((sent, type(error).__name__))
                await asyncio.sleep(0.5)
            return await asyncio.gather(*accepted), late, time.monotonic() - signalled

    answers, late, took = asyncio.run(run())
    print(f"drain: {len(answers)} answers, {len(late)} late requests, gone after {took:.1f} s")
    assert len(answers) == requests
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == tokens
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    outcomes = {outcome for _, outcome in late}
    assert late and outcomes <= {"503", "ConnectError", "ReadError", "RemoteProtocolError"}, late
    assert serve.process.returncode == 0, serve.tail()
    assert "no request was cut off" in serve.tail()
    assert took < 300 + 30 + 20 + 20
    assert not (serve.root / "state" / str(serve.port) / "state.json").exists()
    assert marked(serve) == []


def accepted_total(text: str) -> float:
    (value,) = [
        line.split()[1] for line in text.splitlines() if line.startswith("dsv4_requests_accepted_total ")
    ]
    return float(value)


def shared_memory(serve: Serve) -> set[str]:
    """The files in /dev/shm that vLLM's processes have mapped."""
    return {
        line.split()[5]
        for one in serve.members()
        for line in pathlib.Path(f"/proc/{one.pid}/maps").read_text().splitlines()
        if " /dev/shm/" in line and not line.endswith("(deleted)")
    }


def marked(serve: Serve) -> list[int]:
    """Processes that belong to this server, by its state directory in their environment."""
    wanted = f"DSV4_STATE_DIR={serve.root / 'state'}".encode()
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment.split(b"\0") and procs.look(int(entry.name)) is not None:
                found.append(int(entry.name))
    return found


def test_three_deaths_are_found_within_their_bound_and_named(tmp_path: pathlib.Path) -> None:
    """The engine core, a worker, the API server, each killed in turn; after the first two it starts again."""
    serve = Serve(tmp_path, "--restarts", "2")
    segments: set[str] = set()
    try:
        for victim, restarted in (("VLLM::EngineCore", True), ("VLLM::Worker", True), ("API server", False)):
            serve.wait_started()
            segments |= shared_memory(serve)
            pid = serve.api_server() if victim == "API server" else serve.process_called(victim)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            serve.wait("live", 503, DEATH_BOUND_S)
            took, plain = time.monotonic() - began, serve.vllm_health()
            reason = serve.probe("live")[1]
            print(f"SIGKILL of {victim}: /livez 503 after {took:.1f} s ({reason}), /health {plain}")
            assert "dead" in reason or "died" in reason
            if restarted:
                serve.wait_named(TRIAGED_AS[victim])
                serve.wait("startup", 503, 60)
        assert serve.process.wait(120) == 1, serve.tail()
        cause = json.loads((serve.root / "state" / str(serve.port) / "cause.json").read_text())
        assert cause["notes"][0].startswith("vLLM died: it was killed by SIGKILL")
        assert "it was killed by SIGKILL" in serve.termination_log.read_text()
        assert marked(serve) == []
        assert segments, "vLLM's message queues are shared memory"
        assert not [name for name in segments if pathlib.Path(name).exists()]
    finally:
        serve.close()
