"""Runs the self-test of the arithmetic, `python -m rocm_patches.selftest`, in a process of its own: it needs torch,
which the control side never imports, and its GPU memory must be free again before vLLM starts.

In: a device, names to let pass. Out: the program's exit code for people, or its verdict as data for a start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsv4_deploy.errors import DeployError

SKIP = "DSV4_SELFTEST_SKIP"
"""Environment variable: operators whose failure does not stop a start, separated by semicolons."""

# It takes less than a minute; the first run on a GPU also compiles every kernel.
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Verdict:
    """`wrong` are the operators that failed and were not named, each with its numbers."""

    count: int
    seconds: float
    device: str
    wrong: tuple[str, ...]
    skipped: tuple[str, ...]


def names(text: str) -> list[str]:
    """The operators of a list; their names hold commas, so semicolons separate them."""
    return [name for name in (part.strip() for part in text.split(";")) if name]


def command(device: str, skip: Iterable[str], *, as_json: bool) -> list[str]:
    argv = [sys.executable, "-m", "rocm_patches.selftest", "--device", device]
    for name in skip:
        argv += ["--skip", name]
    return [*argv, "--json"] if as_json else argv


def show(device: str, skip: Sequence[str], *, as_json: bool) -> int:
    """Run it on this terminal; returns its exit code."""
    return subprocess.run(command(device, skip, as_json=as_json), check=False).returncode


def judge(environ: Mapping[str, str], device: str = "cuda") -> Verdict:
    """Run it and read what it found. Raises DeployError when it gives no verdict at all."""
    argv = command(device, names(environ.get(SKIP, "")), as_json=True)
    try:
        done = subprocess.run(
            argv, env=dict(environ), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise DeployError(
            f"the self-test did not end within {TIMEOUT_S:.0f} s",
            why="A kernel hangs, or its compilation does.",
            fix="Run `dsv4-deploy selftest` to see how far it comes.",
        ) from error
    except (ValueError, IndexError) as error:
        raise DeployError(
            "the self-test gave no verdict",
            why=(done.stderr.strip().splitlines() or [f"It ended with {done.returncode}."])[-1],
            fix="Run `dsv4-deploy selftest` by hand.",
        ) from error
    rows = found["rows"]
    wrong = tuple(_told(row) for row in rows if not row["ok"] and not row["skipped"])
    skipped = tuple(row["operator"] for row in rows if not row["ok"] and row["skipped"])
    return Verdict(len(rows), found["seconds"], found["device"], wrong, skipped)


def _told(row: Mapping[str, object]) -> str:
    """`operator (dialect): error against tolerance`, or what it raised."""
    said = row["problem"] or f"{row['error']} where {row['tolerance']} is allowed"
    return f"{row['operator']} ({row['dialect']}): {said}"
