"""Names the cause of a vLLM that failed, from its log: the first real error, what it means, what to do.

In: the path of a log. Out: a `Diagnosis`.
"""

from __future__ import annotations

import pathlib

from dsv4_deploy.serve.logfile import first_error
from dsv4_deploy.triage.diagnosis import Diagnosis, Line, write_termination_log

__all__ = ["Diagnosis", "diagnose", "write_termination_log"]


def diagnose(path: pathlib.Path, exit_code: int | None = None) -> Diagnosis:
    """Read the log at `path`. `exit_code` is how the process ended, where that is known: negative for a
    signal, as subprocess has it, or 128 + signal, as shells and containers have it.

    Raises OSError when the log cannot be read.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    block = first_error(path)
    excerpt = tuple(
        Line(number, text)
        for number, text in enumerate(lines, 1)
        if any(part and part in text for part in block)
    )
    return Diagnosis(str(path), "unknown", "no rule knows this log", excerpt=excerpt[:12])
