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

PACKAGED = pathlib.Path(__file__).parents[1] / "chart"
"""Where a wheel has the chart: setup.py puts it there. In a clone it is not."""
CHART = PACKAGED if PACKAGED.is_dir() else pathlib.Path(__file__).parents[2] / "helm" / "dsv4"
HELM_VARIABLE = "DSV4_HELM"
"""Names another helm than the one on PATH."""

CHART_VARIABLE = "DSV4_CHART"
"""Names another directory or archive of the chart."""

HELM_TIMEOUT_S = 60


def find_chart() -> pathlib.Path:
    """The chart's directory or archive. Raises DeployError when there is none."""
    named = os.environ.get(CHART_VARIABLE)
    chart = pathlib.Path(named or CHART)
    if chart.is_file() or (chart / "Chart.yaml").is_file():
        return chart
    raise DeployError(
        f"there is no chart in {chart}",
        why=f"{CHART_VARIABLE} names that place." if named else "The installation is not complete.",
        fix=f"{CHART_VARIABLE}=/path/to/dsv4-0.1.0.tgz or a directory with a Chart.yaml; unset, it is the chart of "
        "this package."
        if named
        else f"Install the package again, or name a chart: {CHART_VARIABLE}=/path/to/dsv4-0.1.0.tgz",
    )


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
    chart = find_chart()
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
