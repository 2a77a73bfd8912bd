"""A real server, started as a user starts it: `dsv4-deploy up` with real vLLM and the tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Deployment:
    """How to reach one port's server and to run the CLI about it, in a state directory of its own."""

    port: int
    env: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *args: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run `dsv4-deploy ARGS` and return it; it is not checked."""
        return subprocess.run(
            [sys.executable, "-m", "dsv4_deploy", *args],
            env=self.env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    def up(self, *args: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        return self.run("up", "--port", str(self.port), *args, timeout=timeout)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.run("down", "--port", str(self.port), timeout=180)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """An empty port; whatever a test starts there is stopped at the end."""
    root: Path = tmp_path_factory.mktemp("deployment")
    env = {**os.environ, "DSV4_STATE_DIR": str(root / "state"), "DSV4_CACHE_DIR": str(root / "cache")}
    deployment = Deployment(free_port(), env)
    yield deployment
    deployment.down()
