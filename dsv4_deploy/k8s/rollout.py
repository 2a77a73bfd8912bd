"""Waits for a release to run, saying what happens, and gives up with a cause instead of a time-out.

In: an Api, a Release and a deadline. Out: the View of the running release, or a DeployError. A cause that may go away
by itself (an image that is being pushed, a node that is being added) has to last for its patience before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dsv4_deploy.errors import DeployError
from dsv4_deploy.k8s.api import Api, UnreachableError
from dsv4_deploy.k8s.causes import Cause
from dsv4_deploy.k8s.release import Release
from dsv4_deploy.k8s.view import LOADING, Pod, View, look

POLL_S = 2.0
# A control plane that is upgraded is away for minutes, and the pods run on.
UNREACHABLE_PATIENCE_S = 300.0

Say = Callable[[str], None]


def wait(
    api: Api, release: Release, timeout_s: float, say: Say, poll_s: float = POLL_S, patience: float = 1.0
) -> View:
    """Until every pod is ready. `patience` scales how long a passing trouble may last.

    Raises DeployError with the cause, or after `timeout_s` with what each pod was doing.
    """
    deadline = time.monotonic() + timeout_s
    since: dict[tuple[str, str, str], float] = {}
    said: dict[str, str] = {}
    known_restarts: dict[str, int] = {}
    away_since: float | None = None
    while True:
        try:
            view = look(api, release)
        except UnreachableError as error:
            if away_since is None:
                away_since = time.monotonic()
                say(f"{error.what}; asking again")
            if time.monotonic() - away_since >= UNREACHABLE_PATIENCE_S * patience:
                raise
            time.sleep(poll_s)
            continue
        away_since = None
        _tell(view, said, say)
        if view.complete:
            return view
        now = time.monotonic()
        for pod in view.pods:
            known_restarts.setdefault(pod.name, pod.restarts)
        standing = [cause for cause in view.causes if _counts(cause, view, known_restarts)]
        keys = {(cause.name, cause.pod, cause.what) for cause in standing}
        since = {key: moment for key, moment in since.items() if key in keys}
        for cause in standing:
            begun = since.setdefault((cause.name, cause.pod, cause.what), now)
            if now - begun >= cause.patience_s * patience:
                raise failure(cause, release)
        if now >= deadline:
            raise _late(view, release, timeout_s)
        time.sleep(poll_s)


def failure(cause: Cause, release: Release) -> DeployError:
    """The error that names the cause. The release stays as it is, so that it can be looked at."""
    return DeployError(
        f"{cause.pod}: {cause.what}",
        why=cause.why,
        fix=f"{cause.fix} Then run `up` again. Remove it: dsv4-deploy down {release.options}",
        detail=cause.detail,
    )


def _counts(cause: Cause, view: View, known_restarts: dict[str, int]) -> bool:
    """Old news does not count: a pod of the template before the newest one is on its way out, and one that had been
    restarted before `up` looked and loads again may well get ready."""
    pod = next((one for one in view.pods if one.name == cause.pod), None)
    if pod is None:
        return True
    loads_again = pod.state == LOADING and pod.restarts == known_restarts.get(pod.name)
    return pod.current and not loads_again


def _tell(view: View, said: dict[str, str], say: Say) -> None:
    """One line per change."""
    if view.download and said.get("") != view.download:
        said[""] = view.download
        say(f"weights: {view.download}")
    for pod in view.pods:
        text = _line(pod)
        if said.get(pod.name) != text:
            said[pod.name] = text
            say(f"{pod.name}: {text}")


def _line(pod: Pod) -> str:
    text = pod.state + (f" on {pod.node}" if pod.node else "")
    if pod.restarts:
        text += f", {pod.restarts} restart(s)"
    if pod.cause is not None:
        text += f" ({pod.cause.what}: {pod.cause.why})" if pod.cause.why else f" ({pod.cause.what})"
    return text


def _late(view: View, release: Release, timeout_s: float) -> DeployError:
    states = "; ".join(f"{pod.name}: {_line(pod)}" for pod in view.pods) or "there is no pod"
    return DeployError(
        f"{release.name} is not ready after {timeout_s:.0f} s: {view.updated} of {view.wanted} pods",
        why=f"Nothing has failed: {states}.",
        fix=f"It goes on by itself; look again with dsv4-deploy status {release.options}. "
        "Large models load for an hour: --timeout SECONDS.",
    )
