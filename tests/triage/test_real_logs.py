"""Logs that real vLLM 0.32.0 wrote on the CPU when it failed in these ways.

Each file of `real/` is one whole run, without the list of routes and the dump of the configuration, with paths
made neutral and lines cut at 700 characters.
"""

from __future__ import annotations

import io
import pathlib

import pytest

from dsv4_deploy.triage import diagnose, diagnose_stream

REAL = pathlib.Path(__file__).with_name("real")
EXPECTED = {
    "unknown-flag": ("D01", "vllm: error: unrecognized arguments: --no-such-flag 3"),
    "wrong-flag-value": ("D01", "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'"),
    "wrong-vllm-version": ("D02", "RuntimeError: rocm_patches 0.1.0 does not know vLLM 0.31.0."),
    "without-plugin": ("D03", "ValueError: Failed to find a kernel that can implement the ScaledMM linear layer."),
    "no-memory-for-cache": ("D04", "ValueError: Available memory on node 0 (18.53/21.96 GiB) on kv cache"),
    "context-too-long": ("D07", "User-specified max_model_len (1000000) is greater than the derived"),
    "no-such-model": ("D08", "huggingface_hub.errors.HFValidationError: Repo id must be in the form"),
    "worker-killed-while-loading": ("D09", "Exception: WorkerProc initialization failed due to an exception"),
    "worker-crashed": ("D10", "Worker proc VllmWorker-0 died unexpectedly (exit code: -11)"),
    "engine-killed": ("D11", "EngineDeadError: EngineCore encountered an issue."),
    "port-in-use": ("F76", "OSError: [Errno 98] Address already in use"),
    "stopped-while-loading": ("F13", "KeyboardInterrupt: terminated"),
    "three-ranks": ("F18", "Total number of attention heads (8) must be divisible by tensor parallel size (3)."),
    "missing-shard": ("W33", "FileNotFoundError: Weight files referenced in index but missing"),
}  # fmt: skip


def test_every_file_is_expected_to_say_something() -> None:
    assert {path.stem for path in REAL.glob("*.log")} == {*EXPECTED, "healthy", "healthy-stopped"}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_the_cause(name: str) -> None:
    number, words = EXPECTED[name]
    path = REAL / f"{name}.log"
    answer = diagnose(path)
    assert (answer.id, answer.verdict) == (number, "known")
    assert answer.line is not None
    assert words in answer.line.text
    lines = path.read_bytes().decode("utf-8").split("\n")
    first = next(at for at, line in enumerate(lines, 1) if words in line)
    assert answer.line.number == first


@pytest.mark.parametrize("name", ["healthy", "healthy-stopped"])
def test_a_run_without_a_failure(name: str) -> None:
    answer = diagnose(REAL / f"{name}.log")
    assert (answer.id, answer.verdict, answer.line) == ("unknown", "healthy", None)
    assert "unknown: no failure in this log" in answer.text()


@pytest.mark.parametrize("name", list(EXPECTED))
def test_cut_off_at_the_top_the_answer_is_the_same_or_unknown(name: str) -> None:
    """What the beginning of a log would have told must not be made up."""
    data = (REAL / f"{name}.log").read_bytes()
    for part in (0.3, 0.6, 0.9):
        answer = diagnose_stream(io.BytesIO(data[int(len(data) * part) :]), name)
        assert answer.id in (EXPECTED[name][0], "unknown")
