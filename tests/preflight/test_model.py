"""The model's files, the time to read them, and what a download needs, against real files and a real HTTP hub."""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterator

import pytest

from dsv4_deploy.facts import checkpoint, storage
from dsv4_deploy.preflight import model
from tests import as_user, small_checkpoint
from tests.hosts import Host
from tests.preflight.conftest import Bench, expect

REPO = "deepseek-ai/DeepSeek-V4-Flash"


def test_a_whole_checkpoint(bench: Bench, tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "mine")
    expect(bench.finding("model-files", model=str(directory)), "ok", "2 whole shards", "no draft module")


def test_all_missing_shards_are_named(bench: Bench, tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "mine")
    for name in small_checkpoint.SHARDS:
        (directory / name).unlink()
    expect(bench.finding("planned", model=str(directory)), "fail", *small_checkpoint.SHARDS)


def test_a_shard_of_size_zero(bench: Bench, tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "mine")
    (directory / small_checkpoint.SHARDS[1]).write_bytes(b"")
    expect(bench.finding("planned", model=str(directory)), "fail", small_checkpoint.SHARDS[1], "0 bytes")


def test_no_index(bench: Bench, tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "mine")
    (directory / checkpoint.INDEX).unlink()
    expect(bench.finding("planned", model=str(directory)), "fail", checkpoint.INDEX, str(directory))


def test_a_promised_draft_module(bench: Bench, tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "mine", dspark_block_size=5)
    _, found = bench.findings("model-files", model=str(directory))
    expect(found, "warn", "dspark", "not there", refs=("F23",))


def test_a_plan_that_is_refused_is_told_and_the_rest_goes_on(bench: Bench) -> None:
    expect(bench.finding("planned", tp=3, model="deepseek-v4-flash"), "fail", "3 ranks", "--tp")
    expect(bench.finding("open-files", tp=3, model="deepseek-v4-flash"), "ok")


@pytest.fixture
def large(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint that says it has 20 GB: a sparse file, of which next to nothing is on the disk."""
    directory = small_checkpoint.write(tmp_path / "large")
    size = 20 * 10**9
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    shard = directory / small_checkpoint.SHARDS[0]
    shard.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(shard, 8 + len(header) + size)
    return directory


def test_load_time_is_measured(bench: Bench, large: pathlib.Path) -> None:
    """How fast this machine's disk is right now decides the verdict, so none is expected here."""
    found = bench.finding("load-time", model=str(large))
    assert re.fullmatch(r"20 GB from ext4 at \d+\.\d\d GB/s: about \d+ (s|min)", found.found)


def disk_of(speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that reads so many bytes per second, whatever is under this test."""
    measured = storage.ReadSpeed(bytes_per_s=speed, sample_bytes=2**30, direct=True)
    monkeypatch.setattr(storage, "read_speed", lambda path: measured)


@pytest.mark.parametrize(
    ("speed", "level"), [(20e9, "ok"), (1e9, "ok"), (300e6, "warn"), (100e6, "fail")], ids=str
)
def test_load_time_against_the_timeout(
    bench: Bench, large: pathlib.Path, speed: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 GB at that many bytes per second, of a disk whose real speed is measured elsewhere, against 100 s."""
    disk_of(speed, monkeypatch)
    timeout = "100"
    allow = ("ready-timeout",)  # or the rule of that name puts it back
    environ = {"VLLM_ENGINE_READY_TIMEOUT_S": timeout}
    found = bench.finding("load-time", model=str(large), environ=environ, allow=allow)
    expect(found, level, refs=("F15", "F29") if level == "fail" else ())


def test_a_network_file_system_without_prefetch(
    bench: Bench, large: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of(1e9, monkeypatch)
    host = Host(mounts=("/dev/md0 / ext4 rw 0 0", f"nas:/v4 {large} nfs4 ro 0 0"))
    overrides = {"safetensors-load-strategy": "lazy"}
    found = bench.finding("load-time", host, model=str(large), overrides=overrides)
    expect(found, "warn", "nfs4", "safetensors-load-strategy=prefetch", refs=("F29",))
    # Which is what the plan says where memory holds the checkpoint.
    expect(bench.finding("load-time", host, model=str(large)), "ok", "nfs4")


def test_a_small_checkpoint_is_not_measured(bench: Bench, tmp_path: pathlib.Path) -> None:
    assert bench.findings("load-time", model=str(small_checkpoint.write(tmp_path / "mine"))) == []


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers HEAD with the status that the test set, and remembers what it was asked."""

    status = 200
    asked: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    handler = type("OneHub", (Hub,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def download_case(bench: Bench, tmp_path: pathlib.Path, **environ: str) -> list[model.Finding]:
    return bench.findings(
        "download", environ={"HF_HOME": str(tmp_path / "hf"), **environ}, model="deepseek-v4-flash"
    )


def test_a_hub_that_has_it(bench: Bench, tmp_path: pathlib.Path, hub: tuple[str, type[Hub]]) -> None:
    url, handler = hub
    found = download_case(bench, tmp_path, HF_ENDPOINT=url + "/", HF_TOKEN="hf_secret")
    expect(found[-1], "ok", REPO)
    assert handler.asked == [(f"/{REPO}/resolve/main/config.json", "Bearer hf_secret")]
    assert not any("hf_secret" in str(finding) for finding in found)


@pytest.mark.parametrize(
    ("status", "token", "words"),
    [
        (401, None, ("401", "anonymous users")),
        (403, "hf_x", ("403", "token in HF_TOKEN")),
        (404, None, ("404", "not there")),
        (429, None, ("429", "limits requests")),
    ],
)
def test_a_hub_that_refuses(
    bench: Bench,
    tmp_path: pathlib.Path,
    hub: tuple[str, type[Hub]],
    status: int,
    token: str | None,
    words: tuple[str, ...],
) -> None:
    url, handler = hub
    handler.status = status
    environ = {"HF_ENDPOINT": url, **({"HF_TOKEN": token} if token else {})}
    expect(download_case(bench, tmp_path, **environ)[-1], "fail", *words, refs=("F76",))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://[", "no address"])
def test_a_hub_that_is_not_there(bench: Bench, tmp_path: pathlib.Path, endpoint: str) -> None:
    expect(download_case(bench, tmp_path, HF_ENDPOINT=endpoint)[-1], "fail", "does not answer", refs=("W39",))


def test_offline_and_not_there(bench: Bench, tmp_path: pathlib.Path) -> None:
    (found,) = download_case(bench, tmp_path, HF_HUB_OFFLINE="1")
    expect(found, "fail", "HF_HUB_OFFLINE", str(tmp_path / "hf/hub"), refs=("W39",))


def snapshot(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "hf/hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / "abc"


def test_a_model_that_was_downloaded_before(bench: Bench, tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(snapshot(tmp_path))
    (found,) = download_case(bench, tmp_path, HF_HUB_OFFLINE="1")
    expect(found, "ok", str(snapshot(tmp_path)))


@pytest.mark.parametrize(("offline", "level"), [("0", "warn"), ("1", "fail")])
def test_half_a_download(bench: Bench, tmp_path: pathlib.Path, offline: str, level: str) -> None:
    small_checkpoint.write(snapshot(tmp_path))
    (snapshot(tmp_path) / small_checkpoint.SHARDS[1]).unlink()
    (found,) = download_case(bench, tmp_path, HF_HUB_OFFLINE=offline)
    expect(found, level, small_checkpoint.SHARDS[1], refs=("W33",))


def test_no_room(
    bench: Bench, tmp_path: pathlib.Path, hub: tuple[str, type[Hub]], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = storage.Storage(tmp_path, "xfs", 10 * 10**9, writable=True)
    monkeypatch.setattr(storage, "describe", lambda *_: full)
    room, _ = download_case(bench, tmp_path, HF_ENDPOINT=hub[0])
    expect(room, "fail", "10 GB free", "160 GB", "HF_HOME")


def test_a_cache_that_cannot_be_written(bench: Bench, hub: tuple[str, type[Hub]]) -> None:
    """/proc is a directory in which not even root can make one."""
    case = bench.case(model="deepseek-v4-flash", environ={"HF_HOME": "/proc/self/hf", "HF_ENDPOINT": hub[0]})
    room, _ = model.download(case)
    expect(room, "fail", "/proc/self is not writable", refs=("W34",))


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/hf"}, "/hf/hub"),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": "/models"}, "/models"),
    ],
)
def test_where_the_hub_keeps_models(bench: Bench, environ: dict[str, str], path: str) -> None:
    assert str(model._hub_cache(bench.case(environ=environ))).endswith(path)


@as_user.only_root
def test_files_that_the_serving_user_may_not_read(bench: Bench, tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "mine")
    case = bench.case(model=str(directory))
    for name in small_checkpoint.SHARDS:
        (directory / name).chmod(0o600)
    as_user.let_in(tmp_path)

    def judge() -> str:
        (found,) = model.model_files(case)
        return f"{found.level} {found.found} {found.refs}"

    text = as_user.run(judge)
    assert text.startswith("fail user 0 may not read model-00001"), text
    assert "F76" in text


def test_the_no_gpu_mode_downloads_nothing(bench: Bench) -> None:
    assert bench.findings("download", Host(card=None), device="cpu") == []
