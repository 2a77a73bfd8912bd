"""Target `kubernetes`: the chart's objects for this deployment, by the real `helm template`.

For clusters whose tools take plain manifests, and for review. In: a Source. Out: YAML documents. The values
go to helm through its standard input; nothing is installed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

from dsv4_deploy.errors import DeployError
from dsv4_deploy.render import helm_values, quoting
from dsv4_deploy.render.source import Source, head

CHART = pathlib.Path(__file__).parents[2] / "helm" / "dsv4"
HELM_VARIABLE = "DSV4_HELM"
"""Names another helm than the one on PATH."""

CHART_VARIABLE = "DSV4_CHART"
"""Names the chart's directory or archive, for an installation without this repository."""

HELM_TIMEOUT_S = 60


def render(source: Source) -> str:
    """The manifests. Raises DeployError when there is no helm, no chart, or helm refuses the values."""
    helm = os.environ.get(HELM_VARIABLE) or shutil.which("helm")
    if helm is None:
        raise DeployError(
            "there is no helm on the PATH",
            why="The objects are the chart's, and only helm renders it.",
            fix=f"Install helm 3.17 or newer, or name one: {HELM_VARIABLE}=/path/to/helm. Values alone need no helm: "
            "dsv4-deploy render helm-values",
        )
    chart = pathlib.Path(os.environ.get(CHART_VARIABLE) or CHART)
    if not (chart.is_file() or (chart / "Chart.yaml").is_file()):
        raise DeployError(
            f"there is no chart in {chart}",
            why="It is part of the repository and not of the installed package.",
            fix=f"Run this in a clone of the repository, or name the chart: {CHART_VARIABLE}=/path/to/dsv4-0.1.0.tgz",
        )
    values = helm_values.render(source)
    name = source.plan.deployment.name or "dsv4"
    try:
        done = subprocess.run(
            [helm, "template", name, str(chart), "--values", "-"],
            input=values,
            capture_output=True,
            text=True,
            timeout=HELM_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeployError(f"{helm} cannot be run", why=str(error), fix=f"Correct {HELM_VARIABLE}.") from error
    if done.returncode != 0:
        raise DeployError(
            "helm does not accept these values",
            why="The chart's schema or one of its checks refuses them.",
            fix="The message below names the value.",
            detail=done.stderr.strip(),
        )
    begin = [
        *head(source, "Kubernetes objects of DeepSeek-V4."),
        *quoting.comment("Apply with: kubectl apply -f THIS-FILE"),
    ]
    return "\n".join(begin) + "\n" + done.stdout
