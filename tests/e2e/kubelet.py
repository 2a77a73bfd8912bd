"""One container run by the kubelet's rules, from the pod template that the chart rendered.

In: a container of a Deployment and its pod's grace period. Out: the process with exactly that command, arguments and
environment; its probes asked with their own periods, time-outs and thresholds; and the kubelet's decisions, as events.
The rules: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#container-probes. Until the startup probe
has succeeded the others are not asked; so many failures in a row kill, or take away readiness; killing runs the
preStop hook, then SIGTERM, and SIGKILL when the grace period is over.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import Any

import httpx


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that the kubelet saw or did, in seconds since it was made."""

    at: float
    what: str
    detail: str = ""


class Kubelet:
    """Runs and restarts one container. `path` is the PATH of its image; only that and the template's variables are in
    its environment."""

    def __init__(self, container: dict[str, Any], grace_s: int, path: str, output: pathlib.Path) -> None:
        self.container, self.grace_s, self.output = container, grace_s, output
        self.events: list[Event] = []
        self.ready = False
        self.restarts = 0
        self.exit_code: int | None = None
        self._begun = time.monotonic()
        self._deleted = threading.Event()
        self._ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        self._env = {"PATH": path, **{item["name"]: item["value"] for item in container["env"]}}
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self._ports[port]}"

    def count(self, what: str) -> int:
        return sum(event.what == what for event in self.events)

    def delete(self) -> None:
        """What `kubectl delete pod` sets off; returns when the container has ended."""
        self.ready = False
        self._deleted.set()
        self._thread.join()
        self._stop("deleted")

    def close(self) -> None:
        """Leave nothing running, whatever happened."""
        self._deleted.set()
        self._thread.join()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        self._event("started")
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [*self.container["command"], *self.container["args"]],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _event(self, what: str, detail: str = "") -> None:
        self.events.append(Event(time.monotonic() - self._begun, what, detail))

    def _watch(self) -> None:
        while not self._deleted.is_set():
            self._life()
            if self._deleted.is_set():
                return
            self.ready = False
            self.restarts += 1
            self.process = self._start()

    def _life(self) -> None:
        """From a start to the end of the container, or until the pod is deleted."""
        probes = {name: self.container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        due = dict.fromkeys(probes, time.monotonic())
        failures = dict.fromkeys(probes, 0)
        started = False
        while not self._deleted.is_set():
            if self.process.poll() is not None:
                self.exit_code = self.process.returncode
                self._event("ended by itself", str(self.exit_code))
                return
            now = time.monotonic()
            for name, probe in probes.items():
                if due[name] > now or (name == "startup") is started:
                    continue
                due[name] = now + probe["periodSeconds"]
                good, reason = self._ask(probe)
                failures[name] = 0 if good else failures[name] + 1
                if not good and started:
                    self._event(f"{name} failed", reason)
                if name == "startup" and good:
                    started = True
                    self._event("startup succeeded")
                elif name == "readiness":
                    if good and not self.ready:
                        self._event("ready")
                    elif failures[name] == probe["failureThreshold"]:
                        self._event("not ready", reason)
                    self.ready = good or (self.ready and failures[name] < probe["failureThreshold"])
                elif not good and failures[name] >= probe["failureThreshold"]:
                    self._event(f"killed by {name}", reason)
                    self.ready = False
                    self._stop(name)
                    return
            self._deleted.wait(0.1)

    def _ask(self, probe: dict[str, Any]) -> tuple[bool, str]:
        request = probe["httpGet"]
        try:
            answer = httpx.get(
                f"{self.url(request['port'])}{request['path']}",
                timeout=probe["timeoutSeconds"],
                trust_env=False,
            )
        except httpx.HTTPError as error:
            return False, type(error).__name__
        return 200 <= answer.status_code < 400, answer.text.strip()

    def _stop(self, why: str) -> None:
        deadline = time.monotonic() + self.grace_s
        time.sleep(self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        self._event("SIGTERM", why)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._event("SIGKILL", why)
            os.kill(self.process.pid, signal.SIGKILL)
            self.exit_code = self.process.wait()
        self._event("ended", str(self.exit_code))
