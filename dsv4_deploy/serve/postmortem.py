"""What is said after vLLM died or hung: how it ended, what its log gives as the cause, where that is written.

In: exit code, processes, log. Out: triage's Diagnosis with our own observations as notes, in cause.json and in
Kubernetes' termination log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import tempfile
from collections.abc import Sequence

from dsv4_deploy import triage
from dsv4_deploy.serve import procs

# States of /proc/PID/stat that a healthy process is not in for long: man 5 proc_pid_stat.
_STUCK = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "hangs inside the kernel or a driver",
}


def how(code: int | None) -> str:
    """An exit code of subprocess in words."""
    if code is None:
        return "it ended"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            # Real-time signals have no names of their own.
            name = f"signal {-code}"
        hint = "; somebody or the kernel did it, and `dmesg` says whether memory ran out"
        return f"it was killed by {name}{hint if -code == signal.SIGKILL else ''}"
    return f"it ended with exit code {code}"


def stuck(instance: str, leader: procs.Identity | None) -> list[str]:
    """One sentence for each process of the server that cannot go on."""
    return [
        f"{procs.title(process.pid)} (pid {process.pid}) {_STUCK[process.state]}"
        for process in procs.members(instance, leader)
        if process.state in _STUCK
    ]


def examine(
    logs: Sequence[pathlib.Path], how_it_ended: str, code: int | None, observations: Sequence[str]
) -> triage.Diagnosis:
    """Diagnose the parts of one run's log, newest first; the first that triage knows a cause in wins."""
    best = None
    for log in logs:
        with contextlib.suppress(OSError):
            found = triage.diagnose(log, code)
            if best is None or found.verdict == "known":
                best = found
            if found.verdict == "known":
                break
    if best is None:
        best = triage.Diagnosis(
            str(logs[0]) if logs else "", "unknown", "there is no log to look for the cause in"
        )
    return dataclasses.replace(best, notes=(how_it_ended, *observations, *best.notes))


def read(cause: pathlib.Path) -> tuple[str, str] | None:
    """What `write` has left there: how it ended in a sentence, and the whole text; None when there is nothing."""
    try:
        content = json.loads(cause.read_text(encoding="utf-8"))
        return str(content["notes"][0]), str(content["text"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(finding: triage.Diagnosis, cause: pathlib.Path, termination_log: pathlib.Path) -> list[str]:
    """Write the finding to both places; what could not be written, in sentences."""
    problems = []
    try:
        descriptor, name = tempfile.mkstemp(prefix=".cause.", dir=cause.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({**finding.to_dict(), "text": finding.text()}, file, indent=2)
            file.write("\n")
        pathlib.Path(name).replace(cause)
    except OSError as error:
        problems.append(f"cannot write {cause}: {error.strerror or error}")
    try:
        triage.write_termination_log(finding, termination_log)
    except OSError as error:
        problems.append(f"cannot write {termination_log}: {error.strerror or error}")
    return problems
