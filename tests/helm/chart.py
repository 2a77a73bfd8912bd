"""Runs the real helm over the chart, once per question, and hands out objects.

In: values as files or a mapping. Out: parsed manifests. Helm reads no cluster and no configuration of the user's.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "dsv4"
HELMS = ("helm-3.17.2", "helm-4.3.1")
NEWEST = HELMS[-1]
KUBE_VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
DEFAULT_KUBE = "1.35"

Object = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Quoting(yaml.SafeDumper):
    """Quotes every text: PyYAML leaves 1e3 bare, which Go reads as a number."""


_Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


class RefusedError(Exception):
    """helm would not render; `str()` is what it said."""


@functools.cache
def tools() -> Mapping[str, pathlib.Path]:
    """The programs of tools/kube_tools.py, fetched when they are missing."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import kube_tools
    finally:
        sys.path.pop(0)
    return kube_tools.fetch()


@functools.cache
def environment() -> Mapping[str, str]:
    scratch = tempfile.mkdtemp(prefix="dsv4-helm-")
    own = {f"HELM_{name}_HOME": f"{scratch}/{name.lower()}" for name in ("CACHE", "CONFIG", "DATA")}
    return {**os.environ, **own, "KUBECONFIG": f"{scratch}/none"}


def run(helm: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """One run of helm."""
    return subprocess.run(
        [str(tools()[helm]), *arguments],
        env=environment(),
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def template(
    *files: pathlib.Path,
    values: Mapping[str, Any] | None = None,
    helm: str = NEWEST,
    kube: str = DEFAULT_KUBE,
    release: str = "v4",
    namespace: str = "ai",
) -> list[Object]:
    """The objects that the chart gives for these values. Raises RefusedError."""
    return list(
        documents(manifest(*files, values=values, helm=helm, kube=kube, release=release, namespace=namespace))
    )


def manifest(
    *files: pathlib.Path,
    values: Mapping[str, Any] | None = None,
    helm: str = NEWEST,
    kube: str = DEFAULT_KUBE,
    release: str = "v4",
    namespace: str = "ai",
) -> str:
    """The same as text."""
    text = yaml.dump(values, Dumper=_Quoting) if values else ""
    return _manifest(files, text, helm, kube, release, namespace)


@functools.lru_cache(maxsize=512)
def _manifest(
    files: tuple[pathlib.Path, ...], values: str, helm: str, kube: str, release: str, namespace: str
) -> str:
    arguments = ["template", release, str(CHART), "--namespace", namespace, "--kube-version", kube]
    for file in files:
        arguments += ["--values", str(file)]
    if values:
        arguments += ["--values", "-"]
    done = run(helm, *arguments, text=values or None)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def documents(text: str) -> Iterator[Object]:
    """The objects of a manifest."""
    for document in yaml.load_all(text, Loader=_LOADER):
        if document:
            yield document


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The only object of that kind (and name)."""
    found = [
        item
        for item in objects
        if item["kind"] == kind and (name is None or item["metadata"]["name"] == name)
    ]
    assert len(found) == 1, [(item["kind"], item["metadata"]["name"]) for item in objects]
    return found[0]


def server(objects: list[Object]) -> Object:
    """The server's container."""
    containers = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return next(container for container in containers if container["name"] == "server")


def argument(container: Object, flag: str) -> str:
    """What follows a flag in a container's arguments."""
    arguments: list[str] = container["args"]
    return arguments[arguments.index(flag) + 1]


def variables(container: Object) -> dict[str, Any]:
    """Environment variables: name -> value or source."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def ci_files() -> list[pathlib.Path]:
    return sorted((CHART / "ci").glob("*-values.yaml"))


def profile_files() -> list[pathlib.Path]:
    return sorted((CHART / "profiles").glob("*/*.yaml"))
