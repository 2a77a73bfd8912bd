"""`dsv4-deploy triage` as a program: files, pipes, exit codes, the termination log."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.triage import logs
from tests.triage.test_search import F01

BROKEN = "\n".join([*logs.start(), F01, *logs.aftermath()]).encode()
HEALTHY = "\n".join([*logs.start(), *logs.loaded(), *logs.listening()]).encode()


def run(tmp_path: pathlib.Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "DSV4_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, "-m", "dsv4_deploy", "triage", "--termination-log", str(tmp_path / "term")]
    return subprocess.run([*command, *arguments], input=stdin, capture_output=True, env=env, timeout=60)


def test_a_file(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_bytes(BROKEN)
    done = run(tmp_path, str(log))
    assert done.returncode == 0
    assert done.stdout.startswith(b"F01: ")
    assert not (tmp_path / "term").exists(), "the termination log is Kubernetes' to make"


def test_a_pipe_as_json_with_the_termination_log(tmp_path: pathlib.Path) -> None:
    (tmp_path / "term").touch()
    done = run(tmp_path, "-", "--json", stdin=BROKEN)
    content = json.loads(done.stdout)
    assert (done.returncode, content["id"], content["log"]) == (0, "F01", "standard input")
    assert (tmp_path / "term").read_text().startswith("F01: ")


def test_the_log_of_a_port(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "state" / "8123" / "vllm.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(HEALTHY)
    done = run(tmp_path, "--port", "8123")
    assert done.returncode == 0
    assert b"no failure in this log" in done.stdout
    missing = run(tmp_path, "--port", "8124")
    assert missing.returncode == 2
    assert b"Name a file" in missing.stderr


def test_exit_codes(tmp_path: pathlib.Path) -> None:
    assert run(tmp_path, "-", stdin=b"nothing of interest\n").returncode == 1
    loading = "\n".join(logs.start()).encode()
    assert run(tmp_path, "-", stdin=loading).returncode == 1
    killed = run(tmp_path, "-", "--exit-code", "137", stdin=loading)
    assert killed.returncode == 0
    assert killed.stdout.startswith(b"F11: ")


@pytest.mark.parametrize("name", ["/no/such/log", "/", "\n"])
def test_what_cannot_be_read(tmp_path: pathlib.Path, name: str) -> None:
    done = run(tmp_path, name)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: cannot read the log")
    assert b"Traceback" not in done.stderr
