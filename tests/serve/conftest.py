"""Runs the real `dsv4-deploy` program against a state directory of its own, with fake_vllm.py as the server.

Whatever a test does, no process may be left afterwards: everything started inherits DSV4_TEST_RUN, and
teardown looks for it.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import small_checkpoint

FAKE = pathlib.Path(__file__).with_name("fake_vllm.py")
RUN = "DSV4_TEST_RUN"


class Deploy:
    """One user's dsv4-deploy: `port` is free, `model` is a small checkpoint directory."""

    def __init__(self, root: pathlib.Path) -> None:
        self.run_id = str(uuid.uuid4())
        self.state_dir = root / "state"
        self.port = free_port()
        self.health_port = free_port()
        self.model = small_checkpoint.write(root / "small-v4")
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DSV4_", "VLLM_", "FAKE_"))
        }
        self.env = {
            **clean,
            RUN: self.run_id,
            "DSV4_STATE_DIR": str(self.state_dir),
            "DSV4_CACHE_DIR": str(root / "cache"),
            "DSV4_VLLM_COMMAND": json.dumps([sys.executable, str(FAKE)]),
        }

    def start(self, *arguments: str, quirks: str = "") -> subprocess.Popen[str]:
        """Start a command and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "dsv4_deploy", *arguments],
            env={**self.env, "FAKE_VLLM": quirks},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, quirks: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*arguments, quirks=quirks)
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def up_arguments(self, *more: str) -> list[str]:
        return ["up", *self.common_arguments(), *more]

    def common_arguments(self) -> list[str]:
        ports = ["--port", str(self.port), "--health-port", str(self.health_port)]
        return ["--device", "cpu", "--model", str(self.model), *ports]

    def up(self, *more: str, quirks: str = "") -> subprocess.CompletedProcess[str]:
        return self.run(*self.up_arguments(*more), quirks=quirks)

    def down(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run("down", "--port", str(self.port), *more)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.run("status", "--json").stdout)
        return rows

    @property
    def state_file(self) -> pathlib.Path:
        return self.state_dir / str(self.port) / "state.json"

    def state(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.state_file.read_text())
        return content

    def write_log(self, line: str, seen: list[str]) -> bool:
        """Append to the server's log; True once a reader has shown the line. For `wait_for`: a reader
        that has not begun to follow yet misses the first tries."""
        with pathlib.Path(self.state()["log"]).open("a") as log:
            log.write(line)
        return line in seen

    def servers(self) -> list[int]:
        """The pids of everything that was started as, or by, a fake server of this test."""
        return [pid for pid in marked(self.run_id) if b"fake_vllm" in command_line(pid) or titled(pid)]

    def api_server(self) -> int:
        """The pid of vLLM's API server; `state()["pid"]` is its supervisor's."""
        (pid,) = [pid for pid in self.servers() if b"\0serve\0" in command_line(pid)]
        return pid


@pytest.fixture
def deploy(tmp_path: pathlib.Path) -> Iterator[Deploy]:
    one = Deploy(tmp_path)
    yield one
    left = marked(one.run_id)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def collect(process: subprocess.Popen[str]) -> list[str]:
    """The lines of a process's stdout, growing while it runs."""
    lines: list[str] = []
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        for line in iter(stream.readline, ""):
            lines.append(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def wait_for(condition: Callable[[], object], what: str, timeout: float = 60) -> None:
    """Wait until the condition holds; fail the test with `what` was waited for."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.05)


def marked(run_id: str) -> list[int]:
    """Running processes that have this test's id in their environment."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{RUN}={run_id}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def command_line(pid: int) -> bytes:
    try:
        return (pathlib.Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def titled(pid: int) -> bool:
    return command_line(pid).startswith(b"VLLM::")
