"""Reading a log in pieces, and taking its lines apart, whatever they hold."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_deploy.triage import lines
from dsv4_deploy.triage.lines import LONGEST_SEARCHED, Entry, Parser, Reader, shown

WANTED = re.compile(b"ab|X")


class Drip(io.RawIOBase):
    """A stream that gives its bytes in pieces of the given sizes, as a pipe does."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._pieces = []
        while data:
            size = sizes[len(self._pieces) % len(sizes)]
            self._pieces.append(data[:size])
            data = data[size:]

    def read(self, _: int = -1) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def naive(data: bytes, every: bool) -> list[tuple[int, bytes]]:
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        found += [(number, state) for state in line.split(b"\r") if (every and state) or WANTED.search(state)]
    return found


@given(
    st.lists(st.sampled_from([b"ab", b"X", b"c", b" ", b"\n", b"\r", b"\r\n", b"\0", b"\xff"]), max_size=60).map(b"".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)  # fmt: skip
def test_pieces_make_no_difference(data: bytes, sizes: list[int]) -> None:
    reader = Reader(Drip(data, sizes), WANTED)  # type: ignore[arg-type]
    assert [item for item in reader if item[1]] == naive(data, every=False)
    assert reader.lines == len(data.split(b"\n")) - (data.endswith(b"\n") or not data)
    every = Reader(Drip(data, sizes), WANTED)  # type: ignore[arg-type]
    every.every = True
    assert [item for item in every if item[1]] == naive(data, every=True)


def test_a_line_without_an_end_stays_small_and_keeps_its_number() -> None:
    data = b"first\n" + b"x" * 3_000_000 + b"ab" + b"y" * 3_000_000 + b"\nX last"
    found = list(Reader(io.BytesIO(data), WANTED))
    assert [number for number, _ in found] == [2, 3]
    assert all(len(line) <= lines.LONGEST_LINE for _, line in found)


def test_colours_go_before_the_search() -> None:
    data = b"\x1b[31ma\x1b[0mb\n"
    assert list(Reader(io.BytesIO(data), WANTED)) == [(1, b"ab")]


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("(EngineCore pid=12) ERROR 11-30 21:00:00 [core.py:1] text", ("EngineCore pid=12", "ERROR", "core.py:1", "text")),
        ("(Worker_TP0_EP0 pid=9) INFO 11-30 21:00:00.123 [v1/x.py:1]   indented", ("Worker_TP0_EP0 pid=9", "INFO", "v1/x.py:1", "  indented")),
        ("(VllmWorker rank=0 pid=9) ERROR 11-30 21:00:00 [a.py:2] text", ("VllmWorker rank=0 pid=9", "ERROR", "a.py:2", "text")),
        ("ERROR 07-10 14:49:36 [core.py:515] old form", ("", "ERROR", "core.py:515", "old form")),
        ("(APIServer pid=1) Traceback (most recent call last):", ("APIServer pid=1", "", "", "Traceback (most recent call last):")),
        ("Capturing: 88%|██| 45/51 [00:05<00:00](Worker_TP0 pid=3) ERROR 02-24 02:39:34 [x.py:1] text", ("Worker_TP0 pid=3", "ERROR", "x.py:1", "text")),
        ("2026-11-30T21:00:00.123456789Z stderr F (Worker pid=3) ERROR 02-24 02:39:34 [x.py:1] text", ("Worker pid=3", "ERROR", "x.py:1", "text")),
        ("2026-11-30T21:00:00Z ERROR 02-24 02:39:34 [x.py:1] text", ("", "ERROR", "x.py:1", "text")),
        ("vllm-1  | Memory access fault by GPU node-1", ("", "", "", "Memory access fault by GPU node-1")),
        ("Aug 11 11:46:12 host start.sh[20]: (Worker_TP6 pid=20) ERROR 08-11 11:46:12 [x.py:7] text", ("Worker_TP6 pid=20", "ERROR", "x.py:7", "text")),
        ("(RayWorkerWrapper pid=7, ip=10.0.0.3) ERROR 02-24 02:39:34 [x.py:1] text", ("RayWorkerWrapper pid=7", "ERROR", "x.py:1", "text")),
        ("(RayWorkerWrapper pid=7, ip=10.0.0.3) raw", ("RayWorkerWrapper pid=7", "", "", "raw")),
        ("[rank7]: Traceback (most recent call last):", ("rank7", "", "", "Traceback (most recent call last):")),
        ("ERROR:    Exception in ASGI application", ("", "ERROR", "", "Exception in ASGI application")),
        ("W1130 21:59:27.488000 23248 torch/_library/triton.py:53] no", ("", "WARNING", "", "W1130 21:59:27.488000 23248 torch/_library/triton.py:53] no")),
        ("[rank0]:[E731 09:09:48.669694584 X.cpp:1] no", ("", "ERROR", "", "[rank0]:[E731 09:09:48.669694584 X.cpp:1] no")),
        ("killed it (see pid=7 there)", ("", "", "", "killed it (see pid=7 there)")),
        ('{"levelname": 3}', ("", "", "", '{"levelname": 3}')),
        ("{" * 5000, ("", "", "", "{" * 5000)),
        ("a\x07b\x1b]0;title\x07\u202ec", ("", "", "", "a b ]0;title c")),
    ],
)  # fmt: skip
def test_lines_are_taken_apart(line: str, entry: tuple[str, str, str, str]) -> None:
    assert Parser().entries(5, line.encode()) == [Entry(5, *entry)]


def test_json_logs() -> None:
    record = {
        "asctime": "2026-11-30 21:00:00",
        "levelname": "ERROR",
        "name": "vllm.core",
        "processName": "EngineCore",
        "process": 12,
        "message": "failed",
        "exc_info": "Traceback (most recent call last):\n  File x\nValueError: bad",
    }
    place = ("EngineCore pid=12", "ERROR", "vllm.core")
    assert Parser().entries(1, json.dumps(record).encode()) == [
        Entry(1, *place, text)
        for text in ("failed", "Traceback (most recent call last):", "  File x", "ValueError: bad")
    ]


@pytest.mark.parametrize(
    "wrapper",
    [
        {"log": "(Worker pid=3) ERROR 02-24 02:39:34 [x.py:1] text\n", "stream": "stderr"},
        {"message": "(Worker pid=3) ERROR 02-24 02:39:34 [x.py:1] text", "kubernetes": {"pod_name": "p"}},
        {"MESSAGE": "(Worker pid=3) ERROR 02-24 02:39:34 [x.py:1] text", "PRIORITY": "6", "_PID": "1"},
        {"level": "info", "msg": "(Worker pid=3) ERROR 02-24 02:39:34 [x.py:1] text"},
        {"processName": "Worker", "process": 3, "level": "error", "logger": "x.py:1", "msg": "text"},
    ],
)
def test_what_log_collectors_wrap_around_a_line(wrapper: dict[str, object]) -> None:
    line = json.dumps(wrapper).encode()
    assert Parser().entries(1, line) == [Entry(1, "Worker pid=3", "ERROR", "x.py:1", "text")]
    behind_journald = b"Aug 11 11:46:12 host vllm[20]: " + line
    assert Parser().entries(1, behind_journald) == Parser().entries(1, line)


@pytest.mark.parametrize(
    "front",
    [
        "[pod/flash-0/vllm] ",
        "[pod/flash-0/vllm] 2026-11-30T21:00:00.123456789Z ",
        "flash-0 vllm ",
        "flash  vllm  17  ",
        "vllm-1  | ",
        "flash_vllm.1.abc@node7    | ",
        "2026-11-30T21:00:00.123456789Z stderr F ",
        "Aug 11 11:46:12 gpu-node-7 vllm[20]: ",
        "2026-11-30T21:00:00+0000 node podman[20]: ",
        "2026-11-30 21:00:00 ",
        "[2026-11-30 21:00:00.123] ",
    ],
)
def test_what_stands_before_records_is_taken_from_raw_lines_too(front: str) -> None:
    parser = Parser()
    record = f"{front}ERROR 02-24 02:39:34 [x.py:1] text".encode()
    assert parser.entries(1, record) == [Entry(1, "", "ERROR", "x.py:1", "text")]
    later = front.replace("1", "2").replace("30", "29") if "flash_" not in front else front
    for raw in ("Traceback (most recent call last):", '  File "/a.py", line 1, in f', "ValueError: x"):
        assert parser.entries(2, (later + raw).encode()) == [Entry(2, "", "", "", raw)]


def test_neither_a_progress_bar_nor_another_process_is_such_a_front() -> None:
    parser = Parser()
    for front in ("Capturing:  88%|█| 45/51 ", "(EngineCore pid=1) "):
        parser.entries(1, f"{front}(Worker pid=3) ERROR 02-24 02:39:34 [x.py:1] text".encode())
    assert parser.entries(2, b"(EngineCore pid=1) raw") == [Entry(2, "EngineCore pid=1", "", "", "raw")]
    assert parser.entries(3, "Capturing:  89%|█| 46/51 raw".encode())[0].text.startswith("Capturing")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_files_that_windows_wrote(encoding: str) -> None:
    text = "".join(f"{number} … wanted\r\n" for number in range(60_000))
    found = list(Reader(io.BytesIO(text.encode(encoding)), re.compile(b"wanted")))
    assert [number for number, _ in found] == list(range(1, 60_001))
    assert found[-1][1] == "59999 … wanted".encode()


@given(st.binary(max_size=300))
def test_any_bytes_become_harmless_text(data: bytes) -> None:
    for entry in Parser().entries(1, data):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", entry.text + entry.process)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("non-default args: {'api_key': ['sk-abc123def456ghi7']}", "abc123"),
        ("non-default args: {'api_key': ['hunter2'], 'port': 1}", "hunter2"),
        ("Authorization: Bearer eyJhbGciOi.J9", "eyJ"),
        ("HF_TOKEN=hf_abcdefghijkl in the environment", "abcdefgh"),
        ("token: 'abc'", "abc'"),
        ("VLLM_API_KEY=opensesame", "opensesame"),
    ],
)
def test_secrets_are_not_shown(text: str, secret: str) -> None:
    assert secret not in shown(text)
    assert "***" in shown(text)


def test_ordinary_words_are_not_taken_for_secrets() -> None:
    for text in ("max_tokens=100", "prompt_tokens: 12", "the tokenizer: deepseek_v4", "Bearer x"):
        assert shown(text) == text


def test_long_lines_are_shortened() -> None:
    assert len(shown("é" * 10_000)) == lines.LONGEST_TEXT


def test_of_a_line_without_an_end_the_first_megabytes_and_the_last_piece_are_searched() -> None:
    data = b"X" * (20 << 20) + b" ab\nab\n"
    looked: list[int] = []
    found = list(
        Reader(
            io.BytesIO(data), re.compile(b" ab|^ab", re.MULTILINE), lambda piece: looked.append(len(piece))
        )
    )
    assert [number for number, _ in found] == [1, 2]
    assert LONGEST_SEARCHED <= sum(looked) < LONGEST_SEARCHED + 3 * (64 << 10)
