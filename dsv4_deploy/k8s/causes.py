"""What is wrong with a pod: one named cause from its status and events, never "timed out".

In: a pod and its events, as JSON. Out: a `Cause`, or None while it is merely on its way. Causes are asked in the order
in which they happen in a pod's life. Reasons and their meaning:
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ and .../tasks/debug/debug-application/debug-pods/
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from dsv4_deploy.k8s.api import Object
from dsv4_deploy.k8s.unschedulable import explain

Name = Literal[
    "unschedulable", "image", "config", "volume", "oom", "probe", "crash", "evicted", "download", "quota"
]


@dataclasses.dataclass(frozen=True)
class Cause:
    """`patience_s` is how long it may go away by itself before it counts; 0 for what has happened already."""

    name: Name
    pod: str
    what: str
    why: str
    fix: str
    detail: str = ""
    patience_s: float = 0.0


# A registry may be slow, an autoscaler needs minutes for a node, a volume is attached elsewhere for a while.
IMAGE_PATIENCE_S = 60.0
NODE_PATIENCE_S = 180.0
VOLUME_PATIENCE_S = 180.0

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}


def of_pod(pod: Object, events: Sequence[Object]) -> Cause | None:
    """The cause of this pod's trouble, None when there is none."""
    for look in (_scheduling, _evicted, _volumes, _containers):
        cause = look(pod, events)
        if cause is not None:
            return cause
    return None


def of_workload(events: Sequence[Object]) -> Cause | None:
    """Why a workload cannot even create its pods: quota, admission, security policy."""
    failed = _last(events, "FailedCreate")
    if failed is None:
        return None
    message = str(failed.get("message", ""))
    name = failed.get("involvedObject", {}).get("name", "")
    if "quota" in message:
        fix = "Raise the quota, or ask for less: replicas, tensorParallelSize, resources.memoryPerGpuGiB."
    elif "PodSecurity" in message or "violates" in message:
        fix = (
            "The namespace's Pod Security label forbids it. The chart's defaults meet the level `restricted`."
        )
    else:
        fix = "The message names what refused it."
    return Cause(
        "quota", str(name), "the cluster refuses to create the pods", message, fix, patience_s=NODE_PATIENCE_S
    )


def of_job(job: Object, pods: Sequence[Object]) -> Cause | None:
    """Why the download of the weights has failed for good."""
    failed = next(
        (
            one
            for one in job.get("status", {}).get("conditions", [])
            if one["type"] == "Failed" and one["status"] == "True"
        ),
        None,
    )
    if failed is None:
        return None
    last = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
    message = ""
    for status in last.get("status", {}).get("containerStatuses", []) if last else []:
        ended = (
            status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated") or {}
        )
        message = str(ended.get("message", "")) or message
    return Cause(
        "download",
        job["metadata"]["name"],
        "the weights could not be fetched",
        f"{failed.get('reason', 'The Job failed')}: {failed.get('message', '')}",
        "Its log is below. A new attempt goes on where this one stopped: kubectl delete job, then run `up` again.",
        detail=message,
    )


def _scheduling(pod: Object, events: Sequence[Object]) -> Cause | None:
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition["status"] != "False":
        return None
    reasons = explain(str(condition.get("message", "")))
    if not reasons:
        return None
    lines = [f"{reason.nodes} node(s): {reason.text}" if reason.nodes else reason.text for reason in reasons]
    fixes = list(dict.fromkeys(reason.fix for reason in reasons if reason.fix))
    return Cause(
        "unschedulable",
        _name(pod),
        "no node takes the pod",
        "; ".join(lines) + ".",
        " ".join(fixes) or "kubectl describe pod shows the whole message.",
        patience_s=NODE_PATIENCE_S,
    )


def _evicted(pod: Object, events: Sequence[Object]) -> Cause | None:
    status = pod.get("status", {})
    if status.get("phase") != "Failed" or not status.get("reason"):
        return None
    return Cause(
        "evicted",
        _name(pod),
        f"the pod was ended by its node: {status['reason']}",
        str(status.get("message", "")),
        "Evicted: scratch space or memory of the node ran out (resources.scratchGiB, cache.sizeGiB). "
        "UnexpectedAdmissionError: a GPU disappeared between scheduling and start; look at the node.",
    )


def _volumes(pod: Object, events: Sequence[Object]) -> Cause | None:
    if any(_statuses(pod)) and not _waiting_for_volumes(pod):
        return None
    failed = _last(events, "FailedMount", "FailedAttachVolume")
    if failed is None:
        return None
    message = str(failed.get("message", ""))
    fix = "kubectl describe pod and pvc show more."
    if "Multi-Attach" in message:
        fix = "A ReadWriteOnce volume is attached elsewhere: use ReadWriteMany, or wait until the other pod has gone."
    elif "hostPath type check failed" in message or "is not a directory" in message:
        fix = "The directory is not there on that node: model.source.hostPath or cache.hostPath."
    elif "not found" in message:
        fix = "A claim, Secret or ConfigMap that the pod mounts does not exist in this namespace."
    return Cause(
        "volume", _name(pod), "a volume cannot be mounted", message, fix, patience_s=VOLUME_PATIENCE_S
    )


def _containers(pod: Object, events: Sequence[Object]) -> Cause | None:
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        if reason in _IMAGE:
            return _image(pod, status, reason, message, events)
        if reason in _CONFIG:
            fix = (
                "Create that Secret or ConfigMap in the namespace, with that key."
                if "not found" in message
                else ""
            )
            return Cause(
                "config", _name(pod), f"the container {status['name']} cannot be made ({reason})", message,
                fix or "The message names what is wrong.", patience_s=IMAGE_PATIENCE_S,
            )  # fmt: skip
        ended = (
            status.get("lastState", {}).get("terminated") or status.get("state", {}).get("terminated") or {}
        )
        # Killed by a probe, the supervisor gets SIGTERM and ends in good order, with 0.
        if ended and (ended.get("exitCode", 0) != 0 or _probe_kill(status["name"], events)):
            return _ended(pod, status, ended, events)
    return None


def _probe_kill(container: str, events: Sequence[Object]) -> Object | None:
    """The kubelet's event of a kill because of a probe: "Container server failed startup probe, will be restarted"."""
    words = re.compile(rf"Container {re.escape(container)} failed \w+ probe")
    kills = (event for event in reversed(events) if event.get("reason") == "Killing")
    return next((event for event in kills if words.search(str(event.get("message")))), None)


def _image(pod: Object, status: Object, reason: str, message: str, events: Sequence[Object]) -> Cause:
    failed = [
        event
        for event in events
        if event.get("reason") == "Failed" and "pull" in str(event.get("message", "")).lower()
    ]
    words = str(failed[-1]["message"]) if failed else message
    lower = words.lower()
    if reason == "InvalidImageName":
        fix = "Correct image.repository, image.tag or image.digest."
    elif "unauthorized" in lower or "denied" in lower or "authentication" in lower:
        fix = "The registry wants credentials: kubectl create secret docker-registry, and imagePullSecrets names it."
    elif "not found" in lower or "manifest unknown" in lower:
        fix = "There is no such image or tag. None of this bundle is published: build it and push it to your registry."
    elif "x509" in lower:
        fix = "The node does not trust the registry's certificate: install its CA on the nodes."
    elif "no space left" in lower:
        fix = "The node's disk is full; a ROCm image needs tens of gigabytes."
    else:
        fix = "kubectl describe pod shows the registry's whole answer."
    image = str(status.get("image", ""))
    return Cause(
        "image",
        _name(pod),
        f"the image {image} cannot be pulled ({reason})",
        words,
        fix,
        patience_s=IMAGE_PATIENCE_S,
    )


def _ended(pod: Object, status: Object, ended: Object, events: Sequence[Object]) -> Cause:
    container, code = status["name"], ended.get("exitCode")
    message = str(ended.get("message", "")).strip()
    if ended.get("reason") == "OOMKilled":
        return Cause(
            "oom",
            _name(pod),
            f"the container {container} was killed because it used more memory than its limit",
            f"OOMKilled, exit code {code}. Memory of the host, not of the GPU: the weights' page cache, /dev/shm and "
            "pinned tables count.",
            "Raise resources.memoryPerGpuGiB, or model.sizeGiB if it is not that of the model.",
            detail=message,
        )
    probe = _probe_kill(container, events)
    if probe is not None and not message:
        text = str(probe["message"])
        which = re.search(r"(startup|liveness|readiness) probe", text)
        fix = (
            "Loading took longer than probes.startup.budgetSeconds. Raise it; keep compiled kernels (cache.type claim)."
            if which and which[1] == "startup"
            else "The engine hung: see docs/runbooks/DSV4EngineDown.md."
        )
        unhealthy = _last(events, "Unhealthy")
        detail = str(unhealthy["message"]) if unhealthy else ""
        return Cause(
            "probe",
            _name(pod),
            f"the kubelet killed {container} because of its {which[1] if which else ''} probe",
            text,
            fix,
            detail,
        )
    restarts = int(status.get("restartCount", 0))
    return Cause(
        "crash",
        _name(pod),
        f"the container {container} ended with exit code {code}"
        + (f", {restarts} time(s) so far" if restarts else ""),
        "What it said last is below." if message else f"It left no message ({ended.get('reason', 'Error')}).",
        "The first line has the id of a known cause, with its fix."
        if message
        else f"kubectl logs {_name(pod)} -c {container} --previous",
        detail=message,
    )


def _statuses(pod: Object) -> Iterable[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _waiting_for_volumes(pod: Object) -> bool:
    return all(
        (status.get("state", {}).get("waiting") or {}).get("reason")
        in ("ContainerCreating", "PodInitializing")
        for status in _statuses(pod)
    )


def _condition(pod: Object, kind: str) -> Object | None:
    return next((one for one in pod.get("status", {}).get("conditions", []) if one["type"] == kind), None)


def _last(events: Sequence[Object], *reasons: str) -> Object | None:
    return next((event for event in reversed(events) if event.get("reason") in reasons), None)


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
