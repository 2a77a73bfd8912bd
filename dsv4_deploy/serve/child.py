"""Starts a server in a session of its own and stops it without leaving a process.

In: an argument list, the environment to add and where its output goes. Out: a running process whose children
all carry DSV4_INSTANCE=<uuid>. vLLM starts an engine process and one worker per rank; when its API server is killed
they can stay, with the GPU's memory. So stopping asks the leader first, then ends everything that carries the
marker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import procs
from dsv4_deploy.serve import tether as tether_program

# After the leader has gone its children normally follow at once. Those that do not are asked, then killed.
FOLLOW_S = 1.0
LEFTOVER_GRACE_S = 5.0
KILL_GRACE_S = 10.0
POLL_S = 0.1


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    instance: str,
    *,
    stdout: int,
    stderr: int,
    tethered: bool = False,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program; `stdout` and `stderr` are descriptors (or subprocess.STDOUT), `inherit` others that it
    keeps.

    `environment` is added to this process's own. A `tethered` program gets SIGTERM when this process dies; its
    first item must be a path. Raises DeployError when the program cannot be executed.
    """
    # Some of vLLM's processes rename themselves with setproctitle, which would overwrite the environment that
    # /proc shows, and with it the marker. SPT_NOENV keeps it: https://github.com/dvarrazzo/py-setproctitle
    added = {**environment, procs.MARKER: instance, "SPT_NOENV": "1"}
    tether = [sys.executable, "-I", "-S", tether_program.__file__, str(os.getpid())] if tethered else []
    try:
        return subprocess.Popen(
            [*tether, *argv],
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=tuple(inherit),
        )
    except OSError as error:
        raise DeployError(
            f"cannot start {argv[0]}",
            why=str(error),
            fix="Check that vLLM is installed in this environment (`make up`).",
        ) from error


def stop(
    instance: str,
    leader: procs.Identity | None,
    timeout_s: float,
    hurry: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Stop a server and everything it started; return the pids that had to be killed (empty: it ended by
    itself).

    The leader gets SIGTERM and `timeout_s` seconds; children that outlive it get SIGTERM too, and a few
    seconds to let go of the GPU. Then, or at once when `hurry` says so, all that is left gets SIGKILL.
    Raises DeployError when something survives even that.
    """

    def wait(seconds: float, busy: Callable[[], object]) -> None:
        deadline = time.monotonic() + seconds
        while busy() and time.monotonic() < deadline and not hurry():
            time.sleep(POLL_S)

    def left() -> list[procs.Process]:
        return procs.members(instance, leader)

    if leader is not None and procs.is_running(leader):
        procs.send(leader, signal.SIGTERM)
        wait(timeout_s, lambda: procs.is_running(leader))
    if leader is None or not procs.is_running(leader):
        wait(FOLLOW_S, left)
        for process in left():
            procs.send(process, signal.SIGTERM)
        wait(LEFTOVER_GRACE_S, left)
    return _kill(instance, leader)


def _kill(instance: str, leader: procs.Identity | None) -> list[int]:
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_GRACE_S
    # A dying process may have just started another, so look again until nobody is left.
    while left := procs.members(instance, leader):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise DeployError(
                f"processes of the server could not be ended: pid {pids}",
                why="They ignore even SIGKILL, which means that they hang inside the kernel or a GPU driver.",
                fix="Look at `dmesg`; a GPU reset or a reboot may be needed.",
            )
        for process in left:
            procs.send(process, signal.SIGKILL)
            killed.add(process.pid)
        time.sleep(POLL_S)
    return sorted(killed)
