"""The real `dsv4-deploy` with the real helm, as a user with a kubeconfig runs it, against an API server in memory.

With KUBECONFIG in the environment, the tests that ask for a `place` run against that cluster instead: each in a
namespace of its own, which is removed afterwards. What needs a running server there also needs DSV4_TEST_IMAGE, an
image of this bundle with vLLM for the CPU that the nodes can pull; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any, Protocol
from unittest import mock

import pytest

from dsv4_deploy import cli
from tests.helm import chart
from tests.k8s import cluster
from tests.k8s.apiserver import ApiServer

GIVEN = os.environ.get("KUBECONFIG", "")
IMAGE = os.environ.get("DSV4_TEST_IMAGE", "")


class User:
    """Somebody with a kubeconfig."""

    def __init__(
        self, root: pathlib.Path, kubeconfig: str, helm: str = chart.NEWEST, namespace: str = "ai"
    ) -> None:
        self.namespace = namespace
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DSV4_", "VLLM_", "HF_"))
        }
        self.env = {
            **clean,
            **{name: value for name, value in chart.environment().items() if name.startswith("HELM_")},
            "KUBECONFIG": kubeconfig,
            "DSV4_HELM": str(chart.tools()[helm]),
            "DSV4_STATE_DIR": str(root / "state"),
            "DSV4_CACHE_DIR": str(root / "cache"),
        }

    def run(self, command: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command in this process, which has the Kubernetes client loaded already: 0.5 s less each."""
        arguments = self.arguments(command, *more)
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {**self.env, **variables}, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            cli.main(arguments)
        code = end.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def run_program(self, command: str, *more: str) -> subprocess.CompletedProcess[str]:
        """The same as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "dsv4_deploy", *self.arguments(command, *more)],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=1800,
        )

    def arguments(self, command: str, *more: str) -> list[str]:
        release = ["--target", "kubernetes", "--namespace", self.namespace, "--release", "v4"]
        return [command, *release, *more]


class Place(Protocol):
    """A cluster with a namespace for one test. `patience` is DSV4_PATIENCE: how long passing troubles may last."""

    kubeconfig: str
    namespace: str
    patience: str

    def play(self, behaviour: cluster.Behaviour) -> None:
        """From now on pods live like this, where that can be chosen."""

    def running_image(self) -> list[str]:
        """Arguments of `up` for a server that gets ready. Skips the test where there can be none."""

    def serve(self, port: int) -> None:
        """Port 8000 of the pods is that port of this machine, where that can be chosen."""

    def deployments(self) -> list[dict[str, Any]]: ...

    def secret(self, name: str, **data: str) -> None: ...


class Scripted:
    """The API server in memory."""

    namespace, patience = "ai", "0"

    def __init__(self, server: ApiServer, kubeconfig: str) -> None:
        self.server, self.kubeconfig = server, kubeconfig

    def play(self, behaviour: cluster.Behaviour) -> None:
        cluster.Cluster(self.server, behaviour)

    def running_image(self) -> list[str]:
        return ["--device", "cpu"]

    def serve(self, port: int) -> None:
        self.server.forward_to[8000] = port

    def deployments(self) -> list[dict[str, Any]]:
        return self.server.all("deployments")

    def secret(self, name: str, **data: str) -> None:
        from tests.k8s.apiserver import secret

        self.server.put(secret(name, self.namespace, **data))


class Given:
    """The cluster of KUBECONFIG, whose own scheduler and kubelets play."""

    # Of the one to three minutes after which a passing trouble counts, a tenth.
    patience = os.environ.get("DSV4_TEST_PATIENCE", "0.1")

    def __init__(self) -> None:
        from kubernetes import client, config

        self.kubeconfig = GIVEN
        self.namespace = f"dsv4-test-{uuid.uuid4().hex[:10]}"
        connection = config.new_client_from_config(GIVEN)
        self._core, self._apps = client.CoreV1Api(connection), client.AppsV1Api(connection)
        self._core.create_namespace({"metadata": {"name": self.namespace}})

    def play(self, behaviour: cluster.Behaviour) -> None:
        pass

    def running_image(self) -> list[str]:
        if not IMAGE:
            pytest.skip("DSV4_TEST_IMAGE names no image that this cluster can run")
        return ["--device", "cpu", "--image", IMAGE]

    def serve(self, port: int) -> None:
        pass

    def deployments(self) -> list[dict[str, Any]]:
        found = self._apps.list_namespaced_deployment(self.namespace)
        items: list[dict[str, Any]] = self._apps.api_client.sanitize_for_serialization(found)["items"]
        return items

    def secret(self, name: str, **data: str) -> None:
        self._core.create_namespaced_secret(self.namespace, {"metadata": {"name": name}, "stringData": data})

    def remove(self) -> None:
        self._core.delete_namespace(self.namespace)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    one = ApiServer()
    yield one
    one.close()


@pytest.fixture
def user(server: ApiServer, tmp_path: pathlib.Path) -> User:
    """For tests that script the cluster: always the API server in memory."""
    return User(tmp_path, _kubeconfig(server, tmp_path))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Place]:
    """The cluster of KUBECONFIG, or one in memory."""
    if GIVEN:
        given = Given()
        yield given
        given.remove()
        return
    server = request.getfixturevalue("server")
    yield Scripted(server, _kubeconfig(server, tmp_path))


def _kubeconfig(server: ApiServer, root: pathlib.Path) -> str:
    path = root / "kubeconfig"
    path.write_text(server.kubeconfig())
    return str(path)


def node(name: str = "gpu-1", **changes: Any) -> dict[str, Any]:
    """A node with eight whole MI300X, as AMD's operator leaves it; `changes` are labels, taints and so on."""
    labels = {"amd.com/gpu.device-id": "74a1", "amd.com/gpu.compute-memory-partition": "spx_nps1"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, **changes.get("labels", {})}},
        "spec": {"taints": changes.get("taints", []), **changes.get("spec", {})},
        "status": {
            "allocatable": {"amd.com/gpu": "8", "memory": "2113534176Ki", **changes.get("allocatable", {})},
            "conditions": [{"type": "Ready", "status": changes.get("ready", "True")}],
        },
    }
