"""How a running server is watched and stopped: every period, window and deadline, in one place, with its reason.

In: the device, the size of the model and what the operator wants otherwise. Out: a Watch, which the
supervisor obeys, and the Kubernetes probes that fit it (`probes`). The table in docs/health.md is these
numbers; a test compares them. What peers use, and what it did to them:
https://github.com/vllm-project/vllm/issues/38157, https://github.com/gonka-ai/gonka/issues/1421,
https://github.com/gpustack/gpustack/issues/3189
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsv4_deploy.spec import DEFAULT_PORT

if TYPE_CHECKING:
    from dsv4_deploy.plan.plan import Plan

DEFAULT_HEALTH_PORT = 8081
# What vLLM's processes get, beyond its own --shutdown-timeout, to let go of the GPUs before they are killed.
STOP_MARGIN_S = 20.0
# While it still imports and loads there is nothing to save: it ends at once or is stuck.
STOP_LOADING_S = 10.0


@dataclasses.dataclass(frozen=True)
class Watch:
    """Seconds, if not said otherwise. REASONS explains each."""

    host: str
    port: int
    poll_s: float
    canary_period_s: float
    canary_timeout_s: float
    ready_window_s: float
    stall_s: float
    drain_s: float
    restarts: int
    passthrough: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data, for the state file; `Watch(**it)` is the way back."""
        return dataclasses.asdict(self)

    @property
    def hang_bound_s(self) -> float:
        """The longest that a hang can go unnoticed by /livez: an idle server learns of it from the next canary."""
        return self.canary_period_s + self.poll_s + self.stall_s

    def stop_bound_s(self, shutdown_timeout_s: float) -> float:
        """From SIGTERM to the end of the last process: drain, vLLM's own shutdown, firm stop."""
        return self.drain_s + shutdown_timeout_s + STOP_MARGIN_S


REASONS: Mapping[str, str] = {
    "poll_s": "writing down its counters keeps vLLM's API server busy for 10 to 30 ms each time",
    "canary_period_s": "only an idle server gets canaries; one every 10 s finds a hang before users do",
    "canary_timeout_s": "one token on an idle server takes well under a second",
    "ready_window_s": "several canaries may be late before traffic is moved away",
    "stall_s": "above the longest single step: a prefill chunk takes seconds, but a kernel that AITER compiles in a "
    "request has taken 225 s (https://github.com/ROCm/aiter/issues/4055)",
    "drain_s": "the longest answer that is promised to be finished",
    "restarts": "0: the container's runtime restarts, and counts",
}


@dataclasses.dataclass(frozen=True)
class Probe:
    """One Kubernetes probe: what it means, and how often, how long and how many times it may fail."""

    path: str
    meaning: str
    period_s: int
    timeout_s: int
    failures: int
    why: str

    @property
    def budget_s(self) -> int:
        """How long it may go on failing before Kubernetes acts."""
        return self.period_s * self.failures


def health_port(port: int) -> int:
    """The side port that belongs to a server port: 8081 for 8000, and as far away for every other."""
    distance = DEFAULT_HEALTH_PORT - DEFAULT_PORT
    return port + distance if port + distance <= 65535 else port - distance


def make_watch(plan: Plan, wanted: Mapping[str, Any] | None = None) -> Watch:
    """The Watch of one server. `wanted` holds fields that the operator has set; None means "you choose"."""
    cpu = plan.device == "cpu"
    watch = Watch(
        host=plan.host,
        port=health_port(plan.port),
        poll_s=2.0,
        canary_period_s=10.0,
        canary_timeout_s=10.0,
        ready_window_s=30.0 if cpu else 60.0,
        stall_s=60.0 if cpu else 600.0,
        drain_s=float(plan.shutdown_timeout_s),
        restarts=0,
        passthrough=True,
    )
    given = {name: value for name, value in (wanted or {}).items() if value is not None}
    return dataclasses.replace(watch, **given)


def probes(watch: Watch, ready_timeout_s: int) -> dict[str, Probe]:
    """The probes for Kubernetes, by the names that `dsv4-deploy probe` takes.

    `ready_timeout_s` is what the plan gives the server to load; the warm-up, which compiles kernels, comes on
    top of it.
    """
    startup_period = 15
    budget = ready_timeout_s * 5 / 4
    return {
        "startup": Probe(
            "/startupz",
            "loaded, warmed up, answers checked",
            startup_period,
            5,
            math.ceil(budget / startup_period),
            "the plan's time to load, and a quarter more for the warm-up; kubelet kills a pod that takes longer",
        ),
        "ready": Probe(
            "/readyz",
            "has answered, or moved on with its work, lately; not draining",
            5,
            5,
            2,
            "the window is in the answer already; a second failure only rules out a lost packet",
        ),
        "live": Probe(
            "/livez",
            "the process lives, the engine is not dead, running requests make progress",
            10,
            5,
            3,
            "the patience is in the answer already; three failures leave time for a machine that is out of breath",
        ),
    }
