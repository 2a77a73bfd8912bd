"""`dsv4-deploy join`: this host's share of a model that another host leads.

In: the plan that the leader made too, with this host's node rank. Out: this process becomes vLLM without an API
server; its exit code is the command's. There is no supervisor, because a worker answers nothing that could be
probed: the leader's engine fails when a worker is gone, and whoever started the group starts it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from dsv4_deploy.errors import refused
from dsv4_deploy.plan.settings import Plan
from dsv4_deploy.serve import command

NEEDED = ("nnodes", "node-rank", "master-addr")


def arguments(plan: Plan) -> list[str]:
    """vLLM's arguments for a worker. Raises DeployError (exit code 2) when it is not said what to join."""
    given = {flag.name: flag.value for flag in plan.flags}
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise refused(
            f"join needs {', '.join(f'--set {name}=...' for name in missing)}",
            why="A worker must know how many hosts there are, which one it is, and where the leader is.",
            fix="For example --set nnodes=2 --set node-rank=1 --set master-addr=LEADER.",
        )
    if given["node-rank"] == "0":
        raise refused(
            "--set node-rank=0 is the leader's",
            why="The host of rank 0 answers requests.",
            fix="Run `dsv4-deploy serve` there, and `join` on the others.",
        )
    return [*plan.argv, "--headless"]


def join(plan: Plan, environ: Mapping[str, str]) -> NoReturn:
    """Become vLLM. Raises DeployError when there is none here or the plan names no group."""
    argv = [*command.launcher(environ), *arguments(plan)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, {**environ, **plan.environment})  # noqa: S606 (no shell: an argument list)
