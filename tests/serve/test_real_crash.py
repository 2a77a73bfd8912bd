"""The same promises with real vLLM, whose processes rename themselves and die in their own ways."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest

from dsv4_deploy.serve import command
from tests.serve.conftest import Deploy, command_line, marked, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(command.installed_version() is None, reason="no vLLM in this environment"),
]


def vllm_processes(deploy: Deploy) -> list[int]:
    """vLLM's API server, engine core and workers."""
    names = (b"vllm\0serve\0", b"VLLM::")
    return [pid for pid in marked(deploy.run_id) if any(name in command_line(pid) for name in names)]


def test_nothing_is_left_of_a_real_server(deploy: Deploy, tiny_checkpoint: pathlib.Path) -> None:
    del deploy.env["DSV4_VLLM_COMMAND"]
    deploy.model = tiny_checkpoint
    loading = deploy.start(*deploy.up_arguments())
    wait_for(lambda: len(vllm_processes(deploy)) == 2, "the engine core", timeout=300)
    loading.send_signal(signal.SIGTERM)
    loading.communicate(timeout=60)
    assert loading.returncode == 143
    assert marked(deploy.run_id) == []

    up = deploy.run(*deploy.up_arguments(), timeout=550)
    assert up.returncode == 0, up.stderr
    assert len(vllm_processes(deploy)) == 3
    (api_server,) = [pid for pid in vllm_processes(deploy) if b"\0serve\0" in command_line(pid)]
    os.kill(api_server, signal.SIGKILL)
    wait_for(lambda: deploy.rows()[0]["state"] == "dead", "the end of what the API server left", timeout=120)
    assert vllm_processes(deploy) == []
    down = deploy.down()
    assert down.returncode == 0
    assert "had already died" in down.stderr
    assert marked(deploy.run_id) == []
    assert not deploy.state_file.exists()
