"""What the commands do when their target is Kubernetes: up, status, logs, down.

In: what the command line said. Out: lines for people, or a DeployError. Nothing secret passes through here: keys and
tokens are named by the Secrets that hold them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import yaml

from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.k8s import release as helm
from dsv4_deploy.k8s import rollout
from dsv4_deploy.k8s.api import Api, UnreachableError
from dsv4_deploy.k8s.release import Release
from dsv4_deploy.k8s.view import Pod, View, look

Say = Callable[[str], None]

PATIENCE_VARIABLE = "DSV4_PATIENCE"
"""Scales how long a trouble that may pass by itself (an image, a node) may last: 0 gives up at once."""


def up(
    api: Api, release: Release, values: str, files: Sequence[pathlib.Path], timeout_s: float | None, say: Say
) -> View:
    """Install or upgrade, then wait until every pod is ready. Raises DeployError with the cause.

    `timeout_s` None is the startup budget of the values and ten minutes.
    """
    _check_secrets(api, release, [yaml.safe_load(values) or {}, *(_read(file) for file in files)])
    revision = helm.upgrade(release, values, files)
    say(f"helm: {release.name} in {release.namespace}, revision {revision.number} ({revision.status})")
    limit = timeout_s if timeout_s is not None else _budget(values, files) + 600
    patience = float(os.environ.get(PATIENCE_VARIABLE) or 1.0)
    return rollout.wait(api, release, limit, say, patience=patience)


def status_lines(api: Api, release: Release) -> tuple[list[str], bool]:
    """A table of the pods and what is wrong with each; False when something is, or when pods are missing."""
    revision = helm.status(release)
    if revision is None:
        return [f"There is no release {release.name} in {release.namespace}."], False
    view = look(api, release)
    state = f"revision {revision.number}, {revision.status}, {view.workload or 'no workload'}"
    lines = [f"{release.name} in {release.namespace}: {state}, {view.updated} of {view.wanted} ready"]
    if view.download:
        lines.append(f"weights: {view.download}")
    rows = [("POD", "STATE", "RESTARTS", "AGE", "NODE"), *(_row(pod) for pod in view.pods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for cause in view.causes:
        lines += [f"{cause.pod}: {cause.what}", f"  why: {cause.why}", f"  fix: {cause.fix}"]
        lines += [f"  | {line}" for line in cause.detail.splitlines()]
    return lines, view.complete and not view.causes


def status_json(api: Api, release: Release) -> tuple[str, bool]:
    """The same for programs."""
    revision = helm.status(release)
    view = look(api, release) if revision else None
    found = {
        "release": dataclasses.asdict(release),
        "revision": dataclasses.asdict(revision) if revision else None,
        "view": dataclasses.asdict(view) if view else None,
    }
    return json.dumps(found, indent=2), bool(view and view.complete and not view.causes)


def down(release: Release, say: Say) -> None:
    """Remove the release. Where none is it says so and succeeds."""
    if helm.uninstall(release):
        say(
            f"Removed {release.name} from {release.namespace}. Pods finish their requests first; the chart's claim "
            "with the weights is kept."
        )
    else:
        say(f"There is no release {release.name} in {release.namespace}.")


def logs(api: Api, release: Release, lines: int, follow: bool, previous: bool) -> Iterator[str]:
    """The servers' logs, each line with its pod's name in front when there are several. Raises DeployError."""
    view = look(api, release)
    if not view.pods:
        raise DeployError(
            f"{release.name} has no pods in {release.namespace}",
            why="The release does not exist, or its pods could not be created.",
            fix=f"dsv4-deploy status {release.options}",
        )
    names = [pod.name for pod in view.pods]
    query = {"container": "server", "tailLines": str(lines), **({"previous": "true"} if previous else {})}
    if follow:
        yield from _followed(api, release, names, {**query, "follow": "true"})
        return
    for name in names:
        text = api.text(_log_path(release, name), **query)
        for line in (text or "").splitlines():
            yield line if len(names) == 1 else f"{name}  {line}"


def _followed(api: Api, release: Release, names: Sequence[str], query: dict[str, str]) -> Iterator[str]:
    """Lines of all pods as they come, until every one has ended. Raises the first pod's DeployError after the rest."""
    from urllib3.exceptions import HTTPError

    lines: queue.SimpleQueue[str | DeployError | None] = queue.SimpleQueue()

    def read(name: str) -> None:
        try:
            for line in api.lines(_log_path(release, name), **query):
                lines.put(line if len(names) == 1 else f"{name}  {line}")
        except DeployError as error:
            lines.put(error)
        except (OSError, HTTPError) as error:
            lines.put(UnreachableError(f"the log of {name} broke off", why=str(error), fix="Ask again."))
        finally:
            lines.put(None)

    for name in names:
        threading.Thread(target=read, args=(name,), daemon=True).start()
    open_streams = len(names)
    failed: DeployError | None = None
    while open_streams:
        line = lines.get()
        if line is None:
            open_streams -= 1
        elif isinstance(line, DeployError):
            failed = failed or line
        else:
            yield line
    if failed is not None:
        raise failed


def _log_path(release: Release, pod: str) -> str:
    return f"/api/v1/namespaces/{release.namespace}/pods/{pod}/log"


def _row(pod: Pod) -> tuple[str, ...]:
    age = "-" if pod.age_s is None else f"{int(pod.age_s) // 60} min"
    return pod.name, pod.state, str(pod.restarts), age, pod.node or "-"


def _read(file: pathlib.Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise refused(f"{file} cannot be read as values", why=str(error), fix="Give a YAML file.") from error
    if not isinstance(content or {}, dict):
        raise refused(
            f"{file} holds no values", why="Its top level is no mapping.", fix="Give a YAML file of values."
        )
    return content or {}


def _budget(values: str, files: Sequence[pathlib.Path]) -> float:
    """probes.startup.budgetSeconds of the last file that has it; the chart's default otherwise."""
    budget = 4500.0
    for content in (yaml.safe_load(values) or {}, *(_read(file) for file in files)):
        found = content
        for key in ("probes", "startup", "budgetSeconds"):
            found = found.get(key, {}) if isinstance(found, dict) else {}
        if isinstance(found, int | float):
            budget = float(found)
    return budget


def _check_secrets(api: Api, release: Release, contents: Sequence[dict[str, object]]) -> None:
    """Refuse before anything is installed when a Secret that the values name is not there, or lacks its key."""
    for section, what, key in (
        ("apiKey", "API key", "api-key"),
        ("huggingFaceToken", "hub's token", "token"),
    ):
        asked = {"existingSecret": "", "key": key}
        for content in contents:  # later files win
            part = content.get(section)
            asked.update(part if isinstance(part, dict) else {})
        name = asked["existingSecret"]
        if not name:
            continue
        command = (
            f"kubectl create secret generic {name} -n {release.namespace} --from-file={asked['key']}=FILE"
        )
        try:
            found = api.get(f"/api/v1/namespaces/{release.namespace}/secrets/{name}")
        except DeployError:
            continue  # who may not read Secrets may still install
        if found is None:
            raise refused(
                f"there is no Secret {name} in {release.namespace} for the {what}",
                why="Pods that name it would never start.",
                fix=command,
            )
        keys = sorted(found.get("data") or {})
        if asked["key"] not in keys:
            raise refused(
                f"the Secret {name} in {release.namespace} has no key {asked['key']} for the {what}",
                why=f"It has: {', '.join(keys) or 'none'}. Pods that name it would never start.",
                fix=f"Set {section}.key to one of them, or make the Secret anew: {command}",
            )
