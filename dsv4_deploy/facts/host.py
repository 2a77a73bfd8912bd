"""What this host offers a server: GPUs, their driver and devices, memory, limits, kernel settings.

In: the root of a file system, so that tests can hand in a made-up or captured one. Out: a `HostFacts`. Only
files that every user may read are read, and the GPU devices are opened and closed, because no file mode says
for certain whether a process may use them (groups, device cgroups and security modules all have a say).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping

from dsv4_deploy.facts.gpu import ROOT, Gpu, PciDevice, describe, gfx_name, read_gpus, read_pci

__all__ = ["Device", "HostFacts", "Limits", "Memory", "amd_gpus", "describe", "gfx_name", "read"]

# A cgroup without a limit says "max" (version 2) or the largest page-aligned number (version 1).
_NO_LIMIT = 2**62


@dataclasses.dataclass(frozen=True)
class Device:
    """A device file that the runtime has to open. `problem` is the system's own word for why this process
    cannot open it for reading and writing, None when it can."""

    path: str
    gid: int
    problem: str | None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes. `limit` is the smallest memory limit of the control groups that this process is in, None
    without one; `shm` is the size of /dev/shm, `shm_free` what is left of it, both None where it is not
    mounted."""

    total: int
    available: int
    limit: int | None
    shm: int | None
    shm_free: int | None


@dataclasses.dataclass(frozen=True)
class Limits:
    """The soft limits of this process; None means unlimited. `locked_memory` is in bytes and does not bind a
    process with the capability IPC_LOCK."""

    open_files: int | None
    locked_memory: int | None


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """Everything about a host that a plan, a rule or a preflight check may look at.

    `kfd` and `render` are the device files of the GPUs in `gpus` (those that exist). `driver` is the version
    of the amdgpu module that is *loaded*; None with `driver_loaded` means the one that came with the kernel,
    which has no version of its own. `rocm` is the userspace installed here, which is not what a container
    brings along. `container` is "docker", "podman" or "kubernetes" where this process is in one.
    """

    gpus: tuple[Gpu, ...]
    pci: tuple[PciDevice, ...]
    driver_loaded: bool
    driver: str | None
    rocm: str | None
    kernel: str
    kernel_arguments: tuple[str, ...]
    kfd: Device | None
    render: tuple[Device, ...]
    uid: int
    groups: frozenset[int]
    group_names: Mapping[int, str]
    memory: Memory
    limits: Limits
    numa_balancing: bool
    hypervisor: str | None
    container: str | None

    @property
    def gfx_names(self) -> tuple[str, ...]:
        """The architecture of every GPU, in the driver's order."""
        return tuple(gpu.gfx for gpu in self.gpus)


def amd_gpus(root: pathlib.Path = ROOT) -> tuple[str, ...]:
    """The architecture name of every AMD GPU that this process may see ("gfx942", ...), in the driver's
    order. Empty where there is none, no driver, or no permission."""
    return tuple(gpu.gfx for gpu in read_gpus(root))


def read(root: pathlib.Path = ROOT, statvfs: Callable[[str], os.statvfs_result] = os.statvfs) -> HostFacts:
    """Look at the host. `statvfs` tells how full /dev/shm is (a made-up root has no file system of its
    own)."""
    gpus = read_gpus(root)
    dri = root / "dev/dri"
    return HostFacts(
        gpus=gpus,
        pci=read_pci(root),
        driver_loaded=(root / "sys/module/amdgpu").is_dir(),
        driver=_first_line(root / "sys/module/amdgpu/version"),
        rocm=_rocm(root),
        kernel=_first_line(root / "proc/sys/kernel/osrelease") or "",
        kernel_arguments=tuple((_first_line(root / "proc/cmdline") or "").split()),
        kfd=_device(root, root / "dev/kfd"),
        render=tuple(device for gpu in gpus if (device := _device(root, dri / gpu.render_node)) is not None),
        uid=os.geteuid(),
        groups=frozenset({os.getegid(), *os.getgroups()}),
        group_names=_group_names(root),
        memory=_memory(root, statvfs),
        limits=_limits(root),
        numa_balancing=_first_line(root / "proc/sys/kernel/numa_balancing") not in (None, "0"),
        hypervisor=_hypervisor(root),
        container=_container(root),
    )


def _rocm(root: pathlib.Path) -> str | None:
    """The version of the ROCm userspace under /opt/rocm ("7.2.3"), without its build number."""
    text = _first_line(root / "opt/rocm/.info/version")
    match = re.match(r"\d+(\.\d+)+", text or "")
    return match[0] if match else None


def _device(root: pathlib.Path, path: pathlib.Path) -> Device | None:
    try:
        gid = path.stat().st_gid
    except OSError:
        return None
    problem = None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        problem = error.strerror
    return Device(f"/{path.relative_to(root)}", gid, problem)


def _group_names(root: pathlib.Path) -> dict[int, str]:
    names = {}
    for line in _lines(root / "etc/group"):
        name, _, rest = line.partition(":")
        gid = rest.split(":")[1:2]
        if gid and gid[0].isdigit():
            names[int(gid[0])] = name
    return names


def _memory(root: pathlib.Path, statvfs: Callable[[str], os.statvfs_result]) -> Memory:
    meminfo = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            meminfo[name] = int(number[0]) * 1024
    total = meminfo.get("MemTotal", 0)
    shm = shm_free = None
    if any(mount == "/dev/shm" for _, mount, _ in mounts(root)):  # noqa: S108
        status = statvfs(str(root / "dev/shm"))
        shm, shm_free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return Memory(total, meminfo.get("MemAvailable", total), _memory_limit(root), shm, shm_free)


def mounts(root: pathlib.Path = ROOT) -> list[tuple[str, str, str]]:
    """(device, mount point, file system type) of everything mounted, in mount order."""
    found = []
    for line in _lines(root / "proc/self/mounts"):
        fields = line.split()
        if len(fields) >= 3:
            # The kernel writes spaces and the like as octal escapes.
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
            found.append((fields[0], point, fields[2]))
    return found


def _memory_limit(root: pathlib.Path) -> int | None:
    """The tightest limit on the way from this process's control group to the top, both versions."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = base / path.lstrip("/")
        for directory in (inside, *inside.parents):
            value = _first_line(directory / name)
            if value and value.isdigit():
                limits.append(int(value))
            if directory == base:
                break
    tightest = min(limits, default=_NO_LIMIT)
    return tightest if tightest < _NO_LIMIT else None


def _limits(root: pathlib.Path) -> Limits:
    soft = {}
    for line in _lines(root / "proc/self/limits"):
        fields = re.split(r" {2,}", line)
        if len(fields) >= 2:
            soft[fields[0]] = int(fields[1]) if fields[1].isdigit() else None
    return Limits(
        open_files=soft.get("Max open files"),
        locked_memory=None if _may_lock(root) else soft.get("Max locked memory"),
    )


def _may_lock(root: pathlib.Path) -> bool:
    """Whether the process has CAP_IPC_LOCK, bit 14 of its effective capabilities (capabilities(7))."""
    for line in _lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip() or "0", 16) >> 14 & 1)
    return False


def _hypervisor(root: pathlib.Path) -> str | None:
    """The name of the machine that this virtual machine runs on, None on real hardware."""
    flags = next((line for line in _lines(root / "proc/cpuinfo") if line.startswith("flags")), "")
    if "hypervisor" not in flags.split():
        return None
    parts = [_first_line(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or "unknown hypervisor"


def _container(root: pathlib.Path) -> str | None:
    for name, mark in (
        ("kubernetes", "run/secrets/kubernetes.io"),
        ("kubernetes", "var/run/secrets/kubernetes.io"),
        ("podman", "run/.containerenv"),
        ("docker", ".dockerenv"),
    ):
        if (root / mark).exists():
            return name
    return None


def _first_line(path: pathlib.Path) -> str | None:
    return next((line.strip() for line in _lines(path)), None) or None


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
