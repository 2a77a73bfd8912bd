"""Reads a log of any size line by line, but only the lines that may matter, and takes them apart.

In: a binary stream and a pattern of telling words. Out: numbered lines as `Entry` (process, level, text). The
stream is read once, in blocks, so that memory stays small; whatever is in it (colours, progress bars, binary
noise, lines without end) is made harmless here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
LONGEST_LINE = 64 << 10
"""Bytes. A line without an end is cut into pieces of this size, which keep its number."""
LONGEST_TEXT = 400
"""Characters of a line that are shown."""

# A piece of which more than this share is control characters is binary; of a text it is none.
NOISE_SHARE = 0.02
_NOISE_SAMPLE = 64
_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\x1b")
_NOISE = re.compile(rb"[^\n]*[%s]" % re.escape(_CONTROL))
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]+")
_LEVELS = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_PROCESS = r"\((?P<process>[A-Za-z][\w.-]*(?: [\w=.-]+)*? ?pid=\d+)\) ?"
# vLLM 0.32: "(EngineCore pid=12) ERROR 11-30 21:00:00 [core.py:1] text"; older releases leave the process out.
_VLLM = re.compile(
    rf"(?:{_PROCESS})?{_LEVELS} \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[(?P<place>[^\]]{{1,200}})\] ?"
)
_BARE_PROCESS = re.compile(_PROCESS)
_OTHER_LOGGER = re.compile(rf"{_LEVELS}:\s*")
# torch's loggers: "W1130 21:59:27.488000 23248 torch/_library/triton.py:53] text"; in C++ "[rank0]:[W731 ...".
_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[?(?P<letter>[IWEF])\d{3,4} \d\d:\d\d:\d\d\.\d+")
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
# What container runtimes and compose put before each line.
_CONTAINER = re.compile(
    r"(?:[\w.-]+\s+\| )?(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?)?"
)
_SECRETS = (
    re.compile(r"(?i)(bearer )[\w.~+/=-]{4,}"),
    re.compile(
        r"(?i)(\b(?:[\w-]*api[_-]?key|token|password|passwd|secret)s?['\"]?\s*[:=]\s*\[?['\"]?)[^\s'\",\]}]+"
    ),
    re.compile(r"()\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{12,}|gh[pousr]_[A-Za-z0-9]{20,})"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One line. `process` is "Worker_TP0 pid=12" or ""; `level` a logging level or ""; `place` where in the
    source vLLM wrote it ("core.py:1510"), or ""; `text` the rest, with its indentation."""

    number: int
    process: str
    level: str
    place: str
    text: str


class Reader:
    """Iterates over the (number, bytes) of the lines that `wanted` finds something in.

    While `every` is set no line is left out; both may change between two lines. A progress bar, which
    rewrites its line with carriage returns, gives one line per state, all with the same number. `look` is
    shown every piece of the log, with whatever is in it.
    """

    def __init__(
        self, stream: BinaryIO, wanted: re.Pattern[bytes], look: Callable[[bytes], None] = lambda piece: None
    ) -> None:
        self.every = False
        self.wanted = wanted
        self._stream = stream
        self._look = look
        self._number = 1
        self._ended = True

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for data in self._pieces():
            self._ended = data.endswith(b"\n")
            self._look(data)
            yield from self._lines(data)

    @property
    def lines(self) -> int:
        """How many lines there were, when all of it has been read."""
        return self._number - self._ended

    def _pieces(self) -> Iterator[bytes]:
        """The stream in pieces that end between two lines."""
        rest = b""
        while block := self._stream.read(BLOCK_BYTES):
            end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
            if end:
                yield self._plain(rest + block[:end])
                rest = block[end:]
            else:
                rest += block
            while len(rest) > LONGEST_LINE:
                yield self._plain(rest[:LONGEST_LINE])
                rest = rest[LONGEST_LINE:]
        if rest:
            yield self._plain(rest)

    @staticmethod
    def _plain(data: bytes) -> bytes:
        """Without what only costs time: in a binary piece, of each line only what follows the noise."""
        sample = data[::_NOISE_SAMPLE]
        if len(sample) > _NOISE_SAMPLE:
            noise = len(sample) - len(sample.translate(None, _CONTROL))
            if noise > NOISE_SHARE * len(sample):
                data = _NOISE.sub(b"", data)
        return _COLOUR.sub(b"", data) if b"\x1b" in data else data

    def _lines(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        position, size = 0, len(data)
        while position < size:
            if self.every:
                start = found = position
            else:
                match = self.wanted.search(data, position)
                if match is None:
                    break
                found = match.start()
                start = max(data.rfind(b"\n", position, found) + 1, position)
                self._number += data.count(b"\n", position, start)
                start = max(data.rfind(b"\r", start, found) + 1, start)
            newline = data.find(b"\n", found)
            end = size if newline < 0 else newline
            carriage_return = data.find(b"\r", found, end)
            if 0 <= carriage_return < end:
                end = carriage_return
            yield self._number, data[start : min(end, start + LONGEST_LINE)]
            self._number += end == newline
            position = end + 1
        self._number += data.count(b"\n", position)


def parse(number: int, line: bytes) -> Entry:
    """Take a line apart. What it does not recognise stays in `text`."""
    text = _UNPRINTABLE.sub(" ", line.decode("utf-8", errors="replace")).rstrip()
    start = 0
    if (pid := text.find("pid=")) > 0:
        # Not always the first thing: container runtimes, journald and progress bars write before it.
        start = max(0, text.rfind("(", 0, pid))
    elif text.startswith("{") and (entry := _from_json(number, text)):
        return entry
    elif match := _CONTAINER.match(text):
        start = match.end()
    process = ""
    if match := _VLLM.match(text, start):
        return Entry(number, match["process"] or "", match["level"], match["place"], text[match.end() :])
    if match := _BARE_PROCESS.match(text, start):
        process, start = match["process"], match.end()
    elif pid > 0:
        start = 0
    text = text[start:]
    if match := _OTHER_LOGGER.match(text):
        return Entry(number, process, match["level"], "", text[match.end() :])
    if match := _GLOG.match(text):
        return Entry(number, process, _GLOG_LEVELS[match["letter"]], "", text)
    return Entry(number, process, "", "", text)


def _from_json(number: int, text: str) -> Entry | None:
    """vLLM's JSON log format, or Docker's wrapper around any line."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if isinstance(wrapped := record.get("log"), str):
        return parse(number, wrapped.encode("utf-8", errors="replace"))
    message, level = record.get("message"), record.get("levelname")
    if not isinstance(message, str) or not isinstance(level, str):
        return None
    process = f"{record.get('processName', '')} pid={record.get('process', '')}"
    # The exception stands at the end of exc_info, and it says more than the message above it.
    trace = str(record.get("exc_info") or "").strip().splitlines()
    place = str(record.get("name") or "")
    return Entry(number, process, level, place, f"{message} {trace[-1]}" if trace else message)


def shown(text: str) -> str:
    """A line's text as it may be shown to anybody: shortened, and without what looks like a secret."""
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 4]} ..."
