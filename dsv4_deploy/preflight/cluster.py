"""Checks of a cluster against the deployment: version, nodes and cards, GPUs, memory, storage, rights.

In: ClusterFacts and the plan. Out: Findings, in the order in which a pod would meet them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsv4_deploy.facts.cluster import NEVER_TOLERATED, WHOLE, ClusterFacts, Node
from dsv4_deploy.plan.settings import Plan
from dsv4_deploy.preflight.finding import Finding, fail, ok, warn

OLDEST_MINOR = 30
GIB = 2**30


def examine(facts: ClusterFacts, plan: Plan, namespace: str) -> list[Finding]:
    """Every check's finding."""
    return [_version(facts), *_nodes(facts, plan), *_storage(facts), *_rights(facts, namespace)]


def _version(facts: ClusterFacts) -> Finding:
    match = re.match(r"v?1\.(\d+)", facts.version)
    if match and int(match[1]) < OLDEST_MINOR:
        return fail(
            "kubernetes",
            f"Kubernetes {facts.version}",
            "The chart needs 1.30: the drain uses the kubelet's own sleep hook.",
            "Upgrade the cluster.",
        )
    return ok("kubernetes", f"Kubernetes {facts.version}")


def _nodes(facts: ClusterFacts, plan: Plan) -> Iterator[Finding]:
    if plan.device == "cpu":
        yield ok("cluster-gpus", "the no-GPU mode needs no GPU")
        return
    if facts.nodes is None:
        yield warn(
            "cluster-gpus",
            "nodes may not be listed",
            "Whether the GPUs are there cannot be seen.",
            "Ask for `list nodes`.",
        )
        return
    if not facts.nodes:
        yield fail(
            "cluster-gpus",
            f"no node offers AMD GPUs ({facts.other_nodes} others)",
            "Neither the resource amd.com/gpu nor AMD's labels are there.",
            "Install AMD's GPU operator, or the device plugin and the node labeller: https://github.com/ROCm/gpu-operator",
        )
        return
    wanted = plan.card.name if plan.card else ""
    fitting = []
    for node in facts.nodes:
        finding = _node(node, wanted)
        if finding is None:
            fitting.append(node)
        else:
            yield finding
    yield _capacity(fitting, plan, wanted)


def _node(node: Node, wanted: str) -> Finding | None:
    """Why pods cannot go to this node, None when they can."""
    name = f"node {node.name}"
    never = [taint for taint in node.taints if taint.startswith(NEVER_TOLERATED)]
    if not node.ready or node.cordoned:
        return warn(
            "cluster-node",
            f"{name} is {'cordoned' if node.cordoned else 'not ready'}",
            "No pod goes there.",
            "kubectl describe node",
        )
    if never:
        return warn(
            "cluster-node",
            f"{name} has the taint {never[0]}",
            "Its GPUs are broken or being repartitioned.",
            "Wait, or look at the node.",
        )
    if node.partitioned or (node.partition and node.partition != WHOLE):
        what = node.partition or ", ".join(node.partitioned)
        return warn(
            "cluster-node", f"{name} is partitioned ({what})", "Tensor parallelism needs whole cards.",
            "Set it back to SPX/NPS1 with AMD's device config manager.", "W34",
        )  # fmt: skip
    if node.device_id is None:
        return warn(
            "cluster-node", f"{name} has GPUs and no label gpu.device-id", "The chart chooses nodes by that label.",
            "Run AMD's node labeller, or set gpu.matchDeviceId to false and name the nodes: scheduling.nodeSelector.",
        )  # fmt: skip
    if node.virtual:
        return warn(
            "cluster-node", f"{name} has virtual functions ({node.device_id})",
            "Flash died at start on 8 MI300X virtual functions in a public report.",
            "gpu.virtualFunctions: true takes them nevertheless.", link="https://github.com/vllm-project/vllm/issues/48266",
        )  # fmt: skip
    if node.card != wanted:
        return ok("cluster-node", f"{name} has {node.card or node.device_id}, not {wanted}: left alone")
    return None


def _capacity(nodes: list[Node], plan: Plan, wanted: str) -> Finding:
    if not nodes:
        return fail(
            "cluster-gpus", f"no node has whole, usable {wanted}", "The pods would stay Pending.",
            "See the findings above, or plan for another card: --gpu NAME:8",
        )  # fmt: skip
    asked = plan.deployment.memory_request_bytes or 0
    roomy = [node for node in nodes if node.memory_bytes >= asked]
    if not roomy:
        most = max(node.memory_bytes for node in nodes)
        return fail(
            "cluster-memory",
            f"the nodes have up to {most / GIB:.0f} GiB of memory, and a pod needs {asked / GIB:.0f} GiB",
            "The page cache of the weights counts against the limit while they load.",
            "Use nodes with more memory.",
            "F11",
        )
    if max(node.gpus for node in roomy) < plan.tp:
        return fail(
            "cluster-gpus", f"no node has {plan.tp} {wanted} (the largest has {max(node.gpus for node in roomy)})",
            "All ranks of a pod are on one node.", f"Use --tp {max(node.gpus for node in roomy)} or less.", "W37",
        )  # fmt: skip
    free = [node.free for node in roomy if node.free is not None]
    places = sum(max(0, number) // plan.tp for number in free)
    replicas = plan.deployment.replicas or 1
    if free and places < replicas:
        return warn(
            "cluster-gpus", f"{places} of {replicas} pods find {plan.tp} free {wanted} right now",
            "Other pods hold the rest.", "Free GPUs, or use fewer replicas.", "W37",
        )  # fmt: skip
    total = sum(node.gpus for node in roomy)
    return ok(
        "cluster-gpus", f"{total} {wanted} on {len(roomy)} node(s), {sum(free)} free; a pod takes {plan.tp}"
    )


def _storage(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.classes is None:
        yield warn(
            "cluster-storage",
            "storage classes may not be listed",
            "",
            "Name one that you know in the values.",
        )
    elif not facts.classes:
        yield warn(
            "cluster-storage", "there is no storage class", "A claim of the chart would stay Pending.",
            "Use a claim that exists, or hostPath.",
        )  # fmt: skip
    elif facts.default_class is None:
        yield warn(
            "cluster-storage", f"no default storage class ({', '.join(facts.classes)})",
            "A claim without a class stays Pending.", "Name one: model.download.persistence.storageClassName.",
        )  # fmt: skip
    else:
        yield ok(
            "cluster-storage",
            f"default storage class {facts.default_class} ({facts.classes[facts.default_class]})",
        )


def _rights(facts: ClusterFacts, namespace: str) -> Iterator[Finding]:
    if facts.missing_rights:
        yield fail(
            "cluster-rights", f"in {namespace} you may not: {', '.join(facts.missing_rights)}",
            "helm or the commands that watch would be refused.", "Ask whoever runs the cluster for these rights.",
        )  # fmt: skip
    else:
        yield ok("cluster-rights", f"every right that is needed in {namespace}")
