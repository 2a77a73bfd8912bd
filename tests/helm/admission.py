"""What the Kubernetes API refuses although the schema allows it: the validation of pkg/apis/*/validation, as far as the
chart's objects can touch it.

In: the objects of a render. Out: nothing, or the first thing that an API server would refuse. Rules:
https://github.com/kubernetes/kubernetes/tree/master/pkg/apis/core/validation
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from dsv4_deploy.facts.cluster import quantity
from tests.helm.chart import Object

LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# A Deployment's pods are NAME-HASH-RANDOM and a group's NAME-GROUP-WORKER-REVISION, all labels of at most 63.
ROOM_FOR_SUFFIXES = 15


class RefusedError(Exception):
    """Which object an API server would refuse, and why."""


def check(objects: list[Object]) -> None:
    """Raises RefusedError."""
    names = Counter((item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in objects)
    _unique(names, "objects")
    for item in objects:
        where = f"{item['kind']}/{item['metadata']['name']}"
        for problem in _problems(item):
            raise RefusedError(f"{where}: {problem}")


def _unique(names: Counter[Any], what: str) -> None:
    for name, count in names.items():
        if count > 1:
            raise RefusedError(f"{what}: {name} is there {count} times")


def _problems(item: Object) -> Iterator[str]:
    metadata, kind, spec = item["metadata"], item["kind"], item.get("spec", {})
    yield from _metadata(metadata)
    name = metadata["name"]
    if kind == "Service" and not (SERVICE_NAME.fullmatch(name) and len(name) <= 63):
        yield f"{name!r} is no name of a Service"
    if kind in ("Deployment", "LeaderWorkerSet") and len(name) > 63 - ROOM_FOR_SUFFIXES:
        yield f"{name!r} leaves no room for its pods' names"
    if kind == "Deployment":
        rolling = spec["strategy"]["rollingUpdate"]
        if rolling["maxSurge"] == 0 and str(rolling["maxUnavailable"]) in ("0", "0%"):
            yield "maxUnavailable may not be 0 when maxSurge is"
        if spec["selector"]["matchLabels"].items() - spec["template"]["metadata"]["labels"].items():
            yield "the selector does not match the template's labels"
        if spec["progressDeadlineSeconds"] > 2**31 - 1:
            yield "progressDeadlineSeconds is too large"
    if kind == "NetworkPolicy":
        for rule in [*(spec.get("ingress") or []), *(spec.get("egress") or [])]:
            for port in rule.get("ports", []):
                number = port["port"]
                if isinstance(number, bool) or (isinstance(number, int) and not 1 <= number <= 65535):
                    yield f"port {number}"
                if isinstance(number, str) and not re.search("[a-z]", number):
                    yield f"port {number!r} is no name"
    if kind == "PrometheusRule" and not spec["groups"][0]["rules"]:
        yield "a group without rules"
    for template in _templates(item):
        yield from _metadata(template.get("metadata", {}))
        yield from _pod(template["spec"])


def _templates(item: Object) -> Iterator[Object]:
    if item["kind"] in ("Deployment", "Job"):
        yield item["spec"]["template"]
    elif item["kind"] == "Pod":
        yield item
    elif item["kind"] == "LeaderWorkerSet":
        group = item["spec"]["leaderWorkerTemplate"]
        yield from (group["leaderTemplate"], group["workerTemplate"])


def _metadata(metadata: Object) -> Iterator[str]:
    for key, value in (metadata.get("labels") or {}).items():
        if not LABEL.fullmatch(value) or len(value) > 63:
            yield f"label {key}={value!r}"
    for key in (*(metadata.get("labels") or {}), *(metadata.get("annotations") or {})):
        prefix, _, name = key.rpartition("/")
        if len(name) > 63 or len(prefix) > 253:
            yield f"the key {key!r} is too long"


def _pod(spec: Object) -> Iterator[str]:
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    yield from _twice((one["name"] for one in containers), "containers")
    volumes = [one["name"] for one in spec.get("volumes", [])]
    yield from _twice(volumes, "volumes")
    for one in containers:
        yield from (f"container {one['name']}: {problem}" for problem in _container(one, set(volumes)))
    for toleration in spec.get("tolerations", []):
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            yield "a toleration with Exists and a value"
        if not LABEL.fullmatch(toleration.get("value", "")):
            yield f"the toleration's value {toleration['value']!r}"
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            yield "tolerationSeconds without NoExecute"
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.get("nodeSelectorTerms", []):
        for one in term["matchExpressions"]:
            yield from _expression(one)
    constraints = spec.get("topologySpreadConstraints", [])
    yield from _twice(
        ((one["topologyKey"], one["whenUnsatisfiable"]) for one in constraints), "topologySpreadConstraints"
    )
    for one in constraints:
        if "minDomains" in one and one["whenUnsatisfiable"] != "DoNotSchedule":
            yield "minDomains without DoNotSchedule"
    profile = spec.get("securityContext", {}).get("seccompProfile", {}).get("localhostProfile", "")
    if ".." in profile.split("/"):
        yield f"localhostProfile {profile!r}"
    if spec.get("terminationGracePeriodSeconds", 0) > 2**31 - 1:
        yield "terminationGracePeriodSeconds is too large"


def _expression(one: Object) -> Iterator[str]:
    operator, values = one["operator"], one.get("values") or []
    if operator in ("In", "NotIn") and not values:
        yield f"{one['key']} {operator} without values"
    if operator in ("Exists", "DoesNotExist") and values:
        yield f"{one['key']} {operator} with values"
    if operator in ("Gt", "Lt") and not (len(values) == 1 and re.fullmatch(r"-?[0-9]+", values[0])):
        yield f"{one['key']} {operator} without one whole number"


def _container(one: Object, volumes: set[str]) -> Iterator[str]:
    yield from _twice((item["name"] for item in one.get("env", [])), "env")
    for item in one.get("env", []):
        if item.get("value") and item.get("valueFrom"):
            yield f"{item['name']} has a value and a source"
    mounts = one.get("volumeMounts", [])
    yield from _twice((mount["mountPath"] for mount in mounts), "mountPath")
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"no volume {mount['name']}"
    resources = one.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, asked in requests.items():
        if name in limits and quantity(asked) > quantity(limits[name]):
            yield f"the request of {name}, {asked}, is greater than its limit, {limits[name]}"
    for name in {*requests, *limits}:
        if "/" in name and requests.get(name, limits.get(name)) != limits.get(name):
            yield f"request and limit of {name} differ"


def _twice(names: Iterable[Any], what: str) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what}: {name} is there {count} times"
