"""With KUBECONFIG in the environment the tests of the commands really run against that cluster.

Here it is a second API server with a node that looks at its pods; nothing in those tests knows that.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helm import chart
from tests.k8s import cluster
from tests.k8s.apiserver import ApiServer

WITHOUT_IMAGE = ("unschedulable", "no claim", "image", "volume")


@pytest.mark.skipif(bool(os.environ.get("KUBECONFIG")), reason="a cluster is given, and the tests run there")
def test_the_tests_run_where_kubeconfig_points(server: ApiServer, tmp_path: pathlib.Path) -> None:
    cluster.Cluster(server, cluster.like_a_kubelet(server))
    made: list[str] = []
    server.on_change.append(
        lambda verb, item: made.append(f"{verb} {item['kind']} {item['metadata']['name']}")
    )
    kubeconfig = tmp_path / "given"
    kubeconfig.write_text(server.kubeconfig())
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs"]
    tests = pathlib.Path(__file__).with_name("test_commands.py").relative_to(chart.ROOT)
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inner'}", str(tests), "-k", "up_fails or refusals"],
        cwd=chart.ROOT,
        env={**clean, "KUBECONFIG": str(kubeconfig), "DSV4_TEST_PATIENCE": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The refusals and the failures that need no image pass; the rest say what they lack.
    assert f"{len(WITHOUT_IMAGE) + 1} passed, 5 skipped" in done.stdout, done.stdout
    assert "DSV4_TEST_IMAGE names no image" in done.stdout
    namespaces = [line for line in made if " Namespace dsv4-test-" in line]
    assert len({line for line in namespaces if line.startswith("create")}) == 10
    assert len({line for line in namespaces if line.startswith("delete")}) == 10
    assert sum(line.startswith("create Deployment") for line in made) == len(WITHOUT_IMAGE)
