"""Which AMD GPUs this host has, as the kernel driver reports them in sysfs. No ROCm library is needed.

The amdgpu driver lists every compute node under class/kfd/kfd/topology/nodes; CPU nodes are among them and
have target version 0.
Format: https://github.com/torvalds/linux/blob/master/drivers/gpu/drm/amd/amdkfd/kfd_topology.c
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

SYSFS = pathlib.Path("/sys")


def amd_gpus(sysfs: pathlib.Path = SYSFS) -> tuple[str, ...]:
    """The architecture name of every AMD GPU that this process may see ("gfx942", ...), in the driver's
    order.

    Empty where there is none, no driver, or no permission. `sysfs` is where sysfs is mounted.
    """
    nodes = sysfs / "class" / "kfd" / "kfd" / "topology" / "nodes"
    try:
        numbered = sorted((int(node.name), node) for node in nodes.iterdir() if node.name.isdigit())
    except OSError:
        return ()
    names = []
    for _, node in numbered:
        version = _gfx_target_version(node / "properties")
        if version:
            names.append(gfx_name(version))
    return tuple(names)


def gfx_name(version: int) -> str:
    """The driver's decimal target version as the compiler's name: 90402 -> "gfx942", 90010 -> "gfx90a"."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def describe(gpus: Sequence[str]) -> str:
    """A count and the names for people: "4 x gfx942"."""
    if not gpus:
        return "no AMD GPU"
    return ", ".join(f"{list(gpus).count(name)} x {name}" for name in dict.fromkeys(gpus))


def _gfx_target_version(properties: pathlib.Path) -> int:
    # A container that was given some of the host's GPUs still lists all of them: the others' files are empty
    # or cannot be opened (device cgroup). Those are not ours.
    try:
        lines = properties.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "gfx_target_version" and value.strip().isdigit():
            return int(value)
    return 0
