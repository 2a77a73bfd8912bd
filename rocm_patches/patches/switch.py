"""Which of this bundle's kernels run in vLLM: one environment variable, read when a patch is applied."""

from __future__ import annotations

import os

from rocm_patches.registry import PatchError

SWITCH = "DSV4_KERNELS"
# Those that save launches are on; the others replace one launch by one, or are not shown to be faster
# (docs/performance.md), and are there to be measured on AMD hardware.
DEFAULT = frozenset({"mhc", "compressor"})
ALL = DEFAULT | {"prologue", "output", "router"}


def wanted(kernel: str) -> bool:
    """Whether DSV4_KERNELS asks for this kernel: auto (or unset), all, off, or names with commas between.

    Raises PatchError for a name that no kernel has.
    """
    text = os.environ.get(SWITCH, "").strip().lower() or "auto"
    named = {"auto": DEFAULT, "all": ALL, "off": frozenset()}.get(text)
    if named is None:
        named = frozenset(filter(None, (one.strip() for one in text.split(","))))
        if unknown := named - ALL:
            raise PatchError(
                f"{SWITCH} names {', '.join(sorted(unknown))}, which no kernel is called. It takes auto, all, off, or "
                f"some of {', '.join(sorted(ALL))} with commas between."
            )
    return kernel in named
