"""Shared memory that a dead server left: removed when it is ours and unused, and nothing else ever."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory

import pytest

from dsv4_deploy.serve import procs, segments

HOLDER = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
one = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(one._name, "shared_memory")  # so that nobody cleans up after this process
print(one.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds a segment and leaves it behind when it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def name_of(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


def look(pid: int) -> procs.Process:
    process = procs.look(pid)
    assert process is not None
    return process


@pytest.fixture
def foreign() -> Iterator[pathlib.Path]:
    """A segment that no server of ours has had."""
    one = shared_memory.SharedMemory(create=True, size=4096)
    yield segments.SHM / one.name
    one.close()
    one.unlink()


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    holder: subprocess.Popen[str], foreign: pathlib.Path
) -> None:
    left = segments.SHM / name_of(holder)
    ours = segments.Segments("0-test-a")
    ours.note([look(holder.pid)])
    holder.kill()
    holder.wait()
    assert left.exists()
    assert ours.close() == [left.name]
    assert not left.exists()
    assert foreign.exists()
    assert not (segments.SHM / "dsv4-deploy.0-test-a.json").exists()


def test_what_somebody_still_uses_stays(holder: subprocess.Popen[str]) -> None:
    used = segments.SHM / name_of(holder)
    ours = segments.Segments("0-test-b")
    ours.note([look(holder.pid)])
    assert ours.close() == []
    assert used.exists()
    used.unlink()


def test_a_dead_supervisors_list_is_cleaned_by_the_next_and_a_living_ones_is_not(
    holder: subprocess.Popen[str],
) -> None:
    left = segments.SHM / name_of(holder)
    # Names are hexadecimal, as those of instances are.
    ours = segments.Segments("00000000-c")
    ours.note([look(holder.pid)])
    holder.kill()
    holder.wait()
    assert left.name not in segments.clean()
    assert left.exists(), "its supervisor lives"
    os.close(ours.descriptor)  # as the kernel does when a supervisor is killed
    assert left.name in segments.clean()
    assert not left.exists()
    assert not (segments.SHM / "dsv4-deploy.00000000-c.json").exists()


def test_another_file_of_the_same_name_stays(tmp_path: pathlib.Path) -> None:
    (tmp_path / "psm_1").write_text("new owner")
    (tmp_path / "dsv4-deploy.00-d.json").write_text(json.dumps({"psm_1": 12345, "../victim": 1, "": 2}))
    assert segments.clean(tmp_path) == []
    assert (tmp_path / "psm_1").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"psm_1": "x"}', '{"psm_1": null}', ""])
def test_a_list_that_cannot_be_read_harms_nothing(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "psm_1").write_text("somebody's")
    (tmp_path / "dsv4-deploy.00-e.json").write_text(content)
    (tmp_path / "dsv4-deploy.00-f.json").symlink_to(tmp_path / "psm_1")
    assert segments.clean(tmp_path) == []
    assert (tmp_path / "psm_1").exists()
