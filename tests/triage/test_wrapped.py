"""The same failures as other people's tools hand them over: behind the prefixes of log collectors, in JSON, from Ray,
from Windows; and in other words, as other releases and tools write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import pytest

from dsv4_deploy.triage import Diagnosis
from dsv4_deploy.triage.rules import Rule, book
from tests.triage import logs
from tests.triage.test_examples import QUIET_S, RULES, ask

RECORD = re.compile(r"\(([\w ]+) pid=(\d+)\) ([A-Z]+) \S+ \S+ \[([^\]]+)\] (.*)")


def front(text: str) -> Callable[[Sequence[str]], bytes]:
    return lambda lines: "".join(f"{text}{line}\n" for line in lines).encode()


def wrapped(name: str, **more: str) -> Callable[[Sequence[str]], bytes]:
    return lambda lines: "".join(json.dumps({name: line, **more}) + "\n" for line in lines).encode()


def json_logger(lines: Sequence[str]) -> bytes:
    """vLLM with a JSON formatter; what is written to stderr directly stays as it is."""

    def one(line: str) -> str:
        match = RECORD.fullmatch(line)
        if not match:
            return line
        process, pid, level, place, message = match.groups()
        record = {"processName": process, "process": int(pid), "levelname": level, "name": place}
        return json.dumps(record | {"message": message, "exc_info": None})

    return "".join(f"{one(line)}\n" for line in lines).encode()


WRAPPERS: dict[str, Callable[[Sequence[str]], bytes]] = {
    "kubectl --prefix": front("[pod/flash-0/vllm] "),
    "kubectl --timestamps": front("2026-11-30T21:00:00.123456789Z "),
    "stern": front("flash-0 vllm "),
    "compose": front("\x1b[36mvllm-1  | \x1b[0m"),
    "journald": front("Nov 30 21:00:00 gpu-node-7 vllm[20]: "),
    "journald, ISO time": front("2026-11-30T21:00:00+0000 gpu-node-7 podman[20]: "),
    "docker's JSON": wrapped("log", stream="stderr"),
    "fluentd": wrapped("message", stream="stderr"),
    "journald's JSON": wrapped("MESSAGE", PRIORITY="6"),
    "JSON logger": json_logger,
    "Windows": lambda lines: "".join(f"{line}\r\n" for line in lines).encode("utf-16"),
    "Ray": lambda lines: front("")([re.sub(r"\(Worker_?\w* pid=(\d+)\)", r"(RayWorkerWrapper pid=\1, ip=10.0.0.3)", line) for line in lines]),
}  # fmt: skip


def around(example: Sequence[str], marked: int, rule: Rule) -> tuple[list[str], int]:
    """The lines of a log with the example in it, and the number of the marked line."""
    before = logs.start()[:-1]
    if rule.about.id not in ("F10", "F11", "F13", "F15", "D09"):
        before += logs.loaded()
    if rule.kind == "hint" or rule.about.id == "D11":
        before += logs.listening()
    ends_silently = rule.kind == "hint" or rule.quiet_s or rule.example_exit is not None
    after = [] if ends_silently else logs.aftermath()
    return [*before, *example, *after], len(before) + marked + 1


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_every_example_behind_what_others_put_before_or_around_it(name: str) -> None:
    wrong = []
    for rule in book().rules:
        # These are no causes; test_examples.py has what they say.
        if rule.kind in ("reference", "consequence"):
            continue
        lines, number = around(rule.example, rule.example_line, rule)
        answer = ask(WRAPPERS[name](lines), rule.example_exit, QUIET_S if rule.quiet_s else 0.0)
        named = answer.line.number if answer.line else None
        if (answer.id, named) != (rule.about.id, number):
            wrong.append((rule.about.id, number, answer.id, named))
    assert not wrong


def error(text: str) -> str:
    return logs.record("Worker_TP3", 103, "ERROR", "multiproc_executor.py:597", text)


def traceback(text: str, *frames: str) -> list[str]:
    return [error(line) for line in ("Traceback (most recent call last):", *frames, text)]


LOADING = "Loading safetensors checkpoint shards:  35% Completed | 16/46 [01:12<02:15,  4.52s/it]"
CAPTURING = (
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   4%|▍         | 2/51 [00:03<01:11,  1.46s/it]"
)
OTHER_WORDS: list[tuple[str, list[str]]] = [
    # The frame of mhc_pre far above the error, more frames below it than are kept.
    ("F04", traceback("RuntimeError: HIP error: invalid configuration argument", '  File "/aiter/ops/mhc.py", line 3, in mhc_pre', *[f'  File "/torch/a.py", line {n}, in f' for n in range(60)])),
    ("F05", ["c1:00.0 Processing accelerators: AMD/ATI Aqua Vanjaram [Instinct MI300X VF] [1002:74b5]", "ERROR 08-07 20:12:01 [multiproc_executor.py:230] Worker proc VllmWorker-2 died unexpectedly, shutting down executor."]),
    ("F11", [LOADING, "vllm-1 exited with code 137"]),
    ("F11", [LOADING, "command terminated with exit code 137"]),
    ("F11", [LOADING, '/entrypoint.sh: line 12:    17 Killed                  vllm serve "$@"']),
    ("F11", [LOADING, "      Exit Code:    137"]),
    ("F13", [LOADING, "Normal   Killing    2m  kubelet  Container vllm failed startup probe, will be restarted"]),
    ("F15", [LOADING, "(APIServer pid=1) TimeoutError: Timed out waiting for engines to send initial message on input socket. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S)"]),
    ("F16", traceback("torch.AcceleratorError: HIP error: no ROCm-capable device is detected")),
    ("F23", traceback("TypeError: 'NoneType' object is not callable", '  File "/vllm/v1/spec_decode/dspark.py", line 9, in load_model')),
    ("F36", traceback("OSError: [Errno 30] Read-only file system: '/.triton/cache'")),
    ("F64", [CAPTURING, "(APIServer pid=1) RuntimeError: Process EngineCore_DP0 (PID: 90) died with exit code -11"]),
    ("D10", ["(EngineCore pid=90) ERROR 08-07 20:12:01 [multiproc_executor.py:230] Worker proc VllmWorker-2 died unexpectedly, shutting down executor."]),
    ("F77", [logs.record("APIServer", 1, "INFO", "logger.py:80", "Generated response cmpl-7: output: ' \"content\": \"x\" }, { \"role\": \"user\"', finish_reason: length")]),
    ("F77", [logs.record("APIServer", 1, "INFO", "logger.py:39", "Received request cmpl-1-0: prompt: '[{\"role\": \"user\", \"content\": \"Write a poem\"}]', params: None")]),
]  # fmt: skip


@pytest.mark.parametrize(("number", "example"), OTHER_WORDS)
def test_other_releases_and_tools_have_other_words(number: str, example: list[str]) -> None:
    lines, line = around(example, len(example) - 1, RULES[number])
    answer = ask(front("")(lines))
    assert (answer.id, answer.line and answer.line.number) == (number, line)


def test_a_missing_draft_is_not_every_none_that_is_called() -> None:
    lines, _ = around(traceback("TypeError: 'NoneType' object is not callable"), 1, RULES["F23"])
    answer: Diagnosis = ask(front("")(lines))
    assert answer.verdict == "unknown" and answer.line is not None
    assert answer.line.text.endswith("'NoneType' object is not callable")
