"""The rendered shell script, run as an operator would run it: real vLLM, the tiny model, the original request."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import httpx
import pytest

from dsv4_deploy.validate import completion
from tests.e2e.conftest import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def served_models(url: str) -> list[str]:
    """What the server lists, nothing while it does not answer."""
    try:
        return [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=5).json()["data"]]
    except httpx.HTTPError:
        return []


def test_the_script_serves_an_answer(tmp_path: pathlib.Path) -> None:
    port, script, log = free_port(), tmp_path / "serve.sh", tmp_path / "log"
    bin_directory = pathlib.Path(sys.executable).parent
    env = {
        **os.environ,
        "DSV4_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
    }
    rendered = subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", "render", "shell", "--device", "cpu", "--port", str(port),
         "--output", str(script)],
        env=env, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert rendered.returncode == 0, rendered.stderr
    # The script alone decides: nothing of the plan comes from this process.
    clean = {name: value for name, value in env.items() if not name.startswith(("VLLM_", "HF_", "OMP_"))}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(script)],
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 500
        while served_models(url) != ["tiny"]:
            assert server.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.5)
        answer = completion.ask(url, 120, lambda: None)
        assert answer.body["choices"][0]["finish_reason"] == "length"
        assert answer.body["usage"]["completion_tokens"] == 100
        assert (tmp_path / "cache").is_dir(), "the script made the tiny checkpoint"
        text = log.read_text(errors="replace")
        assert "rocm_patches active in process" in text
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
