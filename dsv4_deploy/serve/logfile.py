"""Reading a log that another process is still writing: its new lines, its last lines, its first error.

In: the path of vllm.log. Out: lines without colours. A file that is rotated or not there yet is no error.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
from collections.abc import Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# vLLM 0.32 writes "(EngineCore pid=12) ERROR 11-30 21:00:00 [core.py:1] text"; older releases put the level
# first. Lines of a traceback carry the same prefix.
_PREFIX = re.compile(
    r"^(?:\((?P<process>[^)]*?pid=\d+)\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]]+\] ?"
)
_PROCESS = re.compile(r"^\([^)]*?pid=\d+\) ")
_START_OF_TROUBLE = re.compile(
    r"^(Traceback \(most recent call last\):|\S.*?: error: |Fatal Python error|Error: )"
)
# Enough for the message and the place; the whole traceback stays in the log.
MAX_BLOCK = 24
_KEEP_HEAD = 6


class Tail:
    """Follows one file. Each call of `lines` returns what was completed since the last one."""

    def __init__(self, path: pathlib.Path, *, from_end: bool = False) -> None:
        self._path = path
        self._file: io.BufferedReader | None = None
        self._rest = b""
        self._open()
        if from_end and self._file:
            self._file.seek(0, os.SEEK_END)

    def lines(self) -> list[str]:
        """New whole lines. A progress bar, which rewrites its line, gives one line per state."""
        chunk = self._read()
        *whole, self._rest = re.split(rb"\r\n|\n|\r", self._rest + chunk)
        return [_clean(line) for line in whole]

    def _read(self) -> bytes:
        if self._file is None:
            self._open()
        if self._file is None:
            return b""
        chunk = self._file.read()
        if not chunk and self._replaced():
            self._file.close()
            self._file = None
            self._open()
            chunk = self._file.read() if self._file else b""
        return chunk

    def _open(self) -> None:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _replaced(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        here = os.fstat(self._file.fileno()) if self._file else None
        return here is not None and (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev)


def last_lines(path: pathlib.Path, count: int) -> list[str]:
    """The last `count` lines; fewer when the file is shorter. Raises FileNotFoundError."""
    if count <= 0:
        return []
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        block = 64 * 1024
        data = b""
        while end > 0 and data.count(b"\n") <= count:
            start = max(0, end - block)
            file.seek(start)
            data = file.read(end - start) + data
            end = start
    if not data:
        return []
    lines = data.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")[-count:]
    return [_clean(line.rpartition(b"\r")[2]) for line in lines]


def first_error(path: pathlib.Path) -> list[str]:
    """The first block of lines that says what went wrong; the last lines of the log when none does.

    vLLM ends with a traceback that only says that some other process died; the cause stands where the first
    error was written.
    """
    try:
        lines = [_clean(line) for line in re.split(rb"\r\n|\n|\r", path.read_bytes())]
    except OSError:
        return []
    for number, line in enumerate(lines):
        match = _PREFIX.match(line)
        if match and match["level"] in ("ERROR", "CRITICAL"):
            return _shorten(_same_speaker(lines[number:], match["process"]))
        if _START_OF_TROUBLE.match(_PROCESS.sub("", line)):
            return _shorten(_until_message(lines[number:]))
    return [line for line in lines if line.strip()][-12:]


def message(line: str) -> str:
    """A log line without process, level, date and place."""
    stripped, found = _PREFIX.subn("", line)
    return stripped if found else _PROCESS.sub("", line)


def _same_speaker(lines: Sequence[str], process: str | None) -> list[str]:
    block = []
    for line in lines:
        match = _PREFIX.match(line)
        if match is None or match["level"] not in ("ERROR", "CRITICAL") or match["process"] != process:
            break
        block.append(message(line))
    return block


def _until_message(lines: Sequence[str]) -> list[str]:
    """A plain traceback: its indented lines, and the exception that closes it."""
    block = [message(lines[0])]
    for line in lines[1:]:
        text = message(line)
        block.append(text)
        if text and not text[0].isspace():
            break
    return block


def _shorten(block: list[str]) -> list[str]:
    while block and not block[-1].strip():
        block.pop()
    if len(block) <= MAX_BLOCK:
        return block
    tail = MAX_BLOCK - _KEEP_HEAD - 1
    left_out = f"... ({len(block) - _KEEP_HEAD - tail} lines, see the log)"
    return [*block[:_KEEP_HEAD], left_out, *block[-tail:]]


def _clean(line: bytes) -> str:
    return _COLOUR.sub("", line.decode("utf-8", errors="replace")).rstrip()
