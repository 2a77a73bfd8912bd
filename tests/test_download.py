"""`dsv4-deploy download` against a hub that is a real HTTP server: complete, resumed, refused, and never half done."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dsv4_deploy import download
from tests import small_checkpoint
from tests.hub import Hub

NAME = "deepseek-ai/DeepSeek-V4-Flash"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> Iterator[Hub]:
    one = Hub(small_checkpoint.write(tmp_path / "published"), NAME, COMMIT)
    yield one
    one.close()


def run(hub: Hub, directory: pathlib.Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {
        **clean,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(directory.parent / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    arguments = ["--repository", NAME, "--revision", COMMIT, *more, str(directory)]
    return subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", "download", *arguments],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def same_files(hub: Hub, directory: pathlib.Path) -> bool:
    return all(
        (directory / path.relative_to(hub.directory)).read_bytes() == path.read_bytes()
        for path in hub.files()
    )


def test_complete_and_marked_once(hub: Hub, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "models" / COMMIT
    done = run(hub, target, HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert same_files(hub, target)
    assert download.marked(target) == COMMIT
    assert "Bearer hf_secret" in hub.tokens
    assert "hf_secret" not in done.stdout + done.stderr
    hub.close()
    again = run(hub, target)
    assert again.returncode == 0
    assert "already" in again.stderr


def test_a_lost_connection_is_made_up_for(hub: Hub, tmp_path: pathlib.Path) -> None:
    # Larger than the 10 MB that the hub's library writes at a time, so that something is kept of the first attempt.
    shard = small_checkpoint.SHARDS[0]
    small_checkpoint.write_shard(hub.directory / shard, {"layers.0.attn_norm.weight": 24_000_000})
    hub.cut = {shard}
    target = tmp_path / "weights"
    done = run(hub, target)
    if done.returncode:
        assert download.marked(target) is None
        done = run(hub, target)
    assert done.returncode == 0, done.stderr
    assert same_files(hub, target)
    assert [name for name, begin in hub.ranges if begin >= 10_000_000] == [shard]


def test_other_bytes_than_listed_are_removed_and_never_marked(hub: Hub, tmp_path: pathlib.Path) -> None:
    shard = small_checkpoint.SHARDS[1]
    hub.forged = {shard}
    target = tmp_path / "weights"
    done = run(hub, target)
    assert done.returncode == 1
    assert f"1 file(s) are not what the hub has: {shard}" in done.stderr
    assert download.marked(target) is None
    assert not (target / shard).exists()
    hub.forged = set()
    assert run(hub, target).returncode == 0
    assert same_files(hub, target)


def test_a_repository_that_lacks_a_shard_is_no_checkpoint(hub: Hub, tmp_path: pathlib.Path) -> None:
    (hub.directory / small_checkpoint.SHARDS[0]).unlink()
    done = run(hub, tmp_path / "weights")
    assert done.returncode == 2
    assert f"{small_checkpoint.SHARDS[0]} is missing" in done.stderr
    assert download.marked(tmp_path / "weights") is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--revision", "main"], 2, "git ls-remote"),
        (["--repository", "nobody/nothing"], 1, "the hub does not give nobody/nothing"),
        (["--repository", "../etc"], 1, "the hub does not give"),
        (["--workers", "0"], 2, "--workers"),
    ],
)
def test_what_cannot_be_fetched(
    hub: Hub, tmp_path: pathlib.Path, arguments: list[str], code: int, words: str
) -> None:
    done = run(hub, tmp_path / "weights", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stderr
    assert download.marked(tmp_path / "weights") is None


def test_waiting_ends_when_the_mark_is_there(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "dsv4_deploy", "download", "--wait", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr
        assert ".dsv4-complete" in waiting.stderr.readline()
        assert waiting.poll() is None
        (tmp_path / download.COMPLETE).write_text(f"{COMMIT}\n")
        assert waiting.wait(timeout=60) == 0
