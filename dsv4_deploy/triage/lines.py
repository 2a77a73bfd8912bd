"""Reads a log of any size line by line, but only the lines that may matter, and takes them apart.

In: a binary stream and a pattern of telling words. Out: numbered lines as `Entry` (process, level, text). The
stream is read once, in blocks, so that memory stays small; whatever is in it (colours, progress bars, binary
noise, lines without end) is made harmless here.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
LONGEST_LINE = 64 << 10
"""Bytes. A line without an end is cut into pieces of this size, which keep its number."""
LONGEST_SEARCHED = 8 << 20
"""Bytes of a line without an end that are searched, its last piece besides; no log has such lines, but 200 MB of one
letter would take half a minute."""
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
# Ray adds the node: "(RayWorkerWrapper pid=12, ip=10.0.0.3)".
_PROCESS = r"\((?P<process>[A-Za-z][\w.-]*(?: [\w=.-]+)*? ?pid=\d+)(?:, ip=[^)\s]{1,60})?\) ?"
# vLLM 0.32: "(EngineCore pid=12) ERROR 11-30 21:00:00 [core.py:1] text"; older releases leave the process out.
_VLLM = re.compile(
    rf"(?:{_PROCESS})?{_LEVELS} \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[(?P<place>[^\]]{{1,200}})\] ?"
)
_BARE_PROCESS = re.compile(_PROCESS)
_OTHER_LOGGER = re.compile(rf"{_LEVELS}:\s*")
# torch's loggers: "W1130 21:59:27.488000 23248 torch/_library/triton.py:53] text"; in C++ "[rank0]:[W731 ...".
_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[?(?P<letter>[IWEF])\d{3,4} \d\d:\d\d:\d\d\.\d+")
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
# torch writes an uncaught exception of a rank like this, on every line.
_RANK = re.compile(r"\[(?P<process>rank\d+)\]: ?(?!\[)")
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
# What kubectl --prefix, compose, container runtimes and journald put before each line, in that order.
_FRONT = re.compile(
    rf"(?:\[pod/\S+\] |[\w.@-]+\s+\| )?(?:\[?{_TIME}\]? )?(?:std(?:out|err) [FP] )?"
    r"(?:(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )?[\w.-]+ [\w./@-]+\[\d+\]: )?"
)
_MOST_FRONTS = 8
_LONGEST_FRONT = 200
_DIGITS = re.compile(r"\d+")
# Names under which JSON loggers and log collectors keep the same thing.
_MESSAGES = ("message", "msg", "MESSAGE", "log")
_JSON_LEVELS = ("levelname", "level", "severity")
_TRACES = ("exc_info", "exc_text", "exception", "traceback")
_LEVEL_NAMES = {"ERR": "ERROR", "WARN": "WARNING", "FATAL": "CRITICAL"} | {
    name: name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}
_MOST_JSON_LINES = 500
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
        rest, inside = b"", 0
        for block in _utf8(self._stream):
            end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
            if end:
                yield self._plain(rest + block[:end])
                rest, inside = block[end:], 0
            else:
                rest += block
            start = 0
            while len(rest) - start > LONGEST_LINE:
                piece = self._plain(rest[start : start + LONGEST_LINE])
                start += LONGEST_LINE
                inside += len(piece)
                if inside <= LONGEST_SEARCHED:
                    yield piece
            rest = rest[start:]
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


def _utf8(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in blocks. What Windows' PowerShell wrote (`kubectl logs POD > FILE`) is UTF-16 and begins with a
    mark that says so."""
    block = stream.read(BLOCK_BYTES)
    if not block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        while block:
            yield block
            block = stream.read(BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    while block:
        yield decoder.decode(block).encode("utf-8", errors="replace")
        block = stream.read(BLOCK_BYTES)


class Parser:
    """Takes lines apart; what it does not recognise stays in `text`.

    It remembers what stands before vLLM's own records. Container runtimes, journald, kubectl, stern and others
    write the same before the lines of a raw traceback, which only without it is known by its form.
    """

    def __init__(self) -> None:
        self._fronts: dict[str, re.Pattern[str]] = {}

    def entries(self, number: int, line: bytes) -> list[Entry]:
        """What a line says: one entry, or several where JSON holds the lines of a traceback."""
        text = _UNPRINTABLE.sub(" ", line.decode("utf-8", errors="replace")).rstrip()
        return self._entries(number, text)

    def _entries(self, number: int, text: str) -> list[Entry]:
        bare = self._without_front(text)
        if bare.startswith("{") and (entries := self._from_json(number, bare)):
            return entries
        if match := _VLLM.search(text):
            self._remember(text[: match.start()])
            rest = text[match.end() :]
            return [Entry(number, match["process"] or "", match["level"], match["place"], rest)]
        return [self._other(number, bare)]

    def _remember(self, front: str) -> None:
        """Keep what stood before a record, unless it is a progress bar or another process."""
        if not 0 < len(front) <= _LONGEST_FRONT or "%" in front or "pid=" in front:
            return
        shape = _DIGITS.sub("0", front)
        if shape not in self._fronts and len(self._fronts) < _MOST_FRONTS:
            self._fronts[shape] = re.compile(_DIGITS.sub(r"\\d+", re.escape(front)))

    def _without_front(self, text: str) -> str:
        for front in self._fronts.values():
            if match := front.match(text):
                return text[match.end() :]
        match = _FRONT.match(text)
        return text[match.end() :] if match else text

    @staticmethod
    def _other(number: int, text: str) -> Entry:
        """A line that is no record of vLLM's: raw output of a process, or another logger's."""
        process = ""
        # Not always the first thing: progress bars are written without a newline.
        start = max(0, text.rfind("(", 0, pid)) if (pid := text.find("pid=")) > 0 else 0
        if match := _BARE_PROCESS.match(text, start) or _RANK.match(text):
            process, text = match["process"], text[match.end() :]
        if match := _OTHER_LOGGER.match(text):
            return Entry(number, process, match["level"], "", text[match.end() :])
        if match := _GLOG.match(text):
            return Entry(number, process, _GLOG_LEVELS[match["letter"]], "", text)
        return Entry(number, process, "", "", text)

    def _from_json(self, number: int, text: str) -> list[Entry]:
        """A record of a JSON logger, such as vLLM's own format, or a log collector's wrapper around any line.
        Empty where it is neither."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(record, dict):
            return []
        message, level = _first(record, _MESSAGES), _first(record, _JSON_LEVELS)
        if message is None:
            return []
        trace = _first(record, _TRACES) or ""
        lines = _UNPRINTABLE.sub(" ", f"{message.rstrip()}\n{trace}").rstrip().split("\n")
        lines = [line.rstrip() for line in lines[:_MOST_JSON_LINES]]
        inner = [entry for line in lines for entry in self._entries(number, line)]
        known = _LEVEL_NAMES.get(level.upper(), "") if level else ""
        if not known or inner[0].level or inner[0].process:
            return inner
        pid = record.get("process")
        process = f"{record.get('processName') or ''} pid={pid}" if isinstance(pid, int) else ""
        place = str(record.get("name") or record.get("logger") or "")
        return [Entry(number, process, known, place, line) for line in lines]


def _first(record: dict[str, object], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if isinstance(value := record.get(name), str)), None)


def shown(text: str) -> str:
    """A line's text as it may be shown to anybody: shortened, and without what looks like a secret."""
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 4]} ..."
