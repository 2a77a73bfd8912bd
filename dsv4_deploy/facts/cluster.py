"""What a cluster offers: nodes with AMD GPUs, their labels, taints and free GPUs; storage classes; rights of the user.

In: an Api. Out: a ClusterFacts. Reads only; what the user may not read is None, which is a fact as well. Labels:
https://github.com/ROCm/k8s-device-plugin/tree/master/cmd/k8s-node-labeller
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from dsv4_deploy.catalog import card_by_device_id
from dsv4_deploy.errors import DeployError

GPU_RESOURCE = "amd.com/gpu"
LABEL_PREFIXES = ("amd.com", "beta.amd.com")
PARTITION_LABELS = ("amd.com/gpu.compute-memory-partition", "amd.com/compute-memory-partition")
WHOLE = "spx_nps1"
NEVER_TOLERATED = ("amd-gpu-unhealthy", "amd-dcm")

# What `up`, `status`, `logs`, `validate` and `down` need: verb, resource, API group.
RIGHTS = (
    ("create", "deployments", "apps"),
    ("patch", "deployments", "apps"),
    ("list", "deployments", "apps"),
    ("list", "replicasets", "apps"),
    ("create", "services", ""),
    ("create", "serviceaccounts", ""),
    ("create", "secrets", ""),
    ("list", "secrets", ""),
    ("list", "pods", ""),
    ("get", "pods/log", ""),
    ("create", "pods/portforward", ""),
    ("list", "events", ""),
    ("create", "networkpolicies", "networking.k8s.io"),
    ("create", "poddisruptionbudgets", "policy"),
    ("create", "persistentvolumeclaims", ""),
    ("create", "jobs", "batch"),
)


class Reader(Protocol):
    """The part of k8s.api.Api that is needed here."""

    def items(self, path: str, **query: str) -> list[dict[str, Any]]: ...

    def get(self, path: str, **query: str) -> dict[str, Any] | None: ...

    def allowed(self, verb: str, resource: str, namespace: str, group: str = "") -> bool: ...


@dataclasses.dataclass(frozen=True)
class Node:
    """A node with AMD GPUs. `card` is the catalog's name of it, None when no label says; `virtual` when the device id
    is that of a virtual function. `gpus` are allocatable, `free` those that no pod has asked for, None when pods cannot
    be read. `partition` is the label's value, `partitioned` names the resources of partitions that the node offers.
    `memory_bytes` is allocatable memory."""

    name: str
    ready: bool
    cordoned: bool
    device_id: str | None
    card: str | None
    virtual: bool
    gpus: int
    free: int | None
    partition: str | None
    partitioned: tuple[str, ...]
    taints: tuple[str, ...]
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class ClusterFacts:
    """`nodes` None: they may not be listed. `classes` maps storage classes to their provisioner, `default_class` is the
    default one. `missing_rights` are "verb resource"; `apis` the API groups that are served."""

    version: str
    nodes: tuple[Node, ...] | None
    other_nodes: int
    classes: Mapping[str, str] | None
    default_class: str | None
    missing_rights: tuple[str, ...]
    apis: frozenset[str]


def read(api: Reader, namespace: str) -> ClusterFacts:
    """Raises DeployError when the cluster does not answer at all."""
    version = str((api.get("/version") or {}).get("gitVersion", "unknown"))
    nodes = _allowed(api, "/api/v1/nodes")
    pods = _allowed(api, "/api/v1/pods")
    classes = _allowed(api, "/apis/storage.k8s.io/v1/storageclasses")
    with_gpus = None if nodes is None else tuple(node for item in nodes if (node := _node(item, pods)))
    return ClusterFacts(
        version=version,
        nodes=with_gpus,
        other_nodes=len(nodes or ()) - len(with_gpus or ()),
        classes=None
        if classes is None
        else {item["metadata"]["name"]: item.get("provisioner", "") for item in classes},
        default_class=next((item["metadata"]["name"] for item in classes or () if _is_default(item)), None),
        missing_rights=tuple(
            f"{verb} {resource}"
            for verb, resource, group in RIGHTS
            if not api.allowed(verb, resource, namespace, group)
        ),
        apis=frozenset(group["name"] for group in (api.get("/apis") or {}).get("groups", [])),
    )


def _allowed(api: Reader, path: str) -> list[dict[str, Any]] | None:
    try:
        return api.items(path)
    except DeployError as error:
        if "not allowed" in error.what:
            return None
        raise


def _node(item: dict[str, Any], pods: Iterable[dict[str, Any]] | None) -> Node | None:
    """The node, None when it has no AMD GPU."""
    name = item["metadata"]["name"]
    labels: dict[str, str] = item["metadata"].get("labels", {})
    offered: dict[str, str] = item.get("status", {}).get("allocatable", {})
    partitioned = tuple(
        sorted(
            key for key in offered if re.fullmatch(r"amd\.com/[a-z]+px_nps\d", key) and offered[key] != "0"
        )
    )
    device = next(
        (labels[key] for prefix in LABEL_PREFIXES if (key := f"{prefix}/gpu.device-id") in labels), None
    )
    if GPU_RESOURCE not in offered and not partitioned and device is None:
        return None
    card = card_by_device_id(device) if device else None
    gpus = int(offered.get(GPU_RESOURCE, "0"))
    taken = (
        None
        if pods is None
        else sum(_asked(pod) for pod in pods if pod.get("spec", {}).get("nodeName") == name)
    )
    spec = item.get("spec", {})
    return Node(
        name=name,
        ready=any(
            one["type"] == "Ready" and one["status"] == "True"
            for one in item.get("status", {}).get("conditions", [])
        ),
        cordoned=bool(spec.get("unschedulable")),
        device_id=device,
        card=card[0].name if card else None,
        virtual=bool(card and card[1]),
        gpus=gpus,
        free=None if taken is None else gpus - taken,
        partition=next((labels[key] for key in PARTITION_LABELS if key in labels), None),
        partitioned=partitioned,
        taints=tuple(f"{taint['key']}:{taint['effect']}" for taint in spec.get("taints", [])),
        memory_bytes=quantity(offered.get("memory", "0")),
    )


def _asked(pod: dict[str, Any]) -> int:
    """GPUs that a pod holds; a finished pod holds none."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    containers = pod.get("spec", {}).get("containers", [])
    return sum(int(one.get("resources", {}).get("limits", {}).get(GPU_RESOURCE, "0")) for one in containers)


def quantity(text: str) -> int:
    """Kubernetes' quantity of bytes: "512Gi", "65G", "123456Ki", "1e9"."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|m)?", text)
    if match is None:
        return 0
    unit = match[2] or ""
    if unit == "m":
        return int(float(match[1]) / 1000)
    power = "kMGTPE".find(unit[:1].replace("K", "k")) + 1 if unit else 0
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)


def _is_default(item: dict[str, Any]) -> bool:
    annotations = item["metadata"].get("annotations", {})
    return str(annotations.get("storageclass.kubernetes.io/is-default-class")) == "true"
