"""Checks of what the server itself needs: vLLM with this bundle's plugin, writable caches, its port.

In: a Case. Out: findings.
"""

from __future__ import annotations

import getpass
import pathlib
from collections.abc import Iterator

from dsv4_deploy.errors import FAILED, DeployError
from dsv4_deploy.facts import storage
from dsv4_deploy.preflight.case import Case
from dsv4_deploy.preflight.finding import Finding, fail, ok, warn
from dsv4_deploy.serve import command

# AITER and Triton compile for ten to twenty minutes on the first start and keep what they made.
CACHE_BYTES_WANTED = 10 * 2**30


def vllm(case: Case) -> Iterator[Finding]:
    """The vLLM that will run is one that this bundle fits."""
    try:
        command.check(case.device, case.environ)
        launcher = command.launcher(case.environ)
    except DeployError as problem:
        yield fail("vllm", problem.what, problem.why, problem.fix)
        return
    if case.environ.get(command.LAUNCHER_VARIABLE):
        yield ok("vllm", f"{launcher[0]}, named by {command.LAUNCHER_VARIABLE}; its version is not checked")
    else:
        yield ok("vllm", f"{command.installed_version()} ({launcher[0]})")


def caches(case: Case) -> Iterator[Finding]:
    """Each directory that vLLM, Triton, AITER and torch compile into can be written to and has room."""
    closed, small = [], []
    for name, path in _cache_directories(case):
        place = storage.describe(path, case.root)
        if not place.writable:
            closed.append((name, path, place.existing))
        elif case.device == "rocm" and place.free_bytes < CACHE_BYTES_WANTED:
            small.append(f"{place.free_bytes / 2**30:.1f} GiB in {place.existing} ({name})")
    for name, path, existing in closed:
        yield fail(
            "caches",
            f"{existing} is not writable for user {case.host.uid}",
            f"{path} would be made there; the first compilation would end with 'Permission denied'.",
            f"Set {name} to a writable directory that outlives the container.",
            "F36",
            "W34",
            link="https://github.com/llm-d/llm-d/issues/1430",
        )
    if small:
        yield warn(
            "caches",
            f"little room: {', '.join(small)}",
            "Compiled kernels and graphs take several GiB, and a full disk ends the server.",
            "Point the variables to a larger volume.",
            "F39",
        )
    elif not closed:
        yield ok("caches", "writable")


def _cache_directories(case: Case) -> list[tuple[str, pathlib.Path]]:
    """(variable, directory), by the defaults of each library."""
    home = case.home
    cache = pathlib.Path(case.environ.get("XDG_CACHE_HOME") or home / ".cache")
    directories = [("VLLM_CACHE_ROOT", cache / "vllm")]
    if case.device == "rocm":
        directories += [
            ("TRITON_CACHE_DIR", home / ".triton" / "cache"),
            ("AITER_JIT_DIR", home / ".aiter"),
            ("TORCHINDUCTOR_CACHE_DIR", pathlib.Path("/tmp") / f"torchinductor_{_user()}"),  # noqa: S108
        ]
    return [(name, pathlib.Path(case.variable(name) or default)) for name, default in directories]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container with a user id that has no name
        return "user"


def port(case: Case) -> Iterator[Finding]:
    """Nobody else listens there, and this user may."""
    from dsv4_deploy.serve.up import check_port

    host, number = case.spec.host, case.spec.port
    if case.our_pid is not None:
        yield ok(
            "port", f"{number} is held by our own server (pid {case.our_pid}), which `up` keeps or replaces"
        )
        return
    try:
        check_port(host, number)
    except DeployError as problem:
        free = _free_port(host, number) if problem.exit_code == FAILED else None
        fix = f"{problem.fix} For example --port {free}." if free else problem.fix
        yield fail("port", problem.what, problem.why, fix, "F76", "W52")
    else:
        yield ok("port", f"{host} port {number} is free")


def _free_port(host: str, wanted: int) -> int | None:
    """The next port above the wanted one that anybody may have, if there is one nearby."""
    from dsv4_deploy.serve.up import check_port

    first = max(wanted + 1, 1024)
    for number in range(first, min(first + 100, 65536)):
        try:
            check_port(host, number)
        except DeployError:
            continue
        return number
    return None
