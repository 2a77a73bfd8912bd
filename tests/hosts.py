"""Hosts made of files: what the kernel of an AMD machine shows in /sys, /proc and /dev, written to a folder.

The layout and the property lines are those of captures from real MI300X hosts; numbers that differ per card
are in `Card`. Nothing here is read from the machine that runs the test.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

GIB = 2**30
RENDER_GID = 109


@dataclasses.dataclass(frozen=True)
class Card:
    """A product: PCI device id, compute units, memory in bytes, power cap in watts."""

    device_id: int
    compute_units: int
    hbm_bytes: int
    watts: int
    target_version: int = 90402


MI300X = Card(0x74A1, 304, 206141652992, 750)
MI300X_VF = dataclasses.replace(MI300X, device_id=0x74B5)
MI308X = Card(0x74A2, 80, 206141652992, 650)
MI325X = Card(0x74A5, 304, 274861129728, 1000)
MI325X_VF = dataclasses.replace(MI325X, device_id=0x74B9)
MI355X = Card(0x75A3, 256, 309220868096, 1400, 90500)
UNKNOWN = dataclasses.replace(MI300X, device_id=0x74FF)


@dataclasses.dataclass(frozen=True)
class Host:
    """What to write; the defaults are a healthy bare-metal server. A virtual machine shows neither power cap
    nor partitions."""

    card: Card | None = MI300X
    count: int = 8
    compute_partition: str = "SPX"
    memory_partition: str = "NPS1"
    hidden: frozenset[int] = frozenset()
    used_bytes: int = 297 * 2**20
    driver: str | None = "6.16.6"
    module: bool = True
    pci_driver: str = "amdgpu"
    rocm: str | None = "7.2.3-81"
    devices: bool = True
    hypervisor: tuple[str, str] | None = None
    numa_balancing: int = 0
    command_line: str = "BOOT_IMAGE=/vmlinuz-6.8.0-60-generic root=/dev/md0 ro iommu=pt quiet"
    ram_bytes: int = 2267 * GIB
    ram_available: int = 2200 * GIB
    open_files: str = "1048576"
    locked_memory: str = "unlimited"
    memory_max: str = "max"
    mounts: tuple[str, ...] = (
        "/dev/md0 / ext4 rw,relatime 0 0",
        "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0",
    )
    mark: str | None = None


PARTS = {"SPX": 1, "DPX": 2, "QPX": 4, "CPX": 8}


def write(root: pathlib.Path, host: Host) -> pathlib.Path:
    """Write the host below `root` and return it."""
    _put(
        root,
        "proc/meminfo",
        f"MemTotal: {host.ram_bytes // 1024} kB\nMemAvailable: {host.ram_available // 1024} kB\n",
    )
    flags = "fpu sse2 hypervisor" if host.hypervisor else "fpu sse2"
    _put(root, "proc/cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n")
    _put(root, "proc/cmdline", host.command_line + "\n")
    _put(root, "proc/sys/kernel/osrelease", "6.8.0-60-generic\n")
    _put(root, "proc/sys/kernel/numa_balancing", f"{host.numa_balancing}\n")
    _put(
        root,
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max open files            {host.open_files:<20} 1048576              files     \n"
        f"Max locked memory         {host.locked_memory:<20} unlimited            bytes     \n",
    )
    _put(root, "proc/self/cgroup", "0::/system.slice/dsv4.service\n")
    _put(root, "proc/self/mounts", "".join(f"{line}\n" for line in host.mounts))
    _put(root, "sys/fs/cgroup/system.slice/memory.max", f"{host.memory_max}\n")
    _put(root, "sys/fs/cgroup/system.slice/dsv4.service/memory.max", "max\n")
    _put(root, "etc/group", f"root:x:0:\nvideo:x:44:ubuntu\nrender:x:{RENDER_GID}:ubuntu\n")
    (root / "dev/shm").mkdir(parents=True)
    if host.hypervisor:
        _put(root, "sys/class/dmi/id/sys_vendor", host.hypervisor[0])
        _put(root, "sys/class/dmi/id/product_name", host.hypervisor[1])
    if host.mark:
        _put(root, host.mark, "")
    if host.rocm:
        _put(root, "opt/rocm/.info/version", host.rocm)
    if host.card:
        _gpus(root, host, host.card)
    return root


def statvfs(size: int, used: int = 0) -> Callable[[str], os.statvfs_result]:
    """A `statvfs` whose file system has so many bytes."""
    blocks, free = size // 4096, (size - used) // 4096
    return lambda path: os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))


def pci_address(index: int) -> str:
    """The bus address of the host's GPU number `index`."""
    return f"0000:{0x05 + 0x20 * index:02x}:00.0"


def _gpus(root: pathlib.Path, host: Host, card: Card) -> None:
    if host.module:
        _put(root, "sys/module/amdgpu/initstate", "live\n")
        if host.driver:
            _put(root, "sys/module/amdgpu/version", host.driver + "\n")
    if host.devices:
        _put(root, "dev/kfd", "")
    for number in range(2):
        _put(root, f"sys/class/kfd/kfd/topology/nodes/{number}/properties", _CPU_NODE)
    node = 2
    for index in range(host.count):
        _pci_device(root, host, card, index)
        for part in range(PARTS[host.compute_partition]):
            if host.module:
                _kfd_node(root, host, card, node, index, part)
            node += 1


def _pci_device(root: pathlib.Path, host: Host, card: Card, index: int) -> None:
    device = f"sys/bus/pci/devices/{pci_address(index)}"
    _put(root, f"{device}/vendor", "0x1002\n")
    _put(root, f"{device}/device", f"0x{card.device_id:04x}\n")
    _put(root, f"{device}/class", "0x120000\n")
    _put(root, f"{device}/numa_node", f"{index // 4}\n")
    if not host.module:
        return
    driver = root / f"sys/bus/pci/drivers/{host.pci_driver}"
    driver.mkdir(parents=True, exist_ok=True)
    (root / device / "driver").symlink_to(driver)
    _put(root, f"{device}/mem_info_vram_total", f"{card.hbm_bytes}\n")
    _put(root, f"{device}/mem_info_vram_used", f"{host.used_bytes}\n")
    if not host.hypervisor:
        _put(root, f"{device}/current_compute_partition", f"{host.compute_partition}\n")
        _put(root, f"{device}/current_memory_partition", f"{host.memory_partition}\n")
        _put(root, f"{device}/hwmon/hwmon{index}/power1_cap", f"{card.watts * 1_000_000}\n")


def _kfd_node(root: pathlib.Path, host: Host, card: Card, node: int, index: int, part: int) -> None:
    parts = PARTS[host.compute_partition]
    directory = f"sys/class/kfd/kfd/topology/nodes/{node}"
    minor = 128 + 8 * index + part
    properties = _GPU_NODE.format(
        simds=card.compute_units * 4 // parts,
        version=card.target_version,
        device=card.device_id,
        location=(0x05 + 0x20 * index) << 8 | part,
        minor=minor,
        xccs=8 // parts,
    )
    # What the device cgroup keeps from a container reads as nothing.
    _put(root, f"{directory}/properties", "" if index in host.hidden else properties)
    bank = f"heap_type 1\nsize_in_bytes {card.hbm_bytes // parts}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
    _put(root, f"{directory}/mem_banks/0/properties", bank)
    if host.devices and index not in host.hidden:
        _put(root, f"dev/dri/renderD{minor}", "")


def _put(root: pathlib.Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


_CPU_NODE = """cpu_cores_count 96
simd_count 0
mem_banks_count 1
gfx_target_version 0
vendor_id 0
device_id 0
location_id 0
drm_render_minor 0
"""

_GPU_NODE = """cpu_cores_count 0
simd_count {simds}
mem_banks_count 1
caches_count 626
io_links_count 8
p2p_links_count 0
cpu_core_id_base 0
max_waves_per_simd 8
lds_size_in_kb 64
wave_front_size 64
array_count 32
simd_arrays_per_engine 1
cu_per_simd_array 10
simd_per_cu 4
max_slots_scratch_cu 32
gfx_target_version {version}
vendor_id 4098
device_id {device}
location_id {location}
domain 0
drm_render_minor {minor}
num_sdma_engines 2
num_cp_queues 24
max_engine_clk_fcompute 2100
local_mem_size 0
fw_version 166
num_xcc {xccs}
"""
