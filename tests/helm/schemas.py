"""Strict schemas of everything that the chart can render, Kubernetes' own for each release and the custom resources'.

In: an object and a release. Out: nothing, or the first thing that is wrong; unknown fields and unknown kinds are.

Kubernetes: the package kubernetes-validate. PodMonitor, PrometheusRule and ScaledObject: the packages
cloudcoil-models-*, generated from those projects' definitions. HTTPRoute, InferencePool and LeaderWorkerSet:
crds/*.json, written by hand from https://gateway-api.sigs.k8s.io/reference/spec/,
https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/ and
https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jsonschema
import kubernetes_validate
import referencing
from kubernetes_validate.utils import major_minor, schema_contents

from tests.helm.chart import Object

CRDS = pathlib.Path(__file__).with_name("crds")
HANDWRITTEN = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): "httproute.json",
    ("inference.networking.k8s.io/v1", "InferencePool"): "inferencepool.json",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): "leaderworkerset.json",
}
GENERATED = {
    ("monitoring.coreos.com/v1", "PodMonitor"): "prometheus_operator.v1",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "prometheus_operator.v1",
    ("keda.sh/v1alpha1", "ScaledObject"): "keda.v1alpha1",
}


_VALID: set[tuple[str, str]] = set()


class InvalidError(Exception):
    """Where an object breaks its schema, and how."""


def check(item: Object, kube: str) -> None:
    """Raises InvalidError. Renders have many objects in common, so what was valid once is not looked at again."""
    seen = (json.dumps(item, sort_keys=True), kube)
    if seen not in _VALID:
        _check(item, kube)
        _VALID.add(seen)


def _check(item: Object, kube: str) -> None:
    key = (item["apiVersion"], item["kind"])
    where = f"{item['kind']}/{item['metadata']['name']} for {kube}"
    if key in HANDWRITTEN or key in GENERATED:
        error = next(_custom(*key).iter_errors(item), None)
        if error is not None:
            raise InvalidError(f"{where}: {error.json_path}: {error.message}")
        if key[1] == "LeaderWorkerSet":
            _templates(item, kube)
        return
    validator = _builtin(item["apiVersion"], item["kind"], kube)
    if validator is None:
        raise InvalidError(f"{where}: there is no such kind")
    error = next(validator.iter_errors(item), None)
    if error is not None:
        raise InvalidError(f"{where}: {error.json_path}: {error.message}")


@functools.cache
def _builtin(version: str, kind: str, kube: str) -> Any:
    """Kubernetes' strict schema of a kind. The package's own `validate` reads 2 MB of definitions at every call."""
    resources = _definitions(kube)
    # "rbac.authorization.k8s.io/v1" is "rbac-v1" in the package's file names.
    group, slash, number = version.rpartition("/")
    name = f"{kind.lower()}-{group.partition('.')[0]}{'-' if slash else ''}{number}.json"
    try:
        schema = schema_contents(f"{_directory(kube)}/{name}", kube)
    except FileNotFoundError:
        return None
    return jsonschema.Draft202012Validator(schema, registry=resources @ referencing.Registry())


@functools.cache
def _definitions(kube: str) -> Any:
    return referencing.Resource.from_contents(schema_contents(f"{_directory(kube)}/_definitions.json", kube))


@functools.cache
def _directory(kube: str) -> str:
    newest = [
        version for version in kubernetes_validate.utils.all_versions() if major_minor(version) == kube
    ][-1]
    return f"kubernetes-json-schema/v{newest}-local-strict"


def _templates(item: Object, kube: str) -> None:
    """The pod templates inside a LeaderWorkerSet are Kubernetes' own."""
    for role in ("leaderTemplate", "workerTemplate"):
        template = item["spec"]["leaderWorkerTemplate"][role]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": role}}
        check({**pod, "spec": template["spec"]}, kube)


@functools.cache
def _custom(version: str, kind: str) -> Any:
    if (version, kind) in HANDWRITTEN:
        schema = json.loads((CRDS / HANDWRITTEN[version, kind]).read_text())
    else:
        schema = _generated(version, kind)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator.check_schema(schema)
    return validator(schema)


def _generated(version: str, kind: str) -> Mapping[str, Any]:
    """The package's model as a schema without unknown fields. Values of an enumeration may be plain text."""
    import importlib

    module = importlib.import_module(f"cloudcoil.models.{GENERATED[version, kind]}")
    schema: dict[str, Any] = _strict(getattr(module, kind).model_json_schema(by_alias=True))
    # The package describes metadata more narrowly than Kubernetes does, which is checked elsewhere.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {name: _strict(value) for name, value in node.items()}
    if strict.get("type") == "object" and "properties" in strict and "additionalProperties" not in strict:
        strict["additionalProperties"] = False
    if isinstance(strict.get("pattern"), str):
        # Go writes flags in front of or inside the pattern; Python only in front.
        strict["pattern"] = strict["pattern"].replace("^(?i)", "(?i)^")
    return strict
