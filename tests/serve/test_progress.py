"""Stages from log lines as vLLM 0.32.0 writes them, and from the file that it is writing."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy.serve import logfile
from dsv4_deploy.serve.progress import Event, Progress, Stage

# One start of `vllm serve` 0.32.0 with two ranks, shortened.
LOG = """\
W1130 21:32:34.488000 10079 torch/_library/triton.py:53] Triton not available
(APIServer pid=10079) INFO 11-30 21:32:35 [api_utils.py:286] non-default args: {'port': 18200}
(EngineCore pid=10144) INFO 11-30 21:32:44 [plugin.py:50] rocm_patches active in process 7 (20 operators)
(VllmWorker-0 pid=10153) INFO 11-30 21:32:53 [plugin.py:50] rocm_patches active in process 8 (20 operators)
(Worker_TP0 pid=10153) INFO 11-30 21:32:54 [cpu_model_runner.py:68] Starting to load model /cache/tiny-v1...
(Worker_TP1 pid=10154) INFO 11-30 21:32:54 [cpu_model_runner.py:68] Starting to load model /cache/tiny-v1...
(Worker_TP0 pid=10153) \rLoading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]\r\
Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:00<00:00, 42.02it/s]
(Worker_TP0 pid=10153) INFO 11-30 21:32:54 [default_loader.py:501] Loading weights took 0.05 seconds
(Worker_TP1 pid=10154) INFO 11-30 21:32:54 [default_loader.py:501] Loading weights took 0.06 seconds
(EngineCore pid=10144) INFO 11-30 21:32:55 [kv_cache_utils.py:2327] CPU KV cache size: 60,156 tokens, \
Maximum concurrency for 4,608 tokens per request: 13.05x
(EngineCore pid=10144) INFO 11-30 21:32:56 [core.py:402] init engine (profile, create kv cache, warmup \
model) took 0.75 s
(APIServer pid=10079) INFO 11-30 21:32:56 [entry.py:140] Starting vLLM server on http://127.0.0.1:18200
(APIServer pid=10079) INFO:     Application startup complete.
"""


def events(path: pathlib.Path) -> list[Event]:
    progress = Progress()
    progress.reach(Stage.STARTED)
    return [event for line in logfile.Tail(path).lines() if (event := progress.feed(line))]


def test_a_whole_start(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(LOG.encode())
    assert events(path) == [
        Event(Stage.PLUGIN, "20 operators"),
        Event(Stage.LOADING),
        Event(Stage.LOADED, "0.05 seconds"),
        Event(Stage.ENGINE, "KV cache for 60,156 tokens"),
        Event(Stage.LISTENING),
    ]


LOADED = "(Worker_TP0 pid=1) INFO 11-30 21:00:00 [model_runner.py:424] Model loading took 40.1 GiB memory"
SCRATCH = "INFO 11-30 21:00:00 [model_runner.py:392] Loading model from scratch..."
STARTUP = "\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO:     Application startup complete."
ENGINE = (
    "(EngineCore_DP0 pid=1) INFO 11-30 21:00:00 [core.py:386] init engine (profile, create kv cache, warmup "
    "model) took 60.10 s (compilation: 3.00 s)"
)


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (LOADED, Stage.LOADED),
        (SCRATCH, Stage.LOADING),
        (STARTUP, Stage.LISTENING),
        (ENGINE, Stage.ENGINE),
    ],
)
def test_lines_of_other_platforms(tmp_path: pathlib.Path, line: str, stage: Stage) -> None:
    path = tmp_path / "log"
    path.write_text(line + "\n")
    assert [event.stage for event in events(path)] == [stage]


def test_activity_shows_the_files_while_they_load() -> None:
    progress = Progress()
    progress.feed("Loading safetensors checkpoint shards:  50% Completed | 23/46 [00:10<00:10,  2.0it/s]")
    assert progress.activity == "23/46 files, 50 %"
    progress.feed("(W pid=1) INFO 11-30 21:00:00 [default_loader.py:501] Loading weights took 20 seconds")
    assert progress.activity == ""


def test_stages_never_go_back() -> None:
    progress = Progress()
    assert progress.reach(Stage.ENGINE)
    assert progress.reach(Stage.LOADING) is None
    assert progress.feed("INFO 11-30 21:00:00 [x.py:1] Starting to load model m...") is None


def test_words_of_a_prompt_are_no_stage() -> None:
    progress = Progress()
    line = "(APIServer pid=1) INFO 11-30 21:00:00 [logger.py:1] Received: 'Loading weights took 3 seconds'"
    assert progress.feed(line) is None


def test_tail_gives_whole_lines_as_they_come(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    tail = logfile.Tail(path)
    assert tail.lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.lines() == ["one"]
        file.write("o\nthree\n")
        file.flush()
        assert tail.lines() == ["two", "three"]
    path.rename(tmp_path / "log.1")
    path.write_text("after the rotation\n")
    assert tail.lines() == ["after the rotation"]


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, ["z"]), (2, ["b", "z"]), (99, ["a", "b", "z"])])
def test_last_lines(tmp_path: pathlib.Path, count: int, expected: list[str]) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\n10%\r20%\rz\n")
    assert logfile.last_lines(path, count) == expected


def test_last_lines_of_a_large_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number} {'x' * 90}\n" for number in range(5000)))
    lines = logfile.last_lines(path, 1500)
    assert [line.split()[1] for line in lines] == [str(number) for number in range(3500, 5000)]
    path.write_text("")
    assert logfile.last_lines(path, 5) == []
