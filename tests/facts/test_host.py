"""GPUs from a KFD topology laid out as the driver does it."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy.facts.host import amd_gpus, describe, gfx_name


def node(sysfs: pathlib.Path, number: int, properties: str | None) -> None:
    directory = sysfs / "class/kfd/kfd/topology/nodes" / str(number)
    directory.mkdir(parents=True)
    if properties is not None:
        (directory / "properties").write_text(properties)


def gpu(version: int) -> str:
    return f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nvendor_id 4098\n"


def test_gpus_are_listed_in_order_and_cpus_are_not(tmp_path: pathlib.Path) -> None:
    node(tmp_path, 0, "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
    for number in range(1, 12):  # 10 and 11 come after 2, not before
        node(tmp_path, number, gpu(90402 if number < 11 else 90010))
    assert amd_gpus(tmp_path) == ("gfx942",) * 10 + ("gfx90a",)


def test_gpus_of_other_containers_are_not_ours(tmp_path: pathlib.Path) -> None:
    node(tmp_path, 1, gpu(90402))
    node(tmp_path, 2, "")  # hidden by the device cgroup
    node(tmp_path, 3, None)
    node(tmp_path, 4, "gfx_target_version many\n")
    assert amd_gpus(tmp_path) == ("gfx942",)


def test_no_driver(tmp_path: pathlib.Path) -> None:
    assert amd_gpus(tmp_path) == ()


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110001, "gfx1101")]
)
def test_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_describe() -> None:
    assert describe(["gfx942", "gfx90a", "gfx942"]) == "2 x gfx942, 1 x gfx90a"
    assert describe([]) == "no AMD GPU"
