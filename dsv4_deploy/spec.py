"""ServingSpec: one deployment as somebody asked for it, before anything is known about the machine.

It goes into `plan.make_plan` together with the facts. None always means "you choose", and the plan says what
it chose and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Device = Literal["auto", "rocm", "cpu"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What surrounds the server in a container or a pod. In a spec None means "you choose"; in a plan
    everything but `runtime_class`, `memory_limit_bytes` and `free_gpus` has a value.

    Times are in seconds, sizes in bytes. `gpu_resource` is the extended resource that a pod asks for;
    `free_gpus` is how many of them the cluster has left; `service_links` is the pod's enableServiceLinks;
    `egress` whether the pod may reach the model hub, `cached` whether the weights are on its volume already.
    """

    name: str | None = None
    replicas: int | None = None
    gpu_resource: str | None = None
    free_gpus: int | None = None
    runtime_class: str | None = None
    shm_bytes: int | None = None
    memory_request_bytes: int | None = None
    memory_limit_bytes: int | None = None
    startup_budget_s: int | None = None
    liveness_timeout_s: int | None = None
    pre_stop_s: int | None = None
    grace_s: int | None = None
    max_surge: int | None = None
    max_unavailable: int | None = None
    service_links: bool | None = None
    egress: bool | None = None
    cached: bool | None = None


@dataclasses.dataclass(frozen=True)
class ServingSpec:
    """What is to be served, where, and what the operator wants different from the plan's own choices.

    `model` is a catalog name or the path of a checkpoint directory. `max_model_len` is in tokens, or "auto"
    for the longest that fits. `overrides` maps vLLM flag names to their value as text, or to True/False for
    a switch (see `plan.overrides.parse`); `env` are variables that the operator names for the server.
    `allow` are the rules that may not refuse, change or warn. `gpu` and `gpu_count` name the hardware to
    plan for where it is not this host's; `vllm` and `image` the software.
    """

    model: str | None = None
    tp: int | None = None
    device: Device = "auto"
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    max_model_len: int | Literal["auto"] | None = None
    overrides: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    profile: str | None = None
    allow: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_count: int | None = None
    vllm: str | None = None
    image: str | None = None
    deployment: Deployment = dataclasses.field(default_factory=Deployment)

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain JSON-able data, for the state file."""
        plain = dataclasses.asdict(self)
        return {**plain, "overrides": dict(self.overrides), "env": dict(self.env), "allow": list(self.allow)}
