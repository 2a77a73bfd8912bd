"""Starts vLLM in a session of its own, with its output in a file, and stops it without leaving a process.

In: an argument list, the environment to add and a log file. Out: a running process whose children all carry
DSV4_INSTANCE=<uuid>. vLLM starts an engine process and one worker per rank; when its API server is killed
they can stay, with the GPU's memory. So stopping asks the leader first, then ends everything that carries the
marker.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import procs

# After the leader has gone its children normally follow at once. Those that do not are asked, then killed.
FOLLOW_S = 1.0
LEFTOVER_GRACE_S = 5.0
KILL_GRACE_S = 10.0
POLL_S = 0.1


def start(
    argv: Sequence[str], environment: Mapping[str, str], instance: str, log: pathlib.Path
) -> subprocess.Popen[bytes]:
    """Start the server; its output is appended to `log` (created with mode 0600).

    `environment` is added to this process's own. Raises DeployError when the program cannot be executed.
    """
    # Some of vLLM's processes rename themselves with setproctitle, which would overwrite the environment that
    # /proc shows, and with it the marker. SPT_NOENV keeps it: https://github.com/dvarrazzo/py-setproctitle
    added = {**environment, procs.MARKER: instance, "SPT_NOENV": "1"}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            list(argv),
            env={**os.environ, **added},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise DeployError(
            f"cannot start {argv[0]}",
            why=str(error),
            fix="Check that vLLM is installed in this environment (`make up`).",
        ) from error
    finally:
        os.close(output)


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
