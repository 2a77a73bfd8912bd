"""What processes report: across a fork and a spawn, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_patches import report

PROCESSES = """
import json, multiprocessing, os, sys
from multiprocessing import util
from rocm_patches import report
from rocm_patches.registry import Applier, Selection

def new():
    return Applier(Selection("cpu", "1.0", "require", ()), report.write)

def child(method):
    if method == "spawn":  # such a process registers by itself
        new().arm()
    print(json.dumps([[one["process"], one["pid"] == os.getpid()] for one in report.read()]))

if __name__ == "__main__":
    applier = new()
    applier.arm()
    util.register_after_fork(applier, report.write)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        process = context.Process(target=child, args=(method,), name=f"EngineCore-{method}")
        process.start()
        process.join()
        assert process.exitcode == 0
    print(os.environ[report.FOLDER])
"""


def test_children_report_into_the_folder_of_the_first_process(tmp_path: Path) -> None:
    """The ended ones are not told of, and the first one removes the folder."""
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    env = {name: value for name, value in os.environ.items() if name != report.FOLDER}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**env, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    forked, spawned, folder = done.stdout.splitlines()
    assert json.loads(forked) == [["EngineCore-fork", True], ["MainProcess", False]]
    assert json.loads(spawned) == [["EngineCore-spawn", True], ["MainProcess", False]]
    assert folder.startswith(str(tmp_path)) and not Path(folder).exists()


def test_folders_of_killed_servers_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.tempfile, "gettempdir", lambda: str(tmp_path))
    dead = 4194304 + 1  # above Linux's largest pid
    for name, age_s in (
        (f"dsv4-patches-{dead}-old", 90000),
        (f"dsv4-patches-{dead}-new", 10),
        (f"dsv4-patches-{os.getpid()}-alive", 90000),
        ("dsv4-patches-other", 90000),
    ):
        (tmp_path / name).mkdir()
        when = report.time.time() - age_s
        os.utime(tmp_path / name, (when, when))
    report._remove_leftovers()
    assert sorted(path.name.split("-")[-1] for path in tmp_path.iterdir()) == ["alive", "new", "other"]


def test_a_folder_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rocm_patches.registry import Applier, Selection

    monkeypatch.setenv(report.FOLDER, str(tmp_path / "gone"))
    report.write(Applier(Selection("cpu", "1.0", "require", ())))
    assert report.read() == []
