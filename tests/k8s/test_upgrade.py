"""The real helm upgrades a release whose values change, and nothing that Kubernetes forbids to change is changed."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest

from tests.helm import chart
from tests.k8s.apiserver import ApiServer
from tests.k8s.conftest import User

PRO = {
    "model": {
        "name": "deepseek-v4-pro",
        "sizeGiB": 806,
        "source": {"type": "download"},
        "download": {"revision": "a" * 40, "repository": "deepseek-ai/DeepSeek-V4-Pro"},
    },
    "tensorParallelSize": 8,
    "cache": {"type": "claim", "sizeGiB": 50},
}
FLASH = {
    "model": {"source": {"type": "download"}, "download": {"revision": "b" * 40}},
    "cache": {"type": "claim"},
    "podLabels": {"team": "other"},
    "commonLabels": {"app.kubernetes.io/name": "other"},
    "podSecurity": {"supplementalGroups": [44, 993]},
}


class Helm:
    """helm as an operator types it, with the test's cluster."""

    def __init__(self, user: User, helm: str, scratch: pathlib.Path) -> None:
        self.program, self.env, self.scratch = str(chart.tools()[helm]), user.env, scratch

    def upgrade(self, values: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
        file = self.scratch / "values.yaml"
        file.write_text(json.dumps(values))
        arguments = ["upgrade", "--install", "v4", str(chart.CHART), "-n", "ai", "-f", str(file), *more]
        return subprocess.run([self.program, *arguments], env=self.env, capture_output=True, text=True)


@pytest.fixture(params=chart.HELMS)
def helm(request: pytest.FixtureRequest, user: User, tmp_path: pathlib.Path) -> Helm:
    return Helm(user, request.param, tmp_path)


def test_another_model_in_the_same_release(server: ApiServer, helm: Helm) -> None:
    done = helm.upgrade(PRO)
    assert done.returncode == 0, done.stderr
    before = {item["metadata"]["name"]: item for item in server.all("jobs")}
    selector = server.get("deployments", "v4-dsv4")["spec"]["selector"]
    done = helm.upgrade(FLASH)
    assert done.returncode == 0, done.stderr
    assert server.get("deployments", "v4-dsv4")["spec"]["selector"] == selector
    # The pod of a Job cannot be changed: another one takes its place.
    (job,) = server.all("jobs")
    assert job["metadata"]["name"] not in before
    # A claim cannot shrink: 806 GiB and a quarter more stay, although Flash needs less.
    sizes = {
        item["metadata"]["name"]: item["spec"]["resources"]["requests"]["storage"]
        for item in server.all("persistentvolumeclaims")
    }
    assert sizes == {"v4-dsv4-model": "1008Gi", "v4-dsv4-cache": "50Gi"}


def test_a_claim_that_somebody_made_larger(server: ApiServer, helm: Helm) -> None:
    assert helm.upgrade(FLASH).returncode == 0
    claim = server.get("persistentvolumeclaims", "v4-dsv4-model")
    claim["spec"]["resources"]["requests"]["storage"] = "1Ti"
    server.put(claim)
    assert helm.upgrade(FLASH).returncode == 0
    kept = server.get("persistentvolumeclaims", "v4-dsv4-model")
    assert kept["spec"]["resources"]["requests"]["storage"] == "1Ti"
    assert helm.upgrade(PRO, "--set", "model.sizeGiB=1000").returncode == 0
    grown = server.get("persistentvolumeclaims", "v4-dsv4-model")
    assert grown["spec"]["resources"]["requests"]["storage"] == "1250Gi"


def test_values_of_the_release_before(server: ApiServer, helm: Helm) -> None:
    assert helm.upgrade(PRO).returncode == 0
    for how in ("--reuse-values", "--reset-then-reuse-values"):
        done = helm.upgrade({"replicas": 2}, how)
        assert done.returncode == 0, done.stderr
        spec = server.get("deployments", "v4-dsv4")["spec"]
        assert spec["replicas"] == 2
        arguments = spec["template"]["spec"]["containers"][0]["args"]
        assert arguments[arguments.index("--tp") + 1] == "8"
