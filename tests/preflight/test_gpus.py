"""The GPU checks on every kind of host, with the rows of the failure collection that they answer."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib

import pytest

from dsv4_deploy.facts.gpu import PciDevice
from dsv4_deploy.preflight import gpus, run
from tests import as_user, hosts
from tests.hosts import GIB, Host
from tests.preflight.conftest import Bench, expect

KVM = ("QEMU", "Standard PC (Q35 + ICH9, 2009)")


def test_a_healthy_host_is_all_fine(bench: Bench) -> None:
    case = bench.case()
    found = [finding for check in run.CHECKS if check in run.GPU_CHECKS for finding in check(case)]
    assert [finding.level for finding in found] == ["ok"] * len(found)
    assert {finding.check for finding in found} == {
        "gpu-driver", "gpu-devices", "gpu-card", "gpu-partition", "gpu-memory", "gpu-power",
        "driver-window",
    }  # fmt: skip


def test_no_gpu_at_all(bench: Bench) -> None:
    expect(
        bench.finding("gpu-driver", Host(card=None)),
        "fail",
        "no AMD accelerator",
        "--device cpu",
        refs=("W26",),
    )
    assert bench.findings("gpu-devices") == []
    assert bench.findings("gpu-memory") == []


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host(module=False), ("8 AMD accelerators", "74a1", "not loaded", "modprobe amdgpu")),
        (Host(pci_driver="vfio-pci", hidden=frozenset(range(8))), ("vfio-pci", "virtual machines")),
        (Host(hidden=frozenset(range(8))), ("device cgroup", "/dev/kfd")),
    ],
)
def test_gpus_on_the_bus_that_cannot_be_used(bench: Bench, host: Host, words: tuple[str, ...]) -> None:
    expect(bench.finding("gpu-driver", host), "fail", "none usable", *words, refs=("F16", "W26"))


def test_a_container_with_half_of_the_gpus(bench: Bench) -> None:
    host = Host(hidden=frozenset({0, 1, 2, 3}), mark=".dockerenv")
    expect(bench.finding("gpu-driver", host), "ok", "4 x gfx942", "4 more on this machine")


def test_missing_device_files(bench: Bench) -> None:
    found = bench.finding("gpu-devices", Host(devices=False))
    expect(found, "fail", "/dev/kfd", "/dev/dri/renderD128", "and 5 more", "--device /dev/kfd", refs=("W26",))


def test_one_missing_render_node(bench: Bench) -> None:
    bench.case()
    (bench.folder / "root/dev/dri/renderD136").unlink()
    expect(bench.finding("gpu-devices"), "fail", "missing: /dev/dri/renderD136", refs=("W26",))


@pytest.mark.parametrize(
    ("mark", "way"),
    [
        (None, "usermod -aG"),
        (".dockerenv", "--group-add"),
        ("run/.containerenv", "keep-groups"),
        ("run/secrets/kubernetes.io", "supplementalGroups: [109]"),
    ],
)
@as_user.only_root
def test_devices_of_a_group_that_we_are_not_in(bench: Bench, mark: str | None, way: str) -> None:
    """Judged as the user that has no access: in a child process, because this one is root."""
    hosts.write(bench.folder / "root", Host(mark=mark))
    for device in [bench.folder / "root/dev/kfd", *(bench.folder / "root/dev/dri").iterdir()]:
        os.chown(device, 0, hosts.RENDER_GID)
        device.chmod(0o660)
    as_user.let_in(bench.folder)

    def judge() -> str:
        found = bench.finding("gpu-devices")
        return f"{found.level}|{found.found}|{found.why}|{found.fix}|{found.refs}"

    text = as_user.run(judge, [44])
    assert text.startswith("fail|cannot open /dev/kfd, /dev/dri/renderD128"), text
    assert "and 5 more (Permission denied)" in text
    assert "group 109 (render), and user 12345 is in groups 44, 12345" in text
    assert way in text
    assert "F16" in text and "F30" in text and "W27" in text


def test_w27_a_container_with_the_video_group_alone(bench: Bench) -> None:
    """The devices open (root, or loose modes), and the group of the render nodes is none of ours."""
    case = bench.case(Host(mark=".dockerenv"))
    render = tuple(dataclasses.replace(device, gid=109, problem=None) for device in case.host.render)
    inside = dataclasses.replace(case.host, render=render, groups=frozenset({0, 44, *os.getgroups()}) - {109})
    (found,) = gpus.gpu_devices(dataclasses.replace(case, host=inside))
    expect(found, "warn", "not because of their group 109", "--group-add 109", refs=("F16", "W27"))
    joined = dataclasses.replace(inside, groups=inside.groups | {109})
    (found,) = gpus.gpu_devices(dataclasses.replace(case, host=joined))
    assert found.level == "ok"
    on_the_host = dataclasses.replace(inside, container=None)
    (found,) = gpus.gpu_devices(dataclasses.replace(case, host=on_the_host))
    assert found.level == "ok"


def test_a_device_cgroup_is_not_a_matter_of_groups(bench: Bench) -> None:
    case = bench.case(Host(mark=".dockerenv"))
    assert case.host.kfd is not None
    denied = dataclasses.replace(case.host.kfd, problem=os.strerror(errno.EPERM))
    (found,) = gpus.gpu_devices(dataclasses.replace(case, host=dataclasses.replace(case.host, kfd=denied)))
    expect(found, "fail", "device cgroup", "--device /dev/kfd", refs=("F16", "W26"))


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (hosts.MI300X, ("device id 74a1 (mi300x)", "304 compute units", "192 GiB")),
        (hosts.MI308X, ("device id 74a2 (mi308x)", "80 compute units")),
        (hosts.UNKNOWN, ("device id 74ff (not in the catalog)",)),
        (hosts.MI325X_VF, ("device id 74b9 (mi325x virtual function)", "256 GiB")),
    ],
)
def test_known_cards(bench: Bench, card: hosts.Card, words: tuple[str, ...]) -> None:
    expect(bench.finding("gpu-card", Host(card=card)), "ok", *words)
    expect(bench.finding("gpu-partition", Host(card=card)), "ok")


@pytest.mark.parametrize(("compute", "memory"), [("CPX", "NPS4"), ("DPX", "NPS1"), ("SPX", "NPS4")])
def test_partitions_that_the_driver_tells(bench: Bench, compute: str, memory: str) -> None:
    found = bench.finding("gpu-partition", Host(compute_partition=compute, memory_partition=memory))
    expect(found, "fail", f"{compute}/{memory}", "amd-smi set --gpu all --compute-partition SPX",
           refs=("F17", "F31", "W30"))  # fmt: skip


def test_partitions_that_the_driver_hides(bench: Bench) -> None:
    """As in a virtual machine: only units, memory and bus addresses are left to judge by."""
    found = bench.finding("gpu-partition", Host(compute_partition="CPX", hypervisor=KVM))
    expect(found, "fail", "64 of 64 devices", "38 of 304 compute units", refs=("F31",))


def test_partitions_of_an_unknown_card(bench: Bench) -> None:
    found = bench.finding("gpu-partition", Host(card=hosts.UNKNOWN, compute_partition="CPX", hypervisor=KVM))
    expect(found, "fail", "shares the bus address 0000:05:00.0", refs=("F17",))


def test_a_card_with_part_of_its_memory(bench: Bench) -> None:
    small = dataclasses.replace(hosts.MI300X, hbm_bytes=96 * GIB)
    expect(bench.finding("gpu-partition", Host(card=small)), "fail", "96 of 192 GiB", refs=("F17",))


def test_memory_that_somebody_uses(bench: Bench) -> None:
    found = bench.finding("gpu-memory", Host(used_bytes=120 * GIB), tp=4)
    expect(found, "fail", "renderD128", "120 of 192 GiB", "first 4 GPUs", "amd-smi process")


def test_memory_of_gpus_that_are_not_ours_to_use(bench: Bench) -> None:
    case = bench.case(tp=4)
    busy = bench.folder / "root/sys/bus/pci/devices" / hosts.pci_address(6) / "mem_info_vram_used"
    busy.write_text(str(150 * GIB))
    assert case.tp == 4
    expect(bench.finding("gpu-memory", tp=4), "ok", "first 4 GPUs")
    expect(bench.finding("gpu-memory", tp=8), "fail", "renderD176")


def test_memory_of_the_server_that_is_replaced(bench: Bench) -> None:
    assert bench.findings("gpu-memory", Host(used_bytes=150 * GIB), our_pid=4242) == []


def test_different_power_caps(bench: Bench) -> None:
    bench.case()
    hwmon = bench.folder / "root/sys/bus/pci/devices" / hosts.pci_address(0) / "hwmon/hwmon0/power1_cap"
    hwmon.write_text("550000000\n")
    expect(bench.finding("gpu-power"), "warn", "550 and 750 W", "slowest", refs=("F51",))


def test_the_power_cap_is_told(bench: Bench) -> None:
    expect(bench.finding("gpu-power", Host(card=hosts.MI308X)), "ok", "650 W per card")


@pytest.mark.parametrize(
    ("driver", "rocm", "level", "words"),
    [
        ("6.16.6", "7.2.3", "ok", ("6.16.6 (release 30.20.1)", "ROCm 7.2.3")),
        ("6.14.14", "10.0.0", "ok", ("30.10",)),
        ("6.4", "7.2.1", "ok", ()),
        ("6.3", "10.0.0", "fail", ("6.3", "10.0.0", "Memory access fault", "6.1, 6.2, 6.3, 6.4, 7.0")),
        ("6.16.6", "10.1", "fail", ("10.1",)),
        ("6.16.6", "5.7", "fail", ("5.7",)),
        ("5.18.2", "7.2.3", "warn", ("5.18.2 is not in the table",)),
    ],
)
def test_driver_and_userspace(
    bench: Bench, driver: str, rocm: str, level: str, words: tuple[str, ...]
) -> None:
    found = bench.finding("driver-window", Host(driver=driver, rocm=f"{rocm}-81"))
    expect(found, level, *words, refs=("F61", "W31") if level == "fail" else ())


def test_the_userspace_of_the_image_counts(bench: Bench) -> None:
    expect(
        bench.finding("driver-window", Host(driver="6.4"), rocm="10.0.0"),
        "fail",
        "ROCm 10.0.0",
        refs=("W31",),
    )
    expect(bench.finding("driver-window", rocm="7.0"), "ok", "ROCm 7.0")


def test_a_userspace_that_nobody_knows(bench: Bench) -> None:
    expect(
        bench.finding("driver-window", Host(rocm=None)), "warn", "not known", "--rocm VERSION", refs=("F61",)
    )


def test_the_driver_of_the_kernel(bench: Bench) -> None:
    found = bench.finding("driver-window", Host(driver=None))
    expect(found, "warn", "came with kernel 6.8.0-60-generic", "amdgpu-dkms", refs=("F61",))


def test_what_the_bus_shows(tmp_path: pathlib.Path) -> None:
    from dsv4_deploy.facts.gpu import read_pci

    assert read_pci(hosts.write(tmp_path, Host(count=1))) == (PciDevice("0000:05:00.0", "74a1", "amdgpu"),)
