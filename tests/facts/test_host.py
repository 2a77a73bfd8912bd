"""What is read from hosts of every kind that this bundle meets, laid out as their kernels do."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import pytest

from dsv4_deploy.facts import host
from dsv4_deploy.facts.gpu import describe, gfx_name, read_gpus, read_pci
from tests import as_user, hosts
from tests.hosts import GIB, Host

KVM = ("QEMU", "Standard PC (Q35 + ICH9, 2009)")


def read(root: pathlib.Path, made: Host, shm: int = 64 * GIB) -> host.HostFacts:
    return host.read(hosts.write(root, made), hosts.statvfs(shm))


def test_eight_mi300x(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host())
    assert facts.gfx_names == ("gfx942",) * 8
    first, last = facts.gpus[0], facts.gpus[-1]
    assert dataclasses.asdict(first) == {
        "node": 2,
        "gfx": "gfx942",
        "device_id": "74a1",
        "pci": "0000:05:00.0",
        "compute_units": 304,
        "hbm_bytes": 206141652992,
        "hbm_used_bytes": 297 * 2**20,
        "render_node": "renderD128",
        "compute_partition": "SPX",
        "memory_partition": "NPS1",
        "power_cap_w": 750,
        "numa_node": 0,
    }
    assert (last.pci, last.render_node, last.numa_node) == ("0000:e5:00.0", "renderD184", 1)
    assert (facts.driver_loaded, facts.driver, facts.rocm) == (True, "6.16.6", "7.2.3")
    assert facts.kfd == host.Device("/dev/kfd", os.getgid(), None)
    assert [device.path for device in facts.render] == [f"/dev/dri/renderD{128 + 8 * i}" for i in range(8)]
    assert facts.group_names[hosts.RENDER_GID] == "render"
    assert facts.memory.total == 2267 * GIB
    assert (facts.memory.shm, facts.memory.shm_free) == (64 * GIB, 64 * GIB)
    assert facts.memory.limit is None
    assert facts.limits == host.Limits(open_files=1048576, locked_memory=None)
    assert "iommu=pt" in facts.kernel_arguments
    assert not facts.numa_balancing
    assert facts.hypervisor is None and facts.container is None


def test_four_mi308x(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(card=hosts.MI308X, count=4))
    assert [(gpu.device_id, gpu.compute_units, gpu.power_cap_w) for gpu in facts.gpus] == [
        ("74a2", 80, 650)
    ] * 4


def test_virtual_functions_of_mi325x(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(card=hosts.MI325X_VF, hypervisor=KVM))
    assert facts.hypervisor == "QEMU Standard PC (Q35 + ICH9, 2009)"
    for gpu in facts.gpus:
        assert (gpu.device_id, gpu.hbm_bytes // GIB) == ("74b9", 255)
        assert (gpu.compute_partition, gpu.memory_partition, gpu.power_cap_w) == (None, None, None)


def test_partitioned_mi300x(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(compute_partition="CPX", memory_partition="NPS4"))
    assert len(facts.gpus) == 64
    assert {gpu.compute_units for gpu in facts.gpus} == {38}
    assert {gpu.hbm_bytes // GIB for gpu in facts.gpus} == {23}
    # The eight parts of a card have its bus address, although the driver writes their number into it.
    assert [gpu.pci for gpu in facts.gpus[:9]] == ["0000:05:00.0"] * 8 + ["0000:25:00.0"]
    assert {(gpu.compute_partition, gpu.memory_partition) for gpu in facts.gpus} == {("CPX", "NPS4")}
    assert len(facts.render) == 64


def test_no_gpu(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(card=None, rocm=None))
    assert (facts.gpus, facts.pci, facts.kfd, facts.render) == ((), (), None, ())
    assert (facts.driver_loaded, facts.driver, facts.rocm) == (False, None, None)


def test_nothing_at_all(tmp_path: pathlib.Path) -> None:
    facts = host.read(tmp_path)
    assert facts.gpus == ()
    assert facts.memory == host.Memory(0, 0, None, None, None)


def test_cards_without_a_driver_are_seen_on_the_bus(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(module=False))
    assert facts.gpus == ()
    assert len(facts.pci) == 8
    assert {(device.device_id, device.driver) for device in facts.pci} == {("74a1", None)}


def test_cards_given_to_virtual_machines(tmp_path: pathlib.Path) -> None:
    assert {device.driver for device in read(tmp_path, Host(pci_driver="vfio-pci")).pci} == {"vfio-pci"}


def test_other_devices_of_the_bus_are_left_out(tmp_path: pathlib.Path) -> None:
    hosts.write(tmp_path, Host(count=1))
    for address, vendor, kind in (
        ("0000:01:00.0", "0x8086", "0x020000"),
        ("0000:02:00.1", "0x1002", "0x040300"),
    ):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir()
        (device / "vendor").write_text(vendor)
        (device / "class").write_text(kind)
        (device / "device").write_text("0x1234")
    assert [device.address for device in read_pci(tmp_path)] == [hosts.pci_address(0)]


def test_gpus_of_other_containers_are_not_ours(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(hidden=frozenset({0, 1, 2, 3}), mark=".dockerenv"))
    assert [gpu.node for gpu in facts.gpus] == [6, 7, 8, 9]
    assert len(facts.pci) == 8
    assert facts.container == "docker"


def test_nodes_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    hosts.write(tmp_path, Host(count=2))
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/2/properties"
    node.unlink()
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/3/properties").write_text("gfx_target_version many\n")
    assert read_gpus(tmp_path) == ()


def test_more_than_ten_nodes_are_in_the_order_of_their_numbers(tmp_path: pathlib.Path) -> None:
    gpus = read_gpus(hosts.write(tmp_path, Host(compute_partition="DPX")))
    assert [gpu.node for gpu in gpus] == list(range(2, 18))


def test_missing_devices(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(devices=False))
    assert len(facts.gpus) == 8
    assert facts.kfd is None
    assert facts.render == ()


@as_user.only_root
def test_devices_that_somebody_else_may_not_open(tmp_path: pathlib.Path) -> None:
    """The same host, read by a user outside the group of its devices."""
    hosts.write(tmp_path, Host(count=1))
    for device in (tmp_path / "dev/kfd", tmp_path / "dev/dri/renderD128"):
        os.chown(device, 0, hosts.RENDER_GID)
        device.chmod(0o660)
    as_user.let_in(tmp_path)

    def problems() -> str:
        facts = host.read(tmp_path)
        assert facts.kfd is not None
        return f"{facts.kfd.gid} {facts.kfd.problem} | {facts.render[0].problem} | {facts.uid}"

    assert as_user.run(problems) == f"{hosts.RENDER_GID} Permission denied | Permission denied | 12345"
    assert as_user.run(problems, [hosts.RENDER_GID]) == f"{hosts.RENDER_GID} None | None | 12345"


@pytest.mark.parametrize(
    ("mark", "name"),
    [("run/.containerenv", "podman"), ("run/secrets/kubernetes.io", "kubernetes"), (".dockerenv", "docker")],
)
def test_containers(tmp_path: pathlib.Path, mark: str, name: str) -> None:
    assert read(tmp_path, Host(mark=mark)).container == name


def test_the_tightest_memory_limit_counts(tmp_path: pathlib.Path) -> None:
    assert read(tmp_path, Host(memory_max=str(512 * GIB))).memory.limit == 512 * GIB
    (tmp_path / "sys/fs/cgroup/system.slice/dsv4.service/memory.max").write_text(str(64 * GIB))
    assert host.read(tmp_path).memory.limit == 64 * GIB


def test_memory_limit_of_cgroup_version_1(tmp_path: pathlib.Path) -> None:
    hosts.write(tmp_path, Host())
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    inside = tmp_path / "sys/fs/cgroup/memory/docker/abc"
    inside.mkdir(parents=True)
    (inside / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.read(tmp_path).memory.limit is None
    (inside / "memory.limit_in_bytes").write_text(str(8 * GIB))
    assert host.read(tmp_path).memory.limit == 8 * GIB


def test_small_limits(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(open_files="1024", locked_memory="65536", numa_balancing=1))
    assert facts.limits == host.Limits(1024, 65536)
    assert facts.numa_balancing


def test_a_driver_that_came_with_the_kernel_has_no_version(tmp_path: pathlib.Path) -> None:
    facts = read(tmp_path, Host(driver=None))
    assert facts.driver_loaded
    assert facts.driver is None


def test_mount_points_with_spaces(tmp_path: pathlib.Path) -> None:
    hosts.write(tmp_path, Host(mounts=(r"nas:/v4 /mnt/my\040models nfs4 ro 0 0",)))
    assert host.mounts(tmp_path) == [("nas:/v4", "/mnt/my models", "nfs4")]


def test_this_machine_can_be_read() -> None:
    facts = host.read()
    assert facts.memory.total > facts.memory.available > 0
    assert facts.uid == os.geteuid()
    assert facts.limits.open_files is None or facts.limits.open_files > 0


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110001, "gfx1101")]
)
def test_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_describe() -> None:
    assert describe(["gfx942", "gfx90a", "gfx942"]) == "2 x gfx942, 1 x gfx90a"
    assert describe([]) == "no AMD GPU"
