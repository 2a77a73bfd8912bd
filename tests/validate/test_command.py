"""`dsv4-deploy validate` and `curl` as programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.validate.openai_server import serve


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", *arguments],
        capture_output=True,
        text=True,
        env={**clean, **env},
        timeout=60,
    )


def test_a_good_server_is_exit_code_0() -> None:
    with serve() as server:
        table = run("validate", server.url)
        as_json = run("validate", f"{server.url}/v1", "--json")
    assert table.returncode == 0, table.stdout
    assert table.stdout.startswith("PASS  health ")
    content = json.loads(as_json.stdout)
    assert (content["passed"], content["model"]) == (True, "tiny")
    assert {result["status"] for result in content["results"]} == {"pass"}


def test_a_bad_one_is_exit_code_1() -> None:
    with serve("nan") as server:
        done = run("validate", server.url)
    assert done.returncode == 1
    assert "FAIL  completion " in done.stdout
    assert "not finite" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["validate", "ftp://x"], ["curl", "http://u:secret@h"], ["validate", "--timeout", "0"]],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "secret" not in done.stderr


def test_curl_takes_a_port_or_a_url_and_never_prints_the_key() -> None:
    done = run("curl", "--port", "8123", "--model", "flash", VLLM_API_KEY="sesame")
    assert done.returncode == 0
    assert "http://127.0.0.1:8123/v1/chat/completions" in done.stdout
    assert '"model": "flash"' in done.stdout
    assert "$VLLM_API_KEY" in done.stdout
    assert "sesame" not in done.stdout
