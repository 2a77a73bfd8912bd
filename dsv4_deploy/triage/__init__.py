"""Names the cause of a vLLM that failed, from its log: the first real error, what it means, what to do.

In: a log, which may be large, damaged or somebody else's. Out: a `Diagnosis`. The known failures are data
(rules.yaml); what no rule knows is shown, not guessed.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import BinaryIO

from dsv4_deploy.errors import refused
from dsv4_deploy.triage.diagnosis import Diagnosis, write_termination_log

__all__ = ["Diagnosis", "diagnose", "diagnose_named", "diagnose_stream", "write_termination_log"]


def diagnose(path: pathlib.Path, exit_code: int | None = None) -> Diagnosis:
    """Read the log at `path`. `exit_code` is how the process ended, where that is known: negative for a
    signal, as subprocess has it, or 128 + signal, as shells and containers have it.

    Raises OSError when the log cannot be read.
    """
    with path.open("rb") as stream:
        quiet_s = max(0.0, time.time() - path.stat().st_mtime)
        return diagnose_stream(stream, str(path), exit_code, quiet_s)


def diagnose_named(name: str, exit_code: int | None = None) -> Diagnosis:
    """The log that a person names: a path, or "-" for standard input. Raises DeployError (exit code 2)."""
    if name == "-":
        return diagnose_stream(sys.stdin.buffer, "standard input", exit_code)
    try:
        return diagnose(pathlib.Path(name), exit_code)
    except (OSError, ValueError) as error:
        raise refused(
            f"cannot read the log {name}",
            why=f"{error.strerror}." if isinstance(error, OSError) and error.strerror else str(error),
            fix="Name a file: dsv4-deploy triage FILE. Or pipe one: kubectl logs POD | dsv4-deploy triage -",
        ) from error


def diagnose_stream(
    stream: BinaryIO,
    name: str,
    exit_code: int | None = None,
    quiet_s: float = 0.0,
    root: pathlib.Path = pathlib.Path("/"),
) -> Diagnosis:
    """The same for anything that can be read, such as standard input. `quiet_s`: seconds without a new line;
    `root`: the file system in which the GPUs of this machine are looked up."""
    from dsv4_deploy.triage.rules import book
    from dsv4_deploy.triage.search import Search

    search = Search(book(), _facts(root))
    search.feed(stream)
    return search.diagnosis(name, exit_code, quiet_s, _running())


def _facts(root: pathlib.Path) -> list[str]:
    """What this machine tells that vLLM does not log: GPUs that are virtual functions of one."""
    from dsv4_deploy import catalog
    from dsv4_deploy.facts.gpu import read_pci

    facts = []
    for device in read_pci(root):
        found = catalog.card_by_device_id(device.device_id)
        if found and found[1]:
            facts.append(f"{device.address} is an SR-IOV virtual function of {found[0].name}")
    return facts


def _running() -> list[str]:
    """The names of the programs that run on this machine."""
    import psutil

    return [process.info["name"] or "" for process in psutil.process_iter(["name"])]
