"""`python -m rocm_patches.selftest`: run the suites, print a table or JSON. Exit code 0: all is right; 1: something is
not; 2: wrong usage. An operator named with --skip is run and told, but does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator

import torch

from rocm_patches.selftest import suites


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `problem` is what a suite raised instead of measuring."""

    suite: str
    operator: str
    dialect: str
    error: float
    tolerance: float
    ok: bool
    skipped: bool
    seconds: float
    problem: str = ""


def choose(name: str) -> torch.device:
    """auto: the first GPU, else the CPU. Raises ValueError for a GPU that is not there, RuntimeError for nonsense."""
    there = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if there else "cpu"
    if name.startswith("cuda") and not there:
        raise ValueError("torch sees no GPU here. Use --device cpu for the references alone.")
    return torch.device(name)


def rows_of(suite: str, measure: suites.Suite, device: torch.device, skip: Collection[str]) -> Iterator[Row]:
    """A suite's rows as they become known. What it raises is a failed row of its own, the last."""
    begin = time.monotonic()
    try:
        for one in measure(device):
            passed, skipped, now = one.ok, one.operator in skip, time.monotonic()
            yield Row(
                suite, one.operator, one.dialect, one.error, one.tolerance, passed, skipped, now - begin
            )
            begin = now
    except Exception as problem:
        text = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        yield Row(suite, suite, "-", math.nan, 0, False, suite in skip, time.monotonic() - begin, text)


def run(device: torch.device, skip: Collection[str], told: Callable[[Row], None]) -> list[Row]:
    """All suites; each row is `told` as soon as it is known."""
    rows = []
    for suite, measure in suites.SUITES.items():
        for row in rows_of(suite, measure, device, skip):
            rows.append(row)
            told(row)
    return rows


def line(row: Row) -> str:
    verdict = "ok" if row.ok else "skipped" if row.skipped else "WRONG"
    numbers = f"{row.problem} " if row.problem else f"{row.error:<12.3g}{row.tolerance:<12.3g}"
    return f"{row.operator:<38}{row.dialect:<8}{numbers}{verdict}"


def as_json(rows: Collection[Row], ok: bool, device: str, seconds: float) -> str:
    """One object; an error that is no number is null."""
    plain = [
        {**dataclasses.asdict(row), "error": row.error if math.isfinite(row.error) else None} for row in rows
    ]
    return json.dumps({"ok": ok, "device": device, "seconds": seconds, "rows": plain}, allow_nan=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rocm_patches.selftest", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="an operator whose failure does not count"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    try:
        device = choose(options.device)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")  # the references are written for full fp32 products
    begin = time.monotonic()
    if not options.json:
        print(f"{'operator':<38}{'dialect':<8}{'max error':<12}{'tolerance':<12}")
    rows = run(device, options.skip, lambda row: None if options.json else print(line(row), flush=True))
    if unknown := sorted(set(options.skip) - {row.operator for row in rows}):
        print(f"error: --skip names {', '.join(unknown)}, which no operator is called", file=sys.stderr)
        return 2
    wrong = [row for row in rows if not row.ok and not row.skipped]
    seconds = time.monotonic() - begin
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if options.json:
        print(as_json(rows, not wrong, name, seconds))
    else:
        verdict = f"{len(wrong)} WRONG" if wrong else "all right"
        print(f"{len(rows)} measurements on {name} in {seconds:.0f} s: {verdict}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
