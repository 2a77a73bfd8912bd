"""Runs a program that ends when its parent does: `python tether.py PARENT_PID PROGRAM ARGUMENT...`.

Linux sends the chosen signal when the parent dies in whatever way (PR_SET_PDEATHSIG,
https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html); the setting survives exec. So a supervisor
that is killed leaves no vLLM behind with the GPUs' memory. It is a program of its own because code between
fork and exec in a process with threads may hang. Standard library only, and few of its modules: it runs with
-S -I.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before that.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execv(program[0], program)  # noqa: S606 (an absolute path and a list; there is no shell)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error}")


if __name__ == "__main__":
    main()
