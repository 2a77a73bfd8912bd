"""The real `dsv4-deploy` with the real helm, as a user with a kubeconfig runs it, against an API server in memory."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm import chart
from tests.k8s.apiserver import ApiServer

RELEASE = ["--target", "kubernetes", "--namespace", "ai", "--release", "v4"]


class User:
    """Somebody with a kubeconfig. Commands run in a process of their own."""

    def __init__(self, root: pathlib.Path, server: ApiServer, helm: str) -> None:
        self.server = server
        kubeconfig = root / "kubeconfig"
        kubeconfig.write_text(server.kubeconfig())
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DSV4_", "VLLM_", "HF_"))
        }
        self.env = {
            **clean,
            **{name: value for name, value in chart.environment().items() if name.startswith("HELM_")},
            "KUBECONFIG": str(kubeconfig),
            "DSV4_HELM": str(chart.tools()[helm]),
            "DSV4_STATE_DIR": str(root / "state"),
            "DSV4_CACHE_DIR": str(root / "cache"),
        }

    def run(self, command: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dsv4_deploy", command, *RELEASE, *more],
            env={**self.env, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture
def server() -> Iterator[ApiServer]:
    one = ApiServer()
    yield one
    one.close()


@pytest.fixture
def user(server: ApiServer, tmp_path: pathlib.Path) -> User:
    return User(tmp_path, server, chart.NEWEST)


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
