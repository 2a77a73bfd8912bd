"""Times what the patch registry adds to the start of every vLLM process: importing the catalogue, choosing the patches
that fit by the source of what they touch, and arming them. In: the vLLM beside this Python, whose platform is taken
as given. Out: a table, or JSON; milliseconds of processor time, over fresh processes. The budget is 50 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

BUDGET_MS = 50.0

# Timed behind the standard library's modules that vLLM has loaded long before its plugins.
PROGRAM = """
import ast, contextlib, dataclasses, functools, hashlib, importlib.abc, importlib.metadata, importlib.util, inspect
import json, linecache, logging, pathlib, re, sys, textwrap, time, typing
platform, release = sys.argv[1:]
root = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
begin = time.process_time()
from rocm_patches import registry
from rocm_patches.patches import PATCHES
imported = time.process_time()
selection = registry.select(PATCHES, registry.Sources(root), platform, release, {})
selected = time.process_time()
registry.Applier(selection).arm()
armed = time.process_time()
parts = [imported - begin, selected - imported, armed - selected]
print(json.dumps([len(selection.patches), *(part * 1e3 for part in parts)]))
"""


def measure(platform: str, release: str, repeats: int) -> dict[str, float]:
    """Medians in ms over `repeats` fresh processes, and the slowest whole."""
    runs = []
    for _ in range(repeats):
        argv = [sys.executable, "-c", PROGRAM, platform, release]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    import_ms, select_ms, arm_ms = (statistics.median(run[i] for run in runs) for i in (1, 2, 3))
    totals = [sum(run[1:]) for run in runs]
    return {
        "patches": runs[0][0],
        "import": import_ms,
        "select": select_ms,
        "arm": arm_ms,
        "total": statistics.median(totals),
        "slowest": max(totals),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {name: measure(name, "0.32.0", options.repeats) for name in ("gfx942", "cpu")}
    if options.json:
        print(json.dumps(results))
    else:
        print(f"{'platform':<10}" + "".join(f"{name:>10}" for name in results["cpu"]) + "   ms, budget 50")
        for platform, row in results.items():
            print(f"{platform:<10}" + "".join(f"{value:>10.1f}" for value in row.values()))
    return int(any(row["total"] > BUDGET_MS for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
