"""The tiny checkpoint is made once, found again, and healed when something has damaged it."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import tiny_cache
from dsv4_deploy.tiny import TINY_VERSION


def test_where_it_lives(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tiny-v{TINY_VERSION}"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tiny_cache.directory({"DSV4_CACHE_DIR": "/a"}) == pathlib.Path("/a") / name
    assert tiny_cache.directory({"XDG_CACHE_HOME": "/x"}) == pathlib.Path("/x/dsv4-deploy") / name
    assert tiny_cache.directory({}) == tmp_path / ".cache/dsv4-deploy" / name


def test_made_once_then_found_then_healed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache" / "tiny-v1"
    notes: list[str] = []
    made = tiny_cache.ensure(path, notes.append)
    assert len(notes) == 1
    assert "Making the tiny checkpoint" in notes[0]
    assert tiny_cache.ensure(path, notes.append) == made
    assert len(notes) == 1
    shard = made.shards[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    (path / "config.json").unlink()
    assert tiny_cache.ensure(path, notes.append) == made
    assert "again" in notes[1]
    assert shard.read_bytes() == whole


def test_a_cache_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeployError, match="cannot write the tiny checkpoint") as raised:
        tiny_cache.ensure(tmp_path / "file" / "tiny", print)
    assert "DSV4_CACHE_DIR" in raised.value.fix
