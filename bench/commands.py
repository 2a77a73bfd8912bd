"""How fast the commands answer that an operator types on a laptop: whole processes, least of several, seconds.

In: the number of runs. Out: a table, or JSON with --json FILE. Importing torch, vLLM or transformers fails in
these processes, so a figure also says that the command needs none of them. The promise is 0.4 s on an idle
laptop.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

PROMISE_S = 0.4

COMMANDS = {
    "--version": ["--version"],
    "plan (CPU)": ["plan", "--device", "cpu"],
    "plan (Flash, 8 x MI300X)": ["plan", "--gpu", "mi300x:8"],
    "plan (Pro, auto length)": [
        "plan",
        "--gpu",
        "mi325x:8",
        "--model",
        "deepseek-v4-pro",
        "--max-model-len",
        "auto",
    ],
    "rules": ["rules"],
    "render shell": ["render", "shell", "--gpu", "mi300x:8"],
}

BLOCKED = """
import sys
for name in ("torch", "vllm", "transformers", "triton"):
    sys.modules[name] = None
from dsv4_deploy.cli import main
main(sys.argv[1:])
"""


def seconds(arguments: list[str], runs: int) -> tuple[float, float] | None:
    """(wall, processor) seconds of the fastest run, None when the command is not there or fails."""
    best: tuple[float, float] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        environ = {**os.environ, "DSV4_STATE_DIR": scratch, "DSV4_CACHE_DIR": scratch}
        for _ in range(runs):
            before, start = os.times(), time.perf_counter()
            result = subprocess.run(
                [sys.executable, "-c", BLOCKED, *arguments], env=environ, capture_output=True
            )
            wall, after = time.perf_counter() - start, os.times()
            if result.returncode:
                return None
            used = after.children_user + after.children_system - before.children_user - before.children_system
            if best is None or wall < best[0]:
                best = wall, used
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    found = {name: seconds(arguments, options.runs) for name, arguments in COMMANDS.items()}
    print(f"{'command':<28} {'wall s':>8} {'cpu s':>8}   promised: below {PROMISE_S} s")
    for name, times in found.items():
        if times is None:
            print(f"{name:<28} {'failed':>8}")
        else:
            print(f"{name:<28} {times[0]:8.3f} {times[1]:8.3f}   {'yes' if times[0] < PROMISE_S else 'NO'}")
    if options.json:
        table = {name: times and {"wall_s": times[0], "cpu_s": times[1]} for name, times in found.items()}
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
