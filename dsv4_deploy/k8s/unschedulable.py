"""Why the scheduler finds no node, in words that lead somewhere.

In: the scheduler's message ("0/5 nodes are available: 2 Insufficient amd.com/gpu, ..."). Out: one line per reason, the
most frequent first, each with what to do. The reasons' wording:
https://github.com/kubernetes/kubernetes/tree/master/pkg/scheduler/framework/plugins
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Reason:
    """`nodes` have this reason, 0 when it is not about single nodes."""

    nodes: int
    text: str
    fix: str


_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"Insufficient amd\.com/|cannot allocate all claims",
        "Too few free GPUs on these nodes: remove other pods, or use a smaller tensorParallelSize.",
    ),
    (
        r"untolerated taint.*(amd-gpu-unhealthy|amd-dcm)",
        "The GPUs are being repaired or repartitioned; never tolerate that. Wait, or look at the node.",
    ),
    (r"untolerated taint", "Tolerate that taint if the node is meant for this: scheduling.tolerations."),
    (
        r"didn't match Pod's node affinity|didn't match.*selector",
        "Wrong card, a partitioned card, or no labels. kubectl get nodes -L amd.com/gpu.device-id,"
        "amd.com/gpu.compute-memory-partition shows which; gpu.product chooses the card.",
    ),
    (
        r"Insufficient memory",
        "The nodes have less free memory than the pod asks for: resources.memoryPerGpuGiB and model.sizeGiB.",
    ),
    (r"Insufficient cpu", "The nodes have fewer free processors than asked for: resources.cpuPerGpu."),
    (r"Insufficient ", "The nodes lack that resource."),
    (
        r"unbound immediate PersistentVolumeClaims|persistentvolumeclaim .* not found|bind.*PersistentVolume",
        "The claim does not exist or has no volume: kubectl get pvc. model.source.claim names it; a claim of the chart "
        "needs a storage class that can make it.",
    ),
    (
        r"volume node affinity conflict",
        "The volume lies on another node than the GPUs: use one that all nodes reach.",
    ),
    (
        r"topology spread|pod (anti-)?affinity|anti-affinity rules",
        "scheduling.topologySpreadConstraints or podAntiAffinity allow no node.",
    ),
    (r"unschedulable|cordoned", "The nodes are cordoned: kubectl uncordon NODE."),
)


def explain(message: str) -> list[Reason]:
    """The reasons in the scheduler's message; one with its whole text when it is of another form."""
    body = re.sub(r"^\d+/\d+ nodes are available:\s*", "", message.strip()).partition(" preemption:")[0]
    found = []
    # Taints are written in braces and may hold commas.
    for part in re.split(r",\s*(?![^{]*})", body.rstrip(". ")):
        match = re.match(r"(\d+) (.*)", part.strip())
        text = (match[2] if match else part).strip().rstrip(".")
        if text:
            found.append(Reason(int(match[1]) if match else 0, text, _fix(text)))
    return sorted(found, key=lambda reason: -reason.nodes)


def _fix(text: str) -> str:
    for pattern, fix in _KNOWN:
        if re.search(pattern, text):
            return fix
    return ""
