"""The chart's Deployment as it is rendered, run here by the kubelet's rules over real vLLM in the no-GPU mode.

It becomes Ready, is never killed under load, is killed and started again when the engine hangs, and loses nothing when
it is deleted. Two starts of vLLM. The metrics of alerts and dashboard are looked up in what it really serves.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dsv4_deploy.serve.command import installed_version
from tests.e2e.conftest import free_port
from tests.e2e.kubelet import Kubelet
from tests.helm import chart, test_rules

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(installed_version() is None, reason="no vLLM in this environment"),
]

LOAD_S = float(os.environ.get("KUBELET_LOAD_SECONDS", "25"))
CLIENTS = 12


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """ci/no-gpu-values.yaml with ports and directories of this machine, and a stall time-out for a short test."""
    root = tmp_path_factory.mktemp("pod")
    (root / "termination-log").touch()
    values = {
        "ports": {"http": free_port(), "health": free_port()},
        "cache": {"mountPath": str(root / "cache")},
        "env": {"HOME": str(root), "DSV4_STATE_DIR": str(root / "state"), "OMP_NUM_THREADS": "1"},
        "extraArgs": [
            "--stall-timeout",
            "20",
            "--canary-period",
            "5",
            "--termination-log",
            str(root / "termination-log"),
        ],
        "drain": {"preStopSeconds": 1, "timeoutSeconds": 60, "shutdownSeconds": 10},
        "probes": {"startup": {"periodSeconds": 2}},
    }
    return chart.one(chart.template(chart.CHART / "ci" / "no-gpu-values.yaml", values=values), "Deployment")


@pytest.fixture(scope="module")
def kubelet(deployment: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    pod = deployment["spec"]["template"]["spec"]
    bin_directory = str(pathlib.Path(sys.executable).parent)
    output = tmp_path_factory.mktemp("kubelet") / "output"
    path = f"{bin_directory}:/usr/local/bin:/usr/bin:/bin"
    one = Kubelet(pod["containers"][0], pod["terminationGracePeriodSeconds"], path, output)
    yield one
    one.close()
    for event in one.events:
        print(f"{event.at:7.1f} s  {event.what}  {event.detail}")


def wait_for(condition: Callable[[], object], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.1)


class Load:
    """Clients that ask one completion after the other until they are stopped; every answer is kept."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.url, self.tokens = url, tokens
        self.complete = self.refused = 0
        self.lost: list[str] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": self.tokens, "ignore_eos": True}
        with httpx.Client(trust_env=False, timeout=300) as http:
            while not self._over.is_set():
                try:
                    answer = http.post(f"{self.url}/v1/completions", json=body)
                except httpx.ConnectError:
                    # Nobody listens any more: the request never was inside.
                    return
                except httpx.HTTPError as error:
                    with self._lock:
                        self.lost.append(repr(error))
                    return
                with self._lock:
                    if answer.status_code == 503:
                        self.refused += 1
                        return
                    if (
                        answer.status_code == 200
                        and answer.json()["usage"]["completion_tokens"] == self.tokens
                    ):
                        self.complete += 1
                    else:
                        self.lost.append(f"{answer.status_code} {answer.text[:200]}")


def test_it_becomes_ready_and_nothing_else_is_asked_before_it_has_started(kubelet: Kubelet) -> None:
    wait_for(lambda: kubelet.ready, "readiness", 600)
    assert [event.what for event in kubelet.events] == ["started", "startup succeeded", "ready"]


def test_alerts_and_dashboard_use_metrics_that_are_there(kubelet: Kubelet) -> None:
    text = httpx.get(f"{kubelet.url('health')}/metrics", trust_env=False).text
    served = set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[{ ]", text, flags=re.MULTILINE))
    for where, expression in test_rules.expressions().items():
        ours = {name for name in test_rules.metrics_of(expression) if name.startswith(("vllm:", "dsv4_"))}
        assert ours <= served, where
    schema = test_rules.threshold_schema()
    for metric, field in (
        ("time_to_first_token", "timeToFirstTokenSeconds"),
        ("inter_token_latency", "interTokenSeconds"),
    ):
        bounds = {
            float(bound) for bound in re.findall(rf'vllm:{metric}_seconds_bucket{{[^}}]*le="([0-9.]+)"', text)
        }
        assert set(schema[field]["enum"]) <= bounds, field


def test_it_is_never_killed_or_taken_out_under_load(kubelet: Kubelet) -> None:
    before = len(kubelet.events)
    load = Load(kubelet.url("http"), CLIENTS, 24)
    time.sleep(LOAD_S)
    load.stop()
    assert load.complete > 0
    assert (load.lost, load.refused) == ([], 0)
    assert kubelet.ready
    news = [
        event for event in kubelet.events[before:] if event.what.startswith(("killed", "not ready", "ended"))
    ]
    assert news == []


def test_a_hang_is_noticed_killed_and_started_again(kubelet: Kubelet, deployment: dict[str, Any]) -> None:
    engine = next(pid for pid in descendants(kubelet.process.pid) if "EngineCore" in title(pid))
    os.kill(engine, signal.SIGSTOP)
    # Canary period, stall time-out and three looks, with room for a busy machine.
    wait_for(lambda: kubelet.count("killed by liveness"), "the liveness probe to give up", 180)
    assert kubelet.count("not ready") == 1
    wait_for(lambda: kubelet.restarts == 1 and kubelet.ready, "the new container", 600)
    assert kubelet.count("SIGKILL") == 0
    assert "EngineCore" not in title(engine)
    message = pathlib.Path(chart.argument(chart.server([deployment]), "--termination-log")).read_text()
    assert "stopped by a signal" in message or "no progress" in message


def test_deleting_the_pod_loses_nothing(kubelet: Kubelet) -> None:
    load = Load(kubelet.url("http"), CLIENTS, 64)
    wait_for(lambda: load.complete >= CLIENTS, "answers under load", 300)
    kubelet.delete()
    load.stop()
    assert load.lost == []
    assert kubelet.exit_code == 0
    assert kubelet.count("SIGKILL") == 0
    print(f"{load.complete} answered, {load.refused} turned away while draining")


def descendants(pid: int) -> list[int]:
    """The process's children and theirs."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def title(pid: int) -> str:
    try:
        return (
            (pathlib.Path("/proc") / str(pid) / "cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return ""
