"""What a process has to do as PID 1, or as if it were: take in orphans and wait for them when they end.

vLLM's workers outlive an engine core that is killed and then belong to process 1. In a container that is us;
elsewhere `adopt_orphans` makes it us, so that both behave alike and no zombie stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on our descendants' orphans become our children, as those of PID 1 do.

    https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap(own: subprocess.Popen[bytes] | None) -> None:
    """Wait for every child that has ended. `own` was started by us and keeps its exit code in `returncode`.

    Called on SIGCHLD. One look at a time without taking it, because the exit code of `own` belongs to its
    Popen: whoever waits first gets it.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if own is not None and ended.si_pid == own.pid:
            own.poll()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)
