"""Waiting for a release, against the API server in memory: what is old, what passes, and what counts."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.k8s import api, rollout
from dsv4_deploy.k8s.release import Release
from dsv4_deploy.k8s.view import look
from tests.k8s import cluster
from tests.k8s.apiserver import ApiServer
from tests.k8s.conftest import User

RELEASE = Release("v4", "ai")
LABELS = {"app.kubernetes.io/instance": "v4", "app.kubernetes.io/component": "server"}


@pytest.fixture
def there(user: User, monkeypatch: pytest.MonkeyPatch) -> api.Api:
    monkeypatch.setenv("KUBECONFIG", user.env["KUBECONFIG"])
    return api.connect()


def workload(server: ApiServer, kind: str = "Deployment", **status: Any) -> None:
    version = "apps/v1" if kind == "Deployment" else "leaderworkerset.x-k8s.io/v1"
    server.put(
        {
            "apiVersion": version,
            "kind": kind,
            "metadata": {"name": "v4-dsv4", "namespace": "ai", "labels": LABELS},
            "spec": {"replicas": 1},
            "status": {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, **status},
        }
    )


def pod(server: ApiServer, status: dict[str, Any], name: str = "v4-dsv4-0", part: str = "server") -> None:
    labels = {**LABELS, "app.kubernetes.io/component": part}
    metadata = {"name": name, "namespace": "ai", "labels": labels}
    server.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"nodeName": "gpu-1"},
            "status": status,
        }
    )


def test_an_api_that_is_away_for_a_while(server: ApiServer, there: api.Api) -> None:
    """A control plane that is upgraded must not end a wait of an hour; one that stays away does."""
    workload(server, observedGeneration=1)
    pod(server, cluster.ready({})[0])
    said: list[str] = []
    server.away = 3
    assert rollout.wait(there, RELEASE, 60, said.append, poll_s=0.01).complete
    assert "asking again" in said[0]
    assert "ready on gpu-1" in said[-1]
    server.away = 1_000_000
    with pytest.raises(api.UnreachableError, match="503"):
        rollout.wait(there, RELEASE, 60, said.append, poll_s=0.01, patience=0)


def test_a_group_is_ready_without_a_generation(server: ApiServer, there: api.Api) -> None:
    """Releases of LeaderWorkerSet differ in whether the status has observedGeneration."""
    workload(server, "LeaderWorkerSet")
    for name in ("v4-dsv4-0", "v4-dsv4-0-1"):
        pod(server, cluster.ready({})[0], name)
    view = look(there, RELEASE)
    assert (view.workload, view.complete, len(view.pods)) == ("LeaderWorkerSet/v4-dsv4", True, 2)
    workload(server, "LeaderWorkerSet", observedGeneration=0)
    assert not look(there, RELEASE).complete


def test_a_deployment_that_has_not_seen_its_newest_template(server: ApiServer, there: api.Api) -> None:
    workload(server)
    assert not look(there, RELEASE).complete
    workload(server, observedGeneration=1)
    assert look(there, RELEASE).complete


def test_what_died_before_and_loads_again_is_not_blamed(server: ApiServer, there: api.Api) -> None:
    workload(server, observedGeneration=1, readyReplicas=0)
    before = {"exitCode": 137, "reason": "OOMKilled"}
    loading = {**cluster.loading({})[0]}
    loading["containerStatuses"] = [cluster.container({"running": {}}, last=before, restarts=2)]
    pod(server, loading)
    with pytest.raises(DeployError, match="is not ready after 0 s"):
        rollout.wait(there, RELEASE, 0.05, lambda _: None, poll_s=0.01)

    def dies_again(_text: str) -> None:
        loading["containerStatuses"] = [cluster.container({"running": {}}, last=before, restarts=3)]
        pod(server, loading)

    with pytest.raises(DeployError, match="more memory than its limit"):
        rollout.wait(there, RELEASE, 60, dies_again, poll_s=0.01)


def test_a_download_that_cannot_start_is_the_cause(server: ApiServer, there: api.Api) -> None:
    """The server's pods only wait for the weights then, and would do so for ever."""
    workload(server, observedGeneration=1, readyReplicas=0)
    pod(server, cluster.loading({})[0])
    labels = {**LABELS, "app.kubernetes.io/component": "download"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "v4-dsv4-fetch-1", "labels": labels}}
    server.put({**job, "metadata": {**job["metadata"], "namespace": "ai"}, "status": {"active": 1}})
    message = 'secret "hub" not found'
    stuck, _ = cluster.waiting("CreateContainerConfigError", message)({})
    pod(server, stuck, "v4-dsv4-fetch-1-abcde", "download")
    with pytest.raises(DeployError) as refusal:
        rollout.wait(there, RELEASE, 60, lambda _: None, poll_s=0.01, patience=0)
    assert message in refusal.value.why
    assert "v4-dsv4-fetch-1-abcde" in refusal.value.what
    # An attempt that has failed is tried again by its Job.
    pod(server, {"phase": "Failed", "reason": "Evicted"}, "v4-dsv4-fetch-1-abcde", "download")
    assert look(there, RELEASE).cause is None


def test_a_deployment_of_the_operator_is_not_taken_for_the_servers(server: ApiServer, there: api.Api) -> None:
    labels = {"app.kubernetes.io/instance": "v4"}
    metadata = {"name": "a-proxy", "namespace": "ai", "labels": labels}
    server.put({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1}})
    assert look(there, RELEASE).workload == ""
    workload(server, observedGeneration=1)
    assert look(there, RELEASE).workload == "Deployment/v4-dsv4"
