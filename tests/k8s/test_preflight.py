"""`dsv4-deploy preflight --target kubernetes`: nodes, cards, partitions, taints, memory, storage and rights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsv4_deploy.facts.cluster import quantity
from tests.k8s.apiserver import ApiServer
from tests.k8s.conftest import User, node


def storage_class(*, default: bool = True) -> dict[str, Any]:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "fast", "annotations": annotations},
        "provisioner": "csi.example.com",
    }


def findings(user: User, *more: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    done = user.run("preflight", "--json", *more)
    assert "Traceback" not in done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for one in json.loads(done.stdout)["findings"]:
        found.setdefault(one["check"], []).append(one)
    return done.returncode, found


def test_a_good_cluster(user: User, server: ApiServer) -> None:
    server.put(node())
    server.put(storage_class())
    before = len(server.store)
    code, found = findings(user, "--tp", "8")
    assert code == 0, found
    assert {one["level"] for every in found.values() for one in every} == {"ok"}
    assert "8 mi300x on 1 node(s), 8 free; a pod takes 8" in found["cluster-gpus"][0]["found"]
    assert len(server.store) == before
    assert {method for method, path in server.requests} <= {"GET", "POST"}
    assert all("accessreviews" in path for method, path in server.requests if method == "POST")


BAD = {
    "partitioned": (
        {"labels": {"amd.com/gpu.compute-memory-partition": "cpx_nps4"}},
        "partitioned (cpx_nps4)",
    ),
    "mixed": ({"allocatable": {"amd.com/cpx_nps4": "64"}}, "partitioned"),
    "unhealthy": (
        {"taints": [{"key": "amd-gpu-unhealthy", "effect": "NoSchedule"}]},
        "taint amd-gpu-unhealthy",
    ),
    "cordoned": ({"spec": {"unschedulable": True}}, "is cordoned"),
    "not ready": ({"ready": "False"}, "is not ready"),
    "virtual": ({"labels": {"amd.com/gpu.device-id": "74b5"}}, "virtual functions (74b5)"),
    "another card": ({"labels": {"amd.com/gpu.device-id": "74a5"}}, "has mi325x, not mi300x"),
}


@pytest.mark.parametrize("name", BAD)
def test_nodes_that_pods_cannot_use(user: User, server: ApiServer, name: str) -> None:
    changes, words = BAD[name]
    server.put(node(**changes))
    code, found = findings(user)
    assert code == 1
    assert words in found["cluster-node"][0]["found"]
    assert "no node has whole, usable mi300x" in found["cluster-gpus"][0]["found"]
    server.put(node("gpu-2"))
    code, found = findings(user)
    assert code == 0
    assert found["cluster-gpus"][0]["level"] == "ok"


def test_no_gpus_at_all(user: User, server: ApiServer) -> None:
    server.put(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cpu"}, "status": {"allocatable": {}}}
    )
    code, found = findings(user)
    assert code == 1
    assert "no node offers AMD GPUs (1 others)" in found["cluster-gpus"][0]["found"]
    assert "GPU operator" in found["cluster-gpus"][0]["fix"]
    assert findings(user, "--device", "cpu")[0] == 0


def test_too_little_of_something(user: User, server: ApiServer) -> None:
    server.put(node(allocatable={"memory": "100Gi"}))
    code, found = findings(user)
    assert (code, found["cluster-memory"][0]["level"]) == (1, "fail")
    server.put(node(allocatable={"amd.com/gpu": "4"}))
    code, found = findings(user, "--tp", "8")
    assert "no node has 8 mi300x (the largest has 4)" in found["cluster-gpus"][0]["found"]
    server.put(node())
    limits = {"limits": {"amd.com/gpu": "6"}}
    spec = {"nodeName": "gpu-1", "containers": [{"name": "train", "resources": limits}]}
    server.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "t", "namespace": "x"}, "spec": spec})
    code, found = findings(user)
    assert code == 0
    assert "0 of 1 pods find 4 free mi300x right now" in found["cluster-gpus"][0]["found"]
    assert found["cluster-storage"][0]["level"] == "warn"
    server.put(storage_class(default=False))
    assert "no default storage class (fast)" in findings(user)[1]["cluster-storage"][0]["found"]


def test_rights_that_are_missing(user: User, server: ApiServer) -> None:
    server.put(node())
    server.forbidden = {("create", "deployments"), ("create", "pods/portforward"), ("list", "nodes")}
    code, found = findings(user)
    assert code == 1
    assert found["cluster-rights"][0]["found"].endswith("create deployments, create pods/portforward")
    assert "may not be listed" in found["cluster-gpus"][0]["found"]


@pytest.mark.parametrize(
    ("text", "value"), [("1Ki", 1024), ("2Gi", 2**31), ("3G", 3 * 10**9), ("5", 5), ("1e3", 1000), ("x", 0)]
)
def test_quantities(text: str, value: int) -> None:
    assert quantity(text) == value
