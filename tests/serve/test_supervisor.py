"""`dsv4-deploy serve` as a container runs it, with fake_vllm.py as the server: probes, drain, deaths, restarts."""

from __future__ import annotations

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

from tests.serve.conftest import Deploy, command_line, marked, wait_for


class Serve:
    """One `dsv4-deploy serve` and its side port."""

    def __init__(self, deploy: Deploy, *more: str, quirks: str = "") -> None:
        self.deploy = deploy
        self.termination_log = deploy.state_dir.parent / "termination-log"
        self.termination_log.write_text("")
        self.process = deploy.start(
            "serve",
            *deploy.common_arguments(),
            "--termination-log",
            str(self.termination_log),
            *more,
            quirks=quirks,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{deploy.health_port}", trust_env=False)

    def probe(self, name: str) -> tuple[int, str]:
        """Status and reason of /{name}z; 0 when nothing answers."""
        try:
            answer = self.http.get(f"/{name}z")
            return answer.status_code, answer.json()["reason"]
        except httpx.HTTPError:
            return 0, "nothing answers"

    def wait(self, name: str, status: int = 200, timeout: float = 60) -> str:
        wait_for(lambda: self.probe(name)[0] == status, f"{status} from /{name}z", timeout)
        return self.probe(name)[1]

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stdout, stderr

    def cause(self) -> dict[str, Any]:
        path = self.deploy.state_file.with_name("cause.json")
        content: dict[str, Any] = json.loads(path.read_text())
        return content


@pytest.fixture
def quick() -> tuple[str, ...]:
    """Options that make a test out of minutes."""
    return ("--canary-period", "0.5", "--ready-window", "2", "--stall-timeout", "3")


def test_a_life_from_start_to_drain(deploy: Deploy, quick: tuple[str, ...]) -> None:
    serve = Serve(deploy, *quick, quirks="busy=4")
    wait_for(lambda: serve.probe("live")[0] == 200, "the side port")
    serve.wait("startup")
    assert serve.probe("ready") == (200, "serving")
    assert serve.metric("dsv4_ready") == 1
    assert serve.metric("dsv4_draining") == 0
    assert serve.metric("dsv4_pending_requests") == 4
    assert serve.metric("vllm:num_requests_running") == 4
    assert serve.metric("dsv4_patch_info") == 1
    assert [row["state"] for row in deploy.rows()] == ["ready"]
    for name in ("startup", "ready", "live"):
        asked = deploy.run("probe", name, "--health-port", str(deploy.health_port))
        assert (asked.returncode, asked.stdout.strip()) == (0, serve.probe(name)[1])
    serve.process.send_signal(signal.SIGTERM)
    seen = []
    while (answer := serve.probe("ready"))[0]:
        seen.append(answer[0])
    code, stdout, stderr = serve.end()
    assert code == 0, stderr
    assert seen.index(503) + seen.count(503) == len(seen), "not ready from the signal on"
    assert "SIGTERM: no new requests from now on" in stderr
    assert "stopped; no request was cut off" in stderr
    assert "Starting vLLM server on" in stdout, "vLLM's output is passed through"
    assert "Starting vLLM server on" in deploy.run("logs", "--port", str(deploy.port)).stdout
    assert not deploy.state_file.exists()
    assert marked(deploy.run_id) == []
    assert serve.termination_log.read_text() == ""


def test_with_stdout_closed_and_metrics_that_are_none(deploy: Deploy, quick: tuple[str, ...]) -> None:
    """The number of a closed stdout must not become that of a file, into which vLLM's output would go then."""
    command = [sys.executable, "-m", "dsv4_deploy", "serve", *deploy.common_arguments(), *quick]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *command],
        env={**deploy.env, "FAKE_VLLM": "nan-metrics"},
    )

    def probe() -> tuple[int, str]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{deploy.health_port}/readyz", trust_env=False)
            return answer.status_code, answer.text
        except httpx.HTTPError:
            return 0, ""

    wait_for(lambda: probe()[0] == 200, "ready", 60)
    targets = [str(pathlib.Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in (0, 1, 2)]
    assert targets == ["/dev/null"] * 3
    wait_for(lambda: deploy.state()["ready"] is True, "the state file, which is written behind the answer")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_state_that_cannot_be_written_does_not_end_a_server(deploy: Deploy, quick: tuple[str, ...]) -> None:
    """As on a full disk, at the moment when the server becomes ready."""
    serve = Serve(deploy, *quick, quirks="slow")
    wait_for(lambda: serve.probe("live")[0] == 200, "the side port")
    deploy.state_file.unlink()
    in_the_way = deploy.state_file / "in the way"
    in_the_way.mkdir(parents=True)
    serve.wait("ready")
    in_the_way.rmdir()
    deploy.state_file.rmdir()
    serve.process.send_signal(signal.SIGTERM)
    code, _, stderr = serve.end()
    assert code == 0, stderr
    assert "it serves all the same" in stderr
    assert marked(deploy.run_id) == []


def test_canaries_of_an_idle_server(deploy: Deploy, quick: tuple[str, ...]) -> None:
    serve = Serve(deploy, *quick, "--no-vllm-metrics")
    serve.wait("startup")
    wait_for(lambda: serve.metric('dsv4_canaries_total{result="ok"}') >= 2, "two canaries")
    assert serve.metric("dsv4_canary_latency_seconds_count") >= 2
    assert serve.metric("dsv4_canary_last_success_timestamp_seconds") == pytest.approx(time.time(), abs=10)
    text = serve.http.get("/metrics").text
    assert "vllm:" not in text
    assert "dsv4_patch_info" in text
    serve.process.send_signal(signal.SIGINT)
    assert serve.end()[0] == 0


def test_a_hang_is_found_and_named(deploy: Deploy, quick: tuple[str, ...]) -> None:
    serve = Serve(deploy, *quick, quirks="frozen")
    serve.wait("startup")
    began = time.monotonic()
    serve.wait("ready", 503)
    assert serve.probe("live")[0] == 200
    reason = serve.wait("live", 503)
    assert time.monotonic() - began < 3 + 0.5 + 2 + 5
    assert "no progress for" in reason
    assert deploy.run("probe", "live", "--health-port", str(deploy.health_port)).returncode == 1
    serve.process.send_signal(signal.SIGTERM)  # as kubelet does then
    code, _, stderr = serve.end()
    assert code == 1
    assert "vLLM hangs: no progress" in stderr
    assert "vLLM hangs" in serve.termination_log.read_text()
    assert marked(deploy.run_id) == []


def test_a_full_queue_is_no_failure(deploy: Deploy, quick: tuple[str, ...]) -> None:
    serve = Serve(deploy, *quick, quirks="full")
    serve.wait("startup")
    wait_for(lambda: serve.metric('dsv4_canaries_total{result="refused"}') >= 3, "refused canaries")
    assert serve.probe("live")[0] == 200
    serve.process.send_signal(signal.SIGTERM)
    assert serve.end()[0] == 0


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_dead_api_server(deploy: Deploy, quick: tuple[str, ...], restarts: int) -> None:
    serve = Serve(deploy, *quick, "--restarts", str(restarts), quirks="deaf-engine,titled")
    serve.wait("startup")
    first = deploy.api_server()
    os.kill(first, signal.SIGKILL)
    reason = serve.wait("live", 503, timeout=30)
    assert "it was killed by SIGKILL" in reason
    if restarts:
        serve.wait("startup")
        assert deploy.api_server() != first
        assert len(deploy.servers()) == 3, "nothing of the first life is left"
        assert serve.metric("dsv4_restarts_total") == 1
        os.kill(deploy.api_server(), signal.SIGKILL)
    code, _, stderr = serve.end()
    assert code == 1
    assert "vLLM died: it was killed by SIGKILL" in stderr
    assert serve.cause()["notes"][0].startswith("vLLM died: it was killed by SIGKILL")
    written = serve.termination_log.read_text()
    assert "it was killed by SIGKILL" in written
    assert len(written.encode()) <= 4096
    assert marked(deploy.run_id) == []
    assert [row["state"] for row in deploy.rows()] == ["dead"]
    assert deploy.down().returncode == 0


def test_a_dead_engine_is_told_before_the_api_server_ends(deploy: Deploy, quick: tuple[str, ...]) -> None:
    kills = deploy.state_dir.parent / "kill"
    deploy.env["FAKE_VLLM_KILLS"] = str(kills)
    serve = Serve(deploy, *quick)
    serve.wait("startup")
    kills.touch()
    assert "vLLM's engine is dead" in serve.wait("live", 503, timeout=30)
    code, _, stderr = serve.end()
    assert code == 1
    assert "vLLM's engine is dead; then vLLM ended: it ended with exit code 0" in stderr
    assert "out of ideas" in stderr, "the cause, from the log"
    assert "out of ideas" in serve.termination_log.read_text()


@pytest.mark.parametrize(
    ("quirks", "words"),
    [
        ("nan", "no finite numbers"),
        ("one-token", "one token over and over"),
        ("no-engine", "HTTP status 500"),
    ],
)
def test_a_server_that_answers_nonsense_never_starts(
    deploy: Deploy, quick: tuple[str, ...], quirks: str, words: str
) -> None:
    serve = Serve(deploy, *quick, quirks=quirks)
    codes = set()
    while serve.process.poll() is None:
        codes.add(serve.probe("startup")[0])
    code, _, stderr = serve.end()
    assert code == 1
    assert 200 not in codes
    assert "the warm-up failed" in stderr
    assert words in stderr
    assert marked(deploy.run_id) == []


def test_a_deadline_cuts_off_and_says_so(deploy: Deploy, quick: tuple[str, ...]) -> None:
    serve = Serve(deploy, *quick, "--drain-timeout", "0.5", "--stall-timeout", "60", quirks="busy=1000")
    serve.wait("startup")
    serve.process.send_signal(signal.SIGTERM)
    code, _, stderr = serve.end()
    assert code == 3
    assert "request(s) were cut off at the deadline" in stderr
    assert marked(deploy.run_id) == []


def test_a_second_signal_stops_at_once(deploy: Deploy) -> None:
    serve = Serve(deploy, quirks="busy=100000,deaf,deaf-engine")
    serve.wait("startup")
    serve.process.send_signal(signal.SIGTERM)
    wait_for(lambda: serve.probe("ready")[0] == 503, "the drain")
    began = time.monotonic()
    serve.process.send_signal(signal.SIGINT)
    code, _, stderr = serve.end()
    assert time.monotonic() - began < 10
    assert code == 130
    assert "hurried by a second signal" in stderr
    assert marked(deploy.run_id) == []


def test_sigterm_while_loading(deploy: Deploy) -> None:
    serve = Serve(deploy, quirks="hang")
    wait_for(lambda: len(deploy.servers()) == 3, "the server's processes")
    serve.process.send_signal(signal.SIGTERM)
    code, _, stderr = serve.end()
    assert code == 0, stderr
    assert marked(deploy.run_id) == []


def test_a_killed_supervisor_takes_vllm_with_it(deploy: Deploy) -> None:
    serve = Serve(deploy)
    serve.wait("startup")
    serve.process.kill()
    serve.end()
    wait_for(lambda: marked(deploy.run_id) == [], "the end of vLLM")
    # Its record says so, and a new one begins where it ended.
    assert [row["state"] for row in deploy.rows()] == ["dead"]
    again = Serve(deploy)
    again.wait("startup")
    again.process.send_signal(signal.SIGTERM)
    assert again.end()[0] == 0


def test_two_on_one_port_and_a_health_port_in_use(deploy: Deploy) -> None:
    serve = Serve(deploy)
    serve.wait("startup")
    second = deploy.run("serve", *deploy.common_arguments())
    assert second.returncode == 1
    assert f"on port {deploy.port} already" in second.stderr
    health_port = deploy.health_port
    deploy.port, free = deploy.port + 1, deploy.port
    third = deploy.run("serve", *deploy.common_arguments())
    assert third.returncode == 1
    assert f"port {health_port} is in use by" in third.stderr
    assert "--health-port" in third.stderr
    deploy.port = free
    assert deploy.down().returncode == 0, "`down` stops what `serve` runs"
    assert serve.end()[0] == 0


def test_signals_for_vllm_are_passed_on(deploy: Deploy) -> None:
    serve = Serve(deploy)
    serve.wait("startup")
    server = deploy.api_server()
    serve.process.send_signal(signal.SIGUSR1)  # which ends a Python program that does not expect it
    code, _, stderr = serve.end()
    assert code == 1
    assert "it was killed by SIGUSR1" in stderr
    assert server not in marked(deploy.run_id)


def test_no_zombie_stays_behind(deploy: Deploy) -> None:
    serve = Serve(deploy, quirks="deaf-engine")
    serve.wait("startup")
    engine = next(pid for pid in deploy.servers() if b"--role=EngineCore" in command_line(pid))
    worker = next(pid for pid in deploy.servers() if b"--role=Worker_TP0" in command_line(pid))
    # An orphan of vLLM: its parent (the API server) ends after it was started anew.
    os.kill(deploy.api_server(), signal.SIGKILL)
    serve.wait("live", 503)
    for pid in (engine, worker):
        wait_for(lambda pid=pid: not pathlib.Path(f"/proc/{pid}").exists(), "the reaping of an orphan")
    assert serve.end()[0] == 1


@pytest.fixture
def pid_one() -> Iterator[list[str]]:
    """A command prefix that makes what follows process 1 of a PID namespace of its own."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("no PID namespaces for this user")
    yield prefix


def test_as_process_one(deploy: Deploy, pid_one: list[str]) -> None:
    arguments = ["-m", "dsv4_deploy", "serve", *deploy.common_arguments()]
    with subprocess.Popen(
        [*pid_one, sys.executable, *arguments],
        env={**deploy.env, "FAKE_VLLM": "deaf-engine"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as outer:
        with httpx.Client(base_url=f"http://127.0.0.1:{deploy.health_port}", trust_env=False) as http:

            def started() -> bool:
                try:
                    return http.get("/startupz").status_code == 200
                except httpx.HTTPError:
                    return False

            wait_for(started, "the server", timeout=60)
        supervisor = next(
            pid
            for pid in marked(deploy.run_id)
            if b"\0serve\0" in command_line(pid) and b"dsv4_deploy" in command_line(pid) and pid != outer.pid
        )
        os.kill(supervisor, signal.SIGTERM)
        lines = "".join(outer.stdout or [])
        assert outer.wait(60) == 0, lines
    assert "stopped" in lines
    assert marked(deploy.run_id) == []
