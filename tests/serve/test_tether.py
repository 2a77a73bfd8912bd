"""A tethered program does not outlive its parent, whatever happens to that."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

from dsv4_deploy.serve import tether
from tests.serve.conftest import wait_for

PARENT = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", {tether.__file__!r}, str(os.getpid()), "/bin/sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_it_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(
            lambda: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() == b"/bin/sleep\x0060\x00",
            "the program",
        )
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(pid), "the end of the tethered program")


def test_it_does_not_begin_when_its_parent_has_gone_already() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", tether.__file__, "1", "/bin/echo", "never"], capture_output=True
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_program_that_cannot_be_started() -> None:
    done = subprocess.run(
        [sys.executable, tether.__file__, str(os.getpid()), "/nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "cannot start /nowhere" in done.stderr
