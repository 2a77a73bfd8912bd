"""The AMD GPUs of this host, as the kernel driver describes them in sysfs. No ROCm library is needed.

In: the root of a file system (another one in tests). Out: a `Gpu` for every compute device that this process
may use, and a `PciDevice` for every AMD accelerator on the bus, usable or not. The driver lists its devices
under class/kfd/kfd/topology/nodes; CPUs are among them and have target version 0.
Formats: https://github.com/torvalds/linux/blob/master/drivers/gpu/drm/amd/amdkfd/kfd_topology.c and
https://github.com/torvalds/linux/blob/master/drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c (partitions).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path("/")

# Each narrows what the ones before it left: ROCm's runtime, then HIP, which reads CUDA's name as well.
# https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

AMD_VENDOR = "1002"
# PCI base classes of devices that compute: 03 display (an MI300X's VGA-less function may say so), 12
# processing accelerators.
_COMPUTE_CLASSES = ("03", "12")
# Heap types of a memory bank that are the GPU's own memory: visible and invisible to the CPU.
_VRAM_HEAPS = (1, 2)


@dataclasses.dataclass(frozen=True)
class PciDevice:
    """One AMD accelerator on the PCI bus. `driver` is the kernel driver that has it ("amdgpu",
    "vfio-pci"), None if none has."""

    address: str
    device_id: str
    driver: str | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One compute device of the driver: a whole GPU, or a partition of one.

    `node` is its number in the driver's topology (the N of "Memory access fault by GPU node-N"), `device_id`
    four hexadecimal digits ("74a1"), `pci` its bus address. `render_node` is the name under /dev/dri.
    Memory is in bytes, the power cap in watts. None means that the driver does not tell (a virtual function,
    an old driver), which is common and no error.
    """

    node: int
    gfx: str
    device_id: str
    pci: str
    compute_units: int
    hbm_bytes: int
    hbm_used_bytes: int | None
    render_node: str
    compute_partition: str | None
    memory_partition: str | None
    power_cap_w: int | None
    numa_node: int | None


def read_gpus(root: pathlib.Path = ROOT) -> tuple[Gpu, ...]:
    """Every AMD compute device that this process may see, in the driver's order.

    Empty where there is none, no driver, or no permission.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    gpus = []
    for number, node in _numbered(nodes):
        properties = _properties(node / "properties")
        if properties.get("gfx_target_version", 0):
            gpus.append(_gpu(root, number, node, properties))
    return tuple(gpus)


def read_pci(root: pathlib.Path = ROOT) -> tuple[PciDevice, ...]:
    """Every AMD accelerator on the PCI bus, by address, whether or not a driver has it or we may use it."""
    devices = []
    for device in _entries(root / "sys/bus/pci/devices"):
        if _hex(device / "vendor") != AMD_VENDOR:
            continue
        kind = _text(device / "class") or ""
        if kind.removeprefix("0x")[:2] in _COMPUTE_CLASSES:
            driver = device / "driver"
            name = driver.readlink().name if driver.is_symlink() else None
            devices.append(PciDevice(device.name, _hex(device / "device") or "", name))
    return tuple(devices)


def gfx_name(version: int) -> str:
    """The driver's decimal target version as the compiler's name: 90402 -> "gfx942", 90010 -> "gfx90a"."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def visible(gpus: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the GPUs that a process with that environment sees, in its order.

    A list ends at the first entry that names no GPU (-1 hides all); a GPU that is named by its UUID counts
    as one of those there are.
    """
    left = tuple(gpus)
    names = [VISIBILITY[0], VISIBILITY[1] if VISIBILITY[1] in environ else VISIBILITY[2]]
    for name in names:
        if name not in environ:
            continue
        kept: list[str] = []
        for entry in environ[name].split(","):
            word = entry.strip()
            if word.isascii() and word.isdigit() and len(word) < 6 and int(word) < len(left):
                kept.append(left[int(word)])
            elif word.upper().startswith("GPU-") and len(kept) < len(left):
                kept.append(left[len(kept)])
            else:
                break
        left = tuple(kept)
    return left


def describe(gpus: Sequence[str]) -> str:
    """A count and the names for people: "4 x gfx942"."""
    if not gpus:
        return "no AMD GPU"
    return ", ".join(f"{list(gpus).count(name)} x {name}" for name in dict.fromkeys(gpus))


def _gpu(root: pathlib.Path, number: int, node: pathlib.Path, properties: dict[str, int]) -> Gpu:
    pci = _pci_address(root, properties)
    device = root / "sys/bus/pci/devices" / pci
    simds = properties.get("simd_count", 0)
    return Gpu(
        node=number,
        gfx=gfx_name(properties["gfx_target_version"]),
        device_id=f"{properties.get('device_id', 0):04x}",
        pci=pci,
        compute_units=simds // properties.get("simd_per_cu", 4),
        hbm_bytes=_vram_bytes(node),
        hbm_used_bytes=_number(device / "mem_info_vram_used"),
        render_node=f"renderD{properties.get('drm_render_minor', 0)}",
        compute_partition=_partition(device / "current_compute_partition"),
        memory_partition=_partition(device / "current_memory_partition"),
        power_cap_w=_power_cap(device),
        numa_node=_number(device / "numa_node"),
    )


def _pci_address(root: pathlib.Path, properties: dict[str, int]) -> str:
    """The bus address. A partition has its index in place of the function (or in the top bits, in older
    kernels), so where no such function exists, function 0 is meant."""
    location = properties.get("location_id", 0) & 0xFFFF
    base = f"{properties.get('domain', 0):04x}:{location >> 8:02x}:{location >> 3 & 0x1F:02x}"
    address = f"{base}.{location & 7}"
    return address if (root / "sys/bus/pci/devices" / address).exists() else f"{base}.0"


def _vram_bytes(node: pathlib.Path) -> int:
    banks = [_properties(bank / "properties") for _, bank in _numbered(node / "mem_banks")]
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VRAM_HEAPS)


def _partition(path: pathlib.Path) -> str | None:
    name = (_text(path) or "").upper()
    return name if name and name not in ("UNKNOWN", "N/A") else None


def _power_cap(device: pathlib.Path) -> int | None:
    for hwmon in _entries(device / "hwmon"):
        microwatts = _number(hwmon / "power1_cap")
        if microwatts is not None:
            return microwatts // 1_000_000
    return None


def _properties(path: pathlib.Path) -> dict[str, int]:
    # A container that was given some of the host's GPUs still lists all of them: the others' files are empty
    # or cannot be opened (device cgroup). Those are not ours.
    values = {}
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            values[name] = int(value)
    return values


def _numbered(directory: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    return sorted((int(entry.name), entry) for entry in _entries(directory) if entry.name.isdigit())


def _entries(directory: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _text(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _hex(path: pathlib.Path) -> str | None:
    text = _text(path)
    return text.removeprefix("0x") if text else None


def _number(path: pathlib.Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.isdigit() else None
