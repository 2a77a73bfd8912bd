"""How a release is doing: its workload, its pods, and what is wrong with each, read from the API once.

In: an Api and a Release. Out: a `View`. Nothing is waited for here and nothing is changed.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from dsv4_deploy.k8s import causes
from dsv4_deploy.k8s.api import Api, Object
from dsv4_deploy.k8s.causes import Cause
from dsv4_deploy.k8s.release import Release

SERVER = "app.kubernetes.io/component=server"
LOADING = "loading"
DOWNLOAD = "app.kubernetes.io/component=download"


@dataclasses.dataclass(frozen=True)
class Pod:
    """One pod for people. `state` is a few words, `age_s` its age in seconds, `cause` what is wrong."""

    name: str
    node: str
    ready: bool
    state: str
    restarts: int
    age_s: float | None
    leaving: bool
    current: bool
    cause: Cause | None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class View:
    """`workload` is "Deployment/NAME" or "LeaderWorkerSet/NAME", empty when there is none; `wanted` and `updated` count
    pods, `updated` those of the newest template that are ready. `cause` concerns the release as a whole."""

    workload: str
    wanted: int
    updated: int
    pods: tuple[Pod, ...]
    download: str
    cause: Cause | None

    @property
    def complete(self) -> bool:
        """Every wanted pod is ready and of the newest template, and the controller has seen that template."""
        return bool(self.workload) and self.updated >= self.wanted

    @property
    def causes(self) -> list[Cause]:
        """What is wrong, the release's own first. Pods on their way out have no say."""
        own = [self.cause] if self.cause else []
        return own + [pod.cause for pod in self.pods if pod.cause and not pod.leaving]


def look(api: Api, release: Release) -> View:
    """Raises DeployError when the API does not answer or does not allow it."""
    space = f"/namespaces/{release.namespace}"
    servers = {"labelSelector": f"{release.selector},{SERVER}"}
    deployments = api.items(f"/apis/apps/v1{space}/deployments", **servers)
    groups = (
        []
        if deployments
        else api.items(f"/apis/leaderworkerset.x-k8s.io/v1{space}/leaderworkersets", **servers)
    )
    pods = api.items(f"/api/v1{space}/pods", **servers)
    events = _events(api, release)
    jobs = api.items(f"/apis/batch/v1{space}/jobs", labelSelector=f"{release.selector},{DOWNLOAD}")
    job_pods = (
        api.items(f"/api/v1{space}/pods", labelSelector=f"{release.selector},{DOWNLOAD}") if jobs else []
    )
    workload = next(iter([*deployments, *groups]), None)
    newest = _newest_template(api, space, servers, deployments)
    views = tuple(_pod(pod, events, newest) for pod in sorted(pods, key=lambda pod: pod["metadata"]["name"]))
    if workload is None:
        return View("", 0, 0, views, _download(jobs), None)
    name = workload["metadata"]["name"]
    cause = next(
        (found for job in jobs if (found := causes.of_job(job, job_pods))), None
    ) or _waiting_download(job_pods, events)
    if cause is None and not pods:
        own = [event for event in events if str(event["involvedObject"].get("name", "")).startswith(name)]
        cause = causes.of_workload(own)
    spec, status = workload.get("spec", {}), workload.get("status", {})
    # LeaderWorkerSets of older releases do not say which generation they have seen.
    generation = workload["metadata"].get("generation", 0)
    seen = status.get("observedGeneration", generation if groups else 0) >= generation
    ready = min(status.get("updatedReplicas", 0), status.get("readyReplicas", 0)) if seen else 0
    if int(status.get("replicas", 0)) > int(spec.get("replicas", 1)):
        ready = 0  # pods of the old template are still there
    return View(
        f"{workload['kind']}/{name}", int(spec.get("replicas", 1)), int(ready), views, _download(jobs), cause
    )


def _waiting_download(pods: Sequence[Object], events: Sequence[Object]) -> Cause | None:
    """Why a pod of the download does not start. One that has failed is the Job's to try again."""
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Pending" and "deletionTimestamp" not in pod["metadata"]:
            cause = causes.of_pod(pod, _of(pod, events))
            if cause is not None:
                return cause
    return None


def _of(pod: Object, events: Sequence[Object]) -> list[Object]:
    return [event for event in events if event["involvedObject"].get("name") == pod["metadata"]["name"]]


def _events(api: Api, release: Release) -> list[Object]:
    """The namespace's events, oldest first; none where they may not be read."""
    from dsv4_deploy.errors import DeployError

    try:
        events = api.items(f"/api/v1/namespaces/{release.namespace}/events")
    except DeployError:
        return []
    return sorted(events, key=_moment)


def _moment(event: Object) -> str:
    return str(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def _newest_template(
    api: Api, space: str, query: dict[str, str], deployments: Sequence[Object]
) -> str | None:
    """The pod-template-hash of the Deployment's newest ReplicaSet."""
    if not deployments:
        return None
    sets = api.items(f"/apis/apps/v1{space}/replicasets", **query)

    def revision(item: Object) -> int:
        return int(item["metadata"].get("annotations", {}).get("deployment.kubernetes.io/revision", 0))

    newest = max(sets, key=revision, default=None)
    return None if newest is None else newest["metadata"].get("labels", {}).get("pod-template-hash")


def _pod(pod: Object, events: Sequence[Object], newest: str | None) -> Pod:
    metadata, status = pod["metadata"], pod.get("status", {})
    statuses = status.get("containerStatuses", [])
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", []))
    leaving = "deletionTimestamp" in metadata
    hash_of = metadata.get("labels", {}).get("pod-template-hash")
    return Pod(
        name=metadata["name"],
        node=pod.get("spec", {}).get("nodeName", ""),
        ready=ready,
        state=_state(pod, leaving, ready),
        restarts=sum(int(one.get("restartCount", 0)) for one in statuses),
        age_s=_age(metadata.get("creationTimestamp")),
        leaving=leaving,
        current=newest is None or hash_of == newest,
        cause=None if leaving or ready else causes.of_pod(pod, _of(pod, events)),
    )


def _state(pod: Object, leaving: bool, ready: bool) -> str:
    status = pod.get("status", {})
    if leaving:
        return "draining"
    if ready:
        return "ready"
    for one in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        state = one.get("state", {})
        if state.get("waiting", {}).get("reason"):
            return str(state["waiting"]["reason"])
        if "running" in state and one["name"] == "wait-for-weights":
            return "waiting for the weights"
        if "running" in state and one["name"] == "server":
            return LOADING if not one.get("started") else "not ready"
    if status.get("phase") == "Pending" and not pod.get("spec", {}).get("nodeName"):
        return "waiting for a node"
    return str(status.get("reason") or status.get("phase") or "unknown").lower()


def _download(jobs: Sequence[Object]) -> str:
    if not jobs:
        return ""
    status = jobs[-1].get("status", {})
    if status.get("succeeded"):
        return "complete"
    return "failed" if status.get("failed") and not status.get("active") else "running"


def _age(created: str | None) -> float | None:
    if not created:
        return None
    moment = datetime.datetime.fromisoformat(created.replace("Z", "+00:00"))
    return max(0.0, (datetime.datetime.now(datetime.UTC) - moment).total_seconds())
