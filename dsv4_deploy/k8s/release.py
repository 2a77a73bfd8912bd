"""A release of the chart helm/dsv4, by the real helm: install or upgrade, look, remove.

In: values as text, through helm's standard input, never in its arguments. Out: what helm said, or a DeployError. It is
helm that writes to the cluster; nothing else here does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence

from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.render.kubernetes import HELM_VARIABLE, find_chart

OLDEST = (3, 14)
# helm itself waits for nothing here; it only talks to the API.
TIMEOUT_S = 300
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Release:
    """Where a release is. `context` None is the kubeconfig's current one."""

    name: str
    namespace: str
    context: str | None = None

    def __post_init__(self) -> None:
        for what, text, longest in (("--release", self.name, 53), ("--namespace", self.namespace, 63)):
            if not _NAME.fullmatch(text) or len(text) > longest:
                raise refused(
                    f"{what} {text!r} is no name that Kubernetes takes",
                    why=f"A name has lower-case letters, digits and dashes, and at most {longest} characters.",
                    fix=f"For example {what} dsv4.",
                )

    @property
    def selector(self) -> str:
        """The label selector of everything that belongs to it."""
        return f"app.kubernetes.io/instance={self.name}"

    @property
    def options(self) -> str:
        """What to type to mean this release again."""
        context = f" --context {self.context}" if self.context else ""
        return f"--target kubernetes --namespace {self.namespace} --release {self.name}{context}"


@dataclasses.dataclass(frozen=True)
class Revision:
    """The release's last revision, as `helm status` has it."""

    number: int
    status: str
    chart: str


def upgrade(release: Release, values: str, files: Sequence[pathlib.Path]) -> Revision:
    """Install the chart, or upgrade what is there. `files` are the operator's values and win over `values`.

    Returns when the API has the objects, not when pods run. Raises DeployError.
    """
    arguments = [
        "upgrade",
        "--install",
        release.name,
        str(find_chart()),
        "--create-namespace",
        "--values",
        "-",
    ]
    for file in files:
        arguments += ["--values", str(file)]
    done = _helm(release, arguments, values)
    if done.returncode != 0:
        raise _refused(done.stderr)
    revision = status(release)
    if revision is None:
        raise DeployError(
            f"helm installed {release.name}, and it is not there",
            why="Somebody removed it at once.",
            fix=f"helm history {release.name} -n {release.namespace}",
        )
    return revision


def status(release: Release) -> Revision | None:
    """The last revision, None when there is no such release. Raises DeployError."""
    done = _helm(release, ["status", release.name, "--output", "json"])
    if done.returncode != 0:
        if "not found" in done.stderr:
            return None
        raise _refused(done.stderr)
    found = json.loads(done.stdout)
    chart = (found.get("chart") or {}).get("metadata") or {}
    name = "-".join(str(chart[key]) for key in ("name", "version") if chart.get(key))
    return Revision(int(found["version"]), str(found["info"]["status"]), name)


def uninstall(release: Release) -> bool:
    """Remove it; False when it was not there. Claims that the chart marked to keep stay. Raises DeployError."""
    done = _helm(release, ["uninstall", release.name])
    if done.returncode == 0:
        return True
    if "not found" in done.stderr:
        return False
    raise _refused(done.stderr)


def _helm(
    release: Release, arguments: Sequence[str], text: str | None = None
) -> subprocess.CompletedProcess[str]:
    helm = os.environ.get(HELM_VARIABLE) or shutil.which("helm")
    if helm is None:
        raise DeployError(
            "there is no helm on the PATH",
            why="helm installs the chart and remembers what it installed.",
            fix=f"Install helm {OLDEST[0]}.{OLDEST[1]} or newer, or name one: {HELM_VARIABLE}=/path/to/helm",
        )
    command = [helm, *arguments, "--namespace", release.namespace]
    if release.context:
        command += ["--kube-context", release.context]
    try:
        return subprocess.run(
            command,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DeployError(
            f"helm did not end within {TIMEOUT_S} s",
            why="It only talks to the cluster's API here, so that does not answer, or a hook of another chart waits.",
            fix="kubectl get nodes should answer at once; then try again.",
        ) from error
    except OSError as error:
        raise DeployError(f"{helm} cannot be run", why=str(error), fix=f"Correct {HELM_VARIABLE}.") from error


def _refused(stderr: str) -> DeployError:
    """helm's own words, with advice for what is common."""
    words = " ".join(stderr.split())
    if "meet the specifications of the schema" in words:
        return DeployError(
            "the chart does not know these values",
            why="Its schema refuses what is named below.",
            fix="helm/dsv4/README.md lists every value.",
            detail=stderr.strip()[-3000:],
            exit_code=2,
        )
    if "dsv4: " in words:
        return DeployError(
            words.partition("dsv4: ")[2].partition(" Use --debug")[0],
            why="The chart refuses this combination of values.",
            fix="The remedy is in its message.",
            exit_code=2,
        )
    if "another operation" in words:
        fix = "Another helm is at work, or was killed in the middle: helm rollback to the last deployed revision."
    elif "forbidden" in words:
        fix = "Ask for that right. `dsv4-deploy preflight --target kubernetes` lists all that are missing."
    elif "no matches for kind" in words:
        fix = "The cluster lacks that kind: install its operator, or switch it off in the values."
    else:
        fix = "helm's message above says more."
    return DeployError(
        "helm could not do it", why="It said what is below.", fix=fix, detail=stderr.strip()[-3000:]
    )
