"""Writes docs/patches.md from the catalogue of patches: `make docs`. In: rocm_patches.patches. Out: the page,
or with --check only whether it is current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rocm_patches import registry  # noqa: E402
from rocm_patches.patches import PATCHES  # noqa: E402
from rocm_patches.patches.not_needed import NOT_NEEDED  # noqa: E402

PAGE = ROOT / "docs" / "patches.md"

HEAD = """# Patches

<!-- Written by `make docs` from rocm_patches/patches/; do not edit. -->

What this bundle changes in vLLM, and what it found not to need changing. No file of vLLM is changed: the
plugin `rocm_patches` replaces functions in memory, in the API server, the engine core, every worker and the
process that inspects models, at the moment the module that defines them has been loaded.

**Nothing here has run on AMD hardware.** "Simulated gfx942" means: vLLM's own Python code and Triton
kernels, on a CPU, with only the GPU, the compiled libraries and AITER replaced by stand-ins
([tests/rocm_patches/gfx942.py](../tests/rocm_patches/gfx942.py)).

## Which vLLM

A patch applies only where the source of everything that it replaces *or relies on* is known, function by
function, for one of these releases: {releases}. In any other case the start stops before anything is
changed, and says which patch, what it found and what to do.

| | |
|---|---|
| `DSV4_PATCHES=require` | the default: every patch of this platform must fit, or no process starts |
| `DSV4_PATCHES=auto` | apply those that fit, leave out the others, and say so |
| `DSV4_PATCHES=off` | none |
| `DSV4_PATCHES_SKIP=ID,ID` | leave these out, in either mode |

```
dsv4-deploy patches list                    # one line a patch
dsv4-deploy patches show ID                 # symptom, cause, remedy, upstream, the lines that change
dsv4-deploy patches verify                  # do they fit the vLLM of this Python? Reads source, needs no GPU
dsv4-deploy patches verify --vllm-path DIR  # or a wheel, unpacked or not
dsv4-deploy patches status URL              # what each process of a running server has
```

Every process logs one line, `rocm_patches active in process PID, NAME (...)`. vLLM's `/metrics` has
`dsv4_patch_info{{patch, state, process, pid, platform, vllm}}`; `state` is `active`, `armed` (the process
has not loaded what the patch changes), `skipped`, or `failed` (it was undone, and the process does not serve).
"""

WRITING = """
## Writing one

One file per patched vLLM module in `rocm_patches/patches/`, a `Patch` with its `Target`s, its `PATCHES`
added to `rocm_patches/patches/__init__.py`. A target with `replace` is replaced: by a function of our own
that takes the original, or, where the fault is a few words in the middle of a long function, by
`rewrite((old, new))`, which edits vLLM's text. A target without `replace` is relied on: a caller, a reader
of the same bytes. Then:

```
make fingerprints   # gets both releases' sources, records digests, prints what changed
make docs           # this page
```

A new vLLM release: add its wheel to `tools/vllm_sources.py`, run `dsv4-deploy patches verify --vllm-path
DIR` on it, look at each mismatch, then add the release to `releases` of the patches that it still needs.
"""


def link(url: str) -> str:
    """A short Markdown link: repository and number for an issue or pull request, else the host's page."""
    parts = url.rstrip("/").split("/")
    if len(parts) == 7 and parts[5] in ("pull", "issues"):
        return f"[{parts[4]}#{parts[6]}]({url})"
    return f"[source]({url})"


def page() -> str:
    """The whole text."""
    lines = [HEAD.format(releases=", ".join(sorted(registry.fingerprints())))]
    lines += [
        "## All patches",
        "",
        "| patch | platforms | vLLM | what | checked | goes away when |",
        "|---|---|---|---|---|---|",
    ]
    for one in PATCHES:
        cells = [
            f"[{one.id}](#{one.id})", ", ".join(one.platforms), ", ".join(one.releases), one.title, one.checked,
            one.drop_when,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    for one in PATCHES:
        lines += ["", f"### {one.id}", "", f"{one.title}.", ""]
        lines.append(f"* **Symptom**: {one.symptom}.")
        lines.append(f"* **Cause**: {one.cause}.")
        lines.append(f"* **Remedy**: {one.remedy}.")
        lines.append(f"* **Upstream**: {link(one.upstream)}, {one.upstream_state}.")
        if one.needs:
            lines.append(f"* **Needs**: {', '.join(one.needs)}.")
        replaced = [f"`{target.key}`" for target in one.targets if target.replace]
        lines.append(f"* **Replaces**: {', '.join(replaced)}.")
    lines += ["", "## Not needed", ""]
    lines.append("Patches that others carry, or that were expected, and why they are not here.")
    for entry in NOT_NEEDED:
        lines += ["", f"### {entry.id}", "", f"*Claim*: {entry.claim}.", "", f"{entry.finding}", ""]
        lines.append(f"*Shown by*: {entry.proof}.")
    return "\n".join(lines) + "\n" + WRITING


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is stale")
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    temporary = PAGE.with_suffix(".tmp")
    temporary.write_text(page())
    temporary.replace(PAGE)
    print(f"Wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
