"""Reading a log that another process is still writing: its new lines, its last lines.

In: the path of vllm.log. Out: lines without colours. A file that is rotated or not there yet is no error.
"""

from __future__ import annotations

import io
import os
import pathlib
import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# vLLM 0.32 writes "(EngineCore pid=12) ERROR 11-30 21:00:00 [core.py:1] text"; older releases put the level
# first. Lines of a traceback carry the same prefix.
_PREFIX = re.compile(
    r"^(?:\([^)]*?pid=\d+\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]]+\] ?"
)
_PROCESS = re.compile(r"^\([^)]*?pid=\d+\) ")


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


def message(line: str) -> str:
    """A log line without process, level, date and place."""
    stripped, found = _PREFIX.subn("", line)
    return stripped if found else _PROCESS.sub("", line)


def _clean(line: bytes) -> str:
    return _COLOUR.sub("", line.decode("utf-8", errors="replace")).rstrip()
