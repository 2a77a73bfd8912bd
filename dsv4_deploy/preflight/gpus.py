"""Checks of the AMD GPUs, their driver and their device files. In: a Case. Out: findings.

A GPU is judged by what the kernel reports (device id, compute units, memory), never by a product name; what
a deployment may ask of it is for the rules of the plan. None of this has been seen on AMD hardware by us; the
tests run on hosts made of files in the driver's layout.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from dsv4_deploy.catalog import card_by_device_id, releases
from dsv4_deploy.catalog.release import version
from dsv4_deploy.facts.gpu import Gpu, describe
from dsv4_deploy.facts.host import Device
from dsv4_deploy.plan.rules.hardware import part_of_card
from dsv4_deploy.preflight.case import Case
from dsv4_deploy.preflight.finding import Finding, fail, ok, warn

GIB = 2**30
DEFAULT_UTILISATION = 0.92
"""vLLM's own --gpu-memory-utilization when no flag says otherwise."""

KFD_LINK = "https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"
PARTITION_LINK = "https://github.com/ROCm/k8s-device-plugin/issues/157"


def gpu_driver(case: Case) -> Iterator[Finding]:
    """The driver shows the GPUs that the bus has."""
    host = case.host
    if host.gpus:
        cards = len({device.address for device in host.pci})
        hidden = cards - len({gpu.pci for gpu in host.gpus})
        text = f"{describe(host.gfx_names)} in the driver's topology"
        if hidden > 0:
            text += f"; {hidden} more on this machine are not given to this process"
        yield ok("gpu-driver", text)
        return
    if not host.pci:
        yield fail(
            "gpu-driver",
            "no AMD accelerator on the PCI bus",
            "This machine has none, or the virtual machine or container was given none.",
            "Run this on the GPU host; give a virtual machine its GPUs by passthrough or as virtual functions. "
            "Without a GPU, --device cpu serves the tiny model.",
            "W26",
        )
        return
    drivers = {device.driver for device in host.pci}
    seen = f"{len(host.pci)} AMD accelerators on the PCI bus ({host.pci[0].device_id})"
    if drivers == {"vfio-pci"}:
        why = "They are bound to vfio-pci, that is, set aside for virtual machines."
        fix = "Run inside the virtual machine that has them, or bind them to amdgpu again."
    elif not host.driver_loaded:
        why = "The kernel module amdgpu is not loaded."
        fix = "Load it (modprobe amdgpu) or install AMD's driver (package amdgpu-dkms); look at dmesg when that fails."
    else:
        why = (
            "The module is loaded, but its compute topology shows this process no GPU: the device cgroup of a "
            "container hides those that it was not given, and a failed initialisation leaves none."
        )
        fix = "Give the container /dev/kfd and /dev/dri; on the host look at dmesg for amdgpu errors."
    yield fail("gpu-driver", f"{seen}, none usable", why, fix, "F16", "W26", link=KFD_LINK)


def gpu_devices(case: Case) -> Iterator[Finding]:
    """/dev/kfd and each render node can be opened for reading and writing, as this user."""
    host = case.host
    if not host.gpus:
        return
    there = {device.path for device in host.render}
    missing = [] if host.kfd else ["/dev/kfd"]
    missing += [path for gpu in host.gpus if (path := f"/dev/dri/{gpu.render_node}") not in there]
    if missing:
        yield fail(
            "gpu-devices",
            f"missing: {_some(missing)}",
            "The HIP runtime opens /dev/kfd and the render node of each GPU; without them it finds no GPU.",
            "Give them to the container (--device /dev/kfd --device /dev/dri; in Kubernetes request amd.com/gpu). "
            "On a host, the driver makes them: look at dmesg.",
            "W26",
            link=KFD_LINK,
        )
    devices = [device for device in (host.kfd, *host.render) if device]
    closed = [device for device in devices if device.problem]
    if closed:
        yield _closed(case, closed)
    elif not missing:
        others = sorted({device.gid for device in devices} - host.groups)
        if host.container and others:
            yield warn(
                "gpu-devices",
                f"the devices can be opened, but not because of their group {' '.join(map(str, others))}",
                f"User {host.uid} is in groups {', '.join(str(gid) for gid in sorted(host.groups))}; without its "
                "privileges, or on a host with stricter modes, the same container finds no GPU.",
                _join_groups(case, others),
                "F16",
                "W27",
                link="https://github.com/ROCm/k8s-device-plugin/issues/39",
            )
        else:
            yield ok("gpu-devices", f"/dev/kfd and {len(host.render)} render nodes can be opened")


def _closed(case: Case, closed: list[Device]) -> Finding:
    host = case.host
    found = f"cannot open {_some([device.path for device in closed])} ({closed[0].problem})"
    if closed[0].problem == os.strerror(errno.EPERM):
        return fail(
            "gpu-devices",
            found,
            "The file is there, but the device cgroup of this container forbids it.",
            "Start the container with --device /dev/kfd --device /dev/dri.",
            "F16",
            "W26",
            link="https://github.com/vllm-project/vllm/issues/7207",
        )
    gids = sorted({device.gid for device in closed})
    names = " ".join(f"{gid} ({host.group_names.get(gid, 'no name here')})" for gid in gids)
    return fail(
        "gpu-devices",
        found,
        f"They belong to group {names}, and user {host.uid} is in groups "
        f"{', '.join(str(gid) for gid in sorted(host.groups))}. The number differs from host to host.",
        _join_groups(case, gids),
        "F16",
        "F30",
        "W27",
        link="https://github.com/ROCm/k8s-device-plugin/issues/39",
    )


def _join_groups(case: Case, gids: list[int]) -> str:
    """How a process gets into groups, where it runs."""
    host = case.host
    numbers = " ".join(str(gid) for gid in gids)
    ways = {
        "kubernetes": f"Add supplementalGroups: [{', '.join(map(str, gids))}] to the pod's securityContext.",
        "docker": f"Start the container with {' '.join(f'--group-add {gid}' for gid in gids)}.",
        "podman": f"Start the container with {' '.join(f'--group-add {gid}' for gid in gids)}, or "
        "--group-add keep-groups when rootless.",
    }
    group = host.group_names.get(gids[0], gids[0])
    on_host = f"Add the user to group {numbers} (usermod -aG {group} USER) and log in again."
    return ways.get(host.container or "", on_host)


def gpu_card(case: Case) -> Iterator[Finding]:
    """Which cards these are. What the plan thinks of them is said by its rules."""
    for gpu in {gpu.device_id: gpu for gpu in case.host.gpus}.values():
        known = card_by_device_id(gpu.device_id)
        name = f"{known[0].name}{' virtual function' if known[1] else ''}" if known else "not in the catalog"
        yield ok(
            "gpu-card",
            f"device id {gpu.device_id} ({name}): {gpu.compute_units} compute units, {gpu.hbm_bytes / GIB:.0f} GiB",
        )


def gpu_partition(case: Case) -> Iterator[Finding]:
    """Whole cards: SPX and NPS1. By mode where the driver tells it, else by units, memory and bus address."""
    parts = [(gpu, sign) for gpu in case.host.gpus if (sign := _part(gpu, case.host.gpus))]
    if parts:
        gpu, sign = parts[0]
        yield fail(
            "gpu-partition",
            f"{len(parts)} of {len(case.host.gpus)} devices are parts of a card: {gpu.render_node} {sign}",
            "Tensor parallelism needs whole cards (compute partition SPX, memory partition NPS1): a part has an "
            "eighth to a half of the memory, and communication fails with more than eight of them.",
            "With nothing running: amd-smi set --gpu all --compute-partition SPX && "
            "amd-smi set --gpu all --memory-partition NPS1",
            "F17",
            "F31",
            "W30",
            link=PARTITION_LINK,
        )
    elif case.host.gpus:
        told = any(gpu.compute_partition for gpu in case.host.gpus)
        yield ok("gpu-partition", "SPX, NPS1" if told else "whole cards, by compute units and memory")


def _part(gpu: Gpu, gpus: tuple[Gpu, ...]) -> str | None:
    """What shows that the device is a part of a card: also that it has less memory than the card."""
    sign, known = part_of_card(gpu, gpus), card_by_device_id(gpu.device_id)
    # 0.9: drivers and firmware keep some of the memory, and virtual functions a little more.
    if sign is None and known and gpu.hbm_bytes < 0.9 * known[0].hbm_bytes:
        return f"has {gpu.hbm_bytes / GIB:.0f} of {known[0].hbm_bytes / GIB:.0f} GiB"
    return sign


def gpu_memory(case: Case) -> Iterator[Finding]:
    """The GPUs that vLLM will take are free. It takes the first ones, not the idle ones."""
    ours = [gpu for gpu in case.host.gpus[: case.tp] if gpu.hbm_used_bytes is not None]
    # The memory of a server that this one replaces will be free by then.
    if not ours or case.our_pid is not None:
        return
    share = float(case.flag("gpu-memory-utilization") or DEFAULT_UTILISATION)
    busy = [gpu for gpu in ours if (gpu.hbm_used_bytes or 0) > (1 - share) * gpu.hbm_bytes]
    if not busy:
        yield ok("gpu-memory", f"{share:.0%} of each of the first {len(ours)} GPUs is free")
        return
    used = (busy[0].hbm_used_bytes or 0) / GIB
    yield fail(
        "gpu-memory",
        f"{_some([gpu.render_node for gpu in busy])} in use ({used:.0f} of {busy[0].hbm_bytes / GIB:.0f} GiB)",
        f"The plan takes {share:.0%} of the first {len(ours)} GPUs, and vLLM ends at start when less is free.",
        "End what holds the memory (amd-smi process shows it); after a crash it can be a worker that was left behind.",
        link="https://docs.vllm.ai/en/latest/configuration/conserving_memory/",
    )


def gpu_power(case: Case) -> Iterator[Finding]:
    """The power caps, which decide the speed as much as anything else."""
    caps = {gpu.power_cap_w for gpu in case.host.gpus if gpu.power_cap_w is not None}
    text = f"{' and '.join(str(cap) for cap in sorted(caps))} W per card"
    if len(caps) > 1:
        yield warn(
            "gpu-power",
            f"different power caps: {text}",
            "All ranks wait for the slowest card.",
            "Set one cap: amd-smi set --gpu all --power-cap WATTS",
            "F51",
            link="https://github.com/ROCm/ATOM/issues/896",
        )
    elif caps:
        yield ok("gpu-power", text)


def driver_window(case: Case) -> Iterator[Finding]:
    """The loaded driver and the ROCm userspace are a pair that AMD tests."""
    host, table = case.host, releases()
    if not host.driver_loaded:
        return
    if host.driver is None:
        yield warn(
            "driver-window",
            f"the amdgpu driver that came with kernel {host.kernel}",
            "AMD's table covers its own driver releases; which ROCm fits the kernel's own one is not in it.",
            "Install AMD's driver (amdgpu-dkms) of a release in the table.",
            "F61",
            link=table.drivers_source,
        )
        return
    window = table.window(host.driver)
    release = table.modules.get(host.driver, host.driver)
    name = host.driver if release == host.driver else f"{host.driver} (release {release})"
    if window is None:
        yield warn(
            "driver-window",
            f"amdgpu driver {name} is not in the table",
            "Outside a driver's window nothing refuses to start; it faults under load.",
            "Compare with AMD's table yourself, or install a driver that is in it.",
            "F61",
            link=table.drivers_source,
        )
    elif case.rocm is None:
        yield warn(
            "driver-window",
            f"amdgpu driver {name}; the ROCm version that will run is not known here",
            "The two must fit: outside the driver's window nothing refuses to start; it faults under load.",
            f"The driver is tested with ROCm {', '.join(window.rocm)}. Name the image's version: "
            "dsv4-deploy preflight --rocm VERSION",
            "F61",
            link=table.drivers_source,
        )
    elif any(version(case.rocm)[:2] == version(fitting)[:2] for fitting in window.rocm):
        yield ok("driver-window", f"amdgpu driver {name} with ROCm {case.rocm}")
    else:
        yield fail(
            "driver-window",
            f"amdgpu driver {name} with ROCm {case.rocm}",
            f"AMD tests this driver with ROCm {', '.join(window.rocm)}. Outside nothing refuses to start; under load "
            "it ends with 'Memory access fault by GPU node-N'.",
            "Install a driver whose window has that ROCm, or use an image with a ROCm of this window.",
            "F61",
            "W31",
            link=table.drivers_source,
        )


def _some(names: list[str]) -> str:
    """The first few of a list: a page of 64 paths helps nobody."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
