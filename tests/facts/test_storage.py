"""Where a path lies, and a read speed that is measured for real."""

from __future__ import annotations

import os
import pathlib

import pytest

from dsv4_deploy.facts import storage
from tests import hosts
from tests.hosts import Host


def test_a_path_that_does_not_exist_yet(tmp_path: pathlib.Path) -> None:
    found = storage.describe(tmp_path / "not" / "yet")
    assert found.existing == tmp_path
    assert found.writable
    assert found.free_bytes == pytest.approx(
        os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.1
    )


def test_the_deepest_and_last_mount_counts(tmp_path: pathlib.Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    root = hosts.write(
        tmp_path / "root",
        Host(mounts=("/dev/md0 / ext4 rw 0 0", f"nas:/v4 {tmp_path} nfs4 rw 0 0", f"x {models} lustre rw 0 0",
                     f"y {models} wekafs rw 0 0")),
    )  # fmt: skip
    assert storage.describe(models / "v4", root).kind == "wekafs"
    assert storage.describe(tmp_path / "other", root).kind == "nfs4"
    assert storage.describe(tmp_path / "other", root).is_network
    assert storage.describe(pathlib.Path("/etc"), root).kind == "ext4"
    assert not storage.describe(pathlib.Path("/etc"), root).is_network


def test_read_speed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(2**20) * 96)
    speed = storage.read_speed(file, seconds=0.5)
    assert speed is not None
    assert 0 < speed.sample_bytes <= 48 * 2**20
    assert speed.bytes_per_s > 10**6


def test_read_speed_stops_at_its_limit(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(128 * 2**20))
    speed = storage.read_speed(file, seconds=60, limit_bytes=2**24)
    assert speed is not None and speed.sample_bytes == 2**24


def test_a_small_file_tells_nothing(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1000))
    assert storage.read_speed(file) is None


def test_a_file_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_speed(tmp_path / "weights")
