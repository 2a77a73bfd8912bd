"""The printed lines, run by a real shell with the real curl."""

from __future__ import annotations

import json
import pathlib
import shlex
import shutil
import subprocess

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.validate import curl
from dsv4_deploy.validate.calls import calls
from dsv4_deploy.validate.server import base_url
from tests.validate.openai_server import serve

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
NASTY = """it's "$(touch owned)" `touch owned` \\ 部 !x"""


def run(line: str, tmp_path: pathlib.Path, **env: str) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_line_works_as_pasted(tmp_path: pathlib.Path) -> None:
    with serve(key="s$same") as server:
        lines = [one for one in curl.lines(server.url, NASTY, with_key=True) if one.startswith("curl ")]
        answers = [run(line, tmp_path, VLLM_API_KEY="s$same", PATH="/usr/bin:/bin") for line in lines]
        seen = server.seen  # type: ignore[attr-defined]
    wanted = [call for call in calls(NASTY) if call.kind != "refusal"]
    assert [path for path, _ in seen] == [call.path for call in wanted]
    for call, text in zip(wanted, answers, strict=True):
        if call.streams:
            assert text.rstrip().endswith("data: [DONE]"), call
        elif call.body:
            assert json.loads(text)["usage"], call
    assert list(tmp_path.iterdir()) == [], "a quoted model name must not run anything"


def test_the_model_arrives_as_given() -> None:
    for one in curl.lines("http://h:1", NASTY, with_key=False):
        if " -d " in one:
            assert json.loads(shlex.split(one)[-1])["model"] == NASTY
    assert '"model"' not in "\n".join(curl.lines("http://h:1", None, with_key=False))


def test_the_key_is_a_variable_and_only_where_it_is_needed() -> None:
    lines = [one for one in curl.lines("http://h:1", None, with_key=True) if one.startswith("curl ")]
    assert all(("$VLLM_API_KEY" in one) == ("/v1/" in one) for one in lines)
    assert not any("KEY" in one for one in curl.lines("http://h:1", None, with_key=False))


def test_each_line_says_what_it_shows() -> None:
    lines = curl.lines("http://h:1", None, with_key=False)
    names = [one.split(":")[0].removeprefix("# ") for one in lines if one.startswith("#")]
    assert names == [call.name for call in calls() if call.kind != "refusal"]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://llm.example.org/team/v1/", "https://llm.example.org/team"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    "text",
    ["", "http://", "ftp://h", "http://h:99999", "http://h:0", "http://h:x", "http://user:pw@h", "http://h/?q=1",
     "http://h/#f", "http://h h", "http://[::1", "file:///etc/passwd", "http://h\n"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(DeployError) as raised:
        base_url(text)
    assert raised.value.exit_code == 2
    assert "pw" not in raised.value.what + raised.value.why + raised.value.fix
