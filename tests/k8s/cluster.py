"""What a cluster does by itself, scripted: a Deployment gets its pods, and each pod lives as the test says.

In: an ApiServer and a function from a pod to its status and events. Out: objects as controllers and kubelets leave
them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

from tests.k8s.apiserver import ApiServer, Object, now

Behaviour = Callable[[Object], tuple[Object, list[Object]]]


class Cluster:
    """Watches Deployments of the server and does what a cluster would. `behaviour` is asked for every new pod."""

    def __init__(self, server: ApiServer, behaviour: Behaviour) -> None:
        self.server, self.behaviour = server, behaviour
        self._count = 0
        server.on_change.append(self._changed)

    def _changed(self, verb: str, item: Object) -> None:
        if item.get("kind") != "Deployment":
            return
        if verb == "delete":
            for kind in ("replicasets", "pods"):
                for one in self.server.all(kind):
                    self.server.remove(kind, one["metadata"]["name"], one["metadata"]["namespace"])
            return
        template = item["spec"]["template"]
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
        name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
        replicas = int(item["spec"].get("replicas", 1))
        existing = [
            one
            for one in self.server.all("pods")
            if one["metadata"]["labels"].get("pod-template-hash") == digest
        ]
        if (
            len(existing) == replicas
            and item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
        ):
            return
        for pod in self.server.all("pods"):
            if pod["metadata"]["labels"].get("pod-template-hash") != digest:
                self.server.remove("pods", pod["metadata"]["name"], namespace)
        labels = {**template["metadata"]["labels"], "pod-template-hash": digest}
        self._count += 1
        self.server.put(
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {
                    "name": f"{name}-{digest}",
                    "namespace": namespace,
                    "labels": labels,
                    "annotations": {"deployment.kubernetes.io/revision": str(self._count)},
                },
            }
        )
        ready = 0
        for index in range(replicas):
            ready += self._pod(f"{name}-{digest}-{index}", namespace, labels, template)
        status = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": ready,
        }
        self.server.put({**item, "status": status})

    def _pod(self, name: str, namespace: str, labels: dict[str, str], template: Object) -> int:
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": labels,
                "creationTimestamp": now(),
            },
            "spec": copy.deepcopy(template["spec"]),
        }
        status, events = self.behaviour(pod)
        if status.get("phase") != "Pending" or status.get("containerStatuses"):
            pod["spec"]["nodeName"] = "gpu-1"
        self.server.put({**pod, "status": status})
        for number, event in enumerate(events):
            self.server.put(
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": f"{name}.{number}", "namespace": namespace},
                    "involvedObject": {"kind": "Pod", "name": name, "namespace": namespace},
                    "lastTimestamp": f"2026-01-01T00:00:{number:02d}Z",
                    **event,
                }
            )
        return int(
            any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", []))
        )


SCHEDULED = {"type": "PodScheduled", "status": "True"}


def container(state: Object, *, last: Object | None = None, restarts: int = 0, ready: bool = False) -> Object:
    return {
        "name": "server",
        "image": "registry/dsv4-deploy:1",
        "restartCount": restarts,
        "ready": ready,
        "started": ready,
        "state": state,
        "lastState": {"terminated": last} if last else {},
    }


def ready(_pod: Object) -> tuple[Object, list[Object]]:
    status = {
        "phase": "Running",
        "conditions": [SCHEDULED, {"type": "Ready", "status": "True"}],
        "containerStatuses": [container({"running": {}}, ready=True)],
    }
    return status, []


def loading(_pod: Object) -> tuple[Object, list[Object]]:
    status = {
        "phase": "Running",
        "conditions": [SCHEDULED, {"type": "Ready", "status": "False"}],
        "containerStatuses": [container({"running": {}})],
    }
    return status, []


def unschedulable(message: str) -> Behaviour:
    def behave(_pod: Object) -> tuple[Object, list[Object]]:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        event = {"reason": "FailedScheduling", "type": "Warning", "message": message}
        return {"phase": "Pending", "conditions": [condition]}, [event]

    return behave


def waiting(reason: str, message: str, *events: Object) -> Behaviour:
    def behave(_pod: Object) -> tuple[Object, list[Object]]:
        state = {"waiting": {"reason": reason, "message": message}}
        return {"phase": "Pending", "conditions": [SCHEDULED], "containerStatuses": [container(state)]}, list(
            events
        )

    return behave


def ended(code: int, reason: str, message: str = "", *events: Object, restarts: int = 1) -> Behaviour:
    def behave(_pod: Object) -> tuple[Object, list[Object]]:
        last: dict[str, Any] = {"exitCode": code, "reason": reason, "message": message}
        state = {
            "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
        }
        one = container(state, last=last, restarts=restarts)
        return {"phase": "Running", "conditions": [SCHEDULED], "containerStatuses": [one]}, list(events)

    return behave


def like_a_kubelet(server: ApiServer) -> Behaviour:
    """A node without AMD GPUs that looks at what a pod asks for, as a small real cluster would."""

    def there(plural: str, name: str, namespace: str) -> bool:
        return any(
            (one["metadata"]["name"], one["metadata"]["namespace"]) == (name, namespace)
            for one in server.all(plural)
        )

    def behave(pod: Object) -> tuple[Object, list[Object]]:
        spec, namespace = pod["spec"], pod["metadata"]["namespace"]
        one = spec["containers"][0]
        if spec.get("nodeSelector"):
            return unschedulable(
                "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            )(pod)
        for volume in spec["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and not there("persistentvolumeclaims", claim, namespace):
                words = f'0/1 nodes are available: persistentvolumeclaim "{claim}" not found.'
                return unschedulable(words)(pod)
            secret = volume.get("secret", {}).get("secretName")
            if secret and not there("secrets", secret, namespace):
                words = f'MountVolume.SetUp failed for volume "x" : secret "{secret}" not found'
                return waiting("ContainerCreating", "", {"reason": "FailedMount", "message": words})(pod)
        if one["image"].startswith("localhost:1/"):
            return waiting("ErrImagePull", "dial tcp 127.0.0.1:1: connect: connection refused")(pod)
        return ready(pod)

    return behave
