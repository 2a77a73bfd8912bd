"""Target `helm-values`: what differs from the chart's defaults (helm/dsv4/values.yaml) for one deployment.

The pod plans again, for the GPUs that it really got; so the values hold what was asked for, and from the
plan only what Kubernetes itself has to know (GPUs, memory, time). The chart's own profiles are this output.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from dsv4_deploy import catalog
from dsv4_deploy.errors import refused
from dsv4_deploy.plan.plan import ENGRAM_BYTES
from dsv4_deploy.plan.watch import make_watch, probes
from dsv4_deploy.render import quoting
from dsv4_deploy.render.source import Source, checked, head

GIB = 2**30

Values = dict[str, Any]


def render(source: Source) -> str:
    """The file's text. Raises DeployError for a card that the chart cannot place."""
    lines = head(source, "Values for the Helm chart helm/dsv4.")
    lines += quoting.comment(
        f"helm install {source.plan.deployment.name or 'dsv4'} helm/dsv4 --values THIS-FILE"
    )
    return "\n".join([*lines, "", *_lines(values(source))]) + "\n"


def values(source: Source) -> Values:
    """The values as nested mappings; a value that needs a reason is a tuple (value, reason)."""
    checked(source)
    plan, spec = source.plan, source.spec
    watch = make_watch(plan)
    asked, decided = spec.deployment, plan.deployment
    budget = asked.startup_budget_s or probes(watch, plan.ready_timeout_s)["startup"].budget_s
    found: Values = {
        "model": _model(source),
        "tensorParallelSize": (plan.tp, "ranks, and so GPUs of one pod"),
        "replicas": decided.replicas or 1,
        "gpu": {"product": (_product(source), "decides by device id which nodes the pods may go to")},
        "probes": {
            "startup": {
                "budgetSeconds": (
                    budget,
                    f"the {plan.ready_timeout_s} s that the plan gives loading, and a quarter more for the warm-up",
                )
            }
        },
        "drain": {
            "preStopSeconds": decided.pre_stop_s if decided.pre_stop_s is not None else 15,
            "timeoutSeconds": (int(watch.drain_s), "running requests are finished before vLLM is stopped"),
        },
    }
    settings = {name: value for name, value in spec.overrides.items() if name != "shutdown-timeout"}
    if "shutdown-timeout" in spec.overrides:
        found["drain"]["shutdownSeconds"] = (plan.shutdown_timeout_s, "--set shutdown-timeout")
    if plan.profile != "default":
        found["planProfile"] = plan.profile
    if spec.max_model_len is not None:
        flags = {flag.name: flag for flag in plan.flags}
        if "max-model-len" in flags:
            found["maxModelLen"] = (int(str(flags["max-model-len"].value)), flags["max-model-len"].reason)
    if settings:
        found["settings"] = (dict(sorted(settings.items())), "flags that you set")
    env = {
        setting.name: str(setting.value) for setting in plan.env if setting.theirs or setting.name in spec.env
    }
    if env:
        found["env"] = (dict(sorted(env.items())), "variables that you set")
    if spec.allow:
        found["allowRules"] = list(spec.allow)
    if spec.image:
        found["image"] = _image(spec.image)
    resources = _resources(source)
    if resources:
        found["resources"] = resources
    if asked.gpu_resource:
        found["gpu"]["resourceName"] = asked.gpu_resource
    if asked.max_unavailable:
        found["rollout"] = {"maxUnavailable": asked.max_unavailable}
    if asked.runtime_class:
        found["scheduling"] = {"runtimeClassName": asked.runtime_class}
    return found


def _model(source: Source) -> Values:
    plan, spec = source.plan, source.spec
    size = math.ceil(plan.weight_bytes / GIB)
    if plan.device == "cpu":
        return {"name": "tiny", "sizeGiB": 0, "source": {"type": "tiny"}}
    entry = catalog.models().get(spec.model or plan.served_name)
    if entry is not None and entry.repo is not None:
        return {
            "name": entry.name,
            "sizeGiB": (size, "the memory limit and the claim of a download follow from it"),
            "source": {"type": ("claim", "or download, hub, hostPath, image"), "claim": entry.name},
            "download": {"repository": entry.repo},
        }
    name = re.sub(r"[^a-z0-9.-]+", "-", pathlib.PurePath(plan.model).name.lower()).strip("-.")
    return {
        "name": name or "model",
        "sizeGiB": (size, "the memory limit follows from it"),
        "source": {"type": ("hostPath", "the directory must be there on each node"), "hostPath": plan.model},
    }


def _product(source: Source) -> str:
    plan = source.plan
    if plan.device == "cpu":
        return "none"
    if plan.card is None or not plan.card.target:
        raise refused(
            f"the chart cannot place pods on {plan.card.name if plan.card else 'an unknown card'}",
            why="It chooses nodes by the device ids of MI300X, MI308X and MI325X.",
            fix="Plan for one of these: --gpu mi300x:8",
        )
    return plan.card.name.upper()


def _image(image: str) -> Values:
    """An image's name in the chart's three parts."""
    rest, _, digest = image.partition("@")
    directory, slash, last = rest.rpartition("/")
    repository, _, tag = last.partition(":")
    return {"repository": f"{directory}{slash}{repository}", "tag": tag, "digest": digest}


def _resources(source: Source) -> Values:
    plan, asked = source.plan, source.spec.deployment
    found: Values = {}
    if asked.shm_bytes:
        found["shmGiB"] = (math.ceil((plan.deployment.shm_bytes or 0) / GIB), "shared memory of the ranks")
    if plan.memory and plan.memory.layout.traits.model_type == "deepseek_v41":
        found["extraMemoryGiB"] = (
            math.ceil(ENGRAM_BYTES / GIB),
            "V4.1 keeps its Engram tables in main memory",
        )
    if plan.device == "cpu":
        found |= {
            "memoryPerGpuGiB": (4, "of each rank of the no-GPU mode"),
            "cpuPerGpu": 1,
            "shmGiB": 1,
            "scratchGiB": 2,
        }
    return found


def _lines(mapping: Values, indent: str = "") -> Iterator[str]:
    for key, held in mapping.items():
        value, reason = held if isinstance(held, tuple) else (held, "")
        if reason:
            yield from quoting.comment(reason, indent)
        name = key if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key) else quoting.yaml(key)
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list):
            yield f"{indent}{name}: [{', '.join(quoting.yaml(item) for item in value)}]"
        elif isinstance(value, bool):
            yield f"{indent}{name}: {str(value).lower()}"
        elif isinstance(value, int):
            yield f"{indent}{name}: {value}"
        else:
            yield f"{indent}{name}: {quoting.yaml(value)}"
