"""A plan written down for somewhere else: one file per target, each value with its reason.

In: a `Source` (the plan and what was asked for). Out: the text of one file. The same input always gives the
same text, and nothing is decided here: every value is the plan's. Nothing secret is ever written; targets
name the variables and take the values from where they are started.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4_deploy.render.source import Source

TARGETS = {
    "shell": "shell script that runs vLLM on this host",
    "docker": "shell script that starts a container with docker (DOCKER=podman for podman)",
    "compose": "docker compose file",
    "quadlet": "systemd unit that podman runs (.container file)",
    "env": "the environment alone",
    "helm-values": "values for the Helm chart helm/dsv4",
    "kubernetes": "the chart's objects, by `helm template`",
}
"""Name -> what it is. The module of the same name has the function `render`."""

EXECUTABLE = frozenset({"shell", "docker"})


def renderer(target: str) -> Callable[[Source], str]:
    """The function that writes that target."""
    module = importlib.import_module(f"dsv4_deploy.render.{target.replace('-', '_')}")
    render: Callable[[Source], str] = module.render
    return render
