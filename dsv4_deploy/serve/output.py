"""vLLM's output, passed through and kept: a pipe's bytes go to our stdout and into files of bounded size.

In: the reading end of the pipe that all of vLLM's processes write to. Out: the same bytes on a descriptor, and
vllm.log with its older parts vllm.log.1, .2 ... beside it. It is a thread because a slow reader of stdout must
hold up vLLM's logging (as it would without us), not the health answers.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import threading
import time

MAX_BYTES = 32 * 1024 * 1024
"""Of one file; with KEEP older ones that is the most that a log takes, about 160 MiB."""

KEEP = 4
_CHUNK = 64 * 1024


def shift(path: pathlib.Path, keep: int = KEEP) -> None:
    """Make room for a new file: `path` becomes `path`.1, that becomes .2, and so on; the oldest goes."""
    for number in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f"{path.name}.{number}").replace(path.with_name(f"{path.name}.{number + 1}"))
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_name(f"{path.name}.1"))


class RotatingFile:
    """Appends bytes; starts a new file, at the end of a line, when one is full. Safe from several threads.

    What cannot be written (a full disk) is dropped: losing log lines is better than losing the server.
    """

    def __init__(self, path: pathlib.Path, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        self._path = path
        self._max = max_bytes
        self._keep = keep
        self._lock = threading.Lock()
        self._descriptor = -1
        self._size = 0
        self._parts = 1
        self._open()

    def parts(self) -> list[pathlib.Path]:
        """The files that hold what was written since the last `start_over`, newest first."""
        with self._lock:
            older = [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._parts)]
        return [self._path, *older]

    def start_over(self) -> None:
        """Begin a new file for a new run; what was written before is an older part."""
        with self._lock:
            if self._size:
                self._rotate()
            self._parts = 1

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._size + len(data) > self._max and self._size:
                # The line that is being written stays whole.
                end = data.find(b"\n") + 1
                self._write(data[:end])
                data = data[end:]
                self._rotate()
            self._write(data)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            write_all(self._descriptor, data)
        self._size += len(data)

    def _rotate(self) -> None:
        old = self._descriptor
        # Where no new file can be made the old one goes on, and the next try is a file's length away: each moves
        # the older parts on.
        self._size = 0
        with contextlib.suppress(OSError):
            shift(self._path, self._keep)
            self._open()
            os.close(old)
            self._parts = min(self._parts + 1, self._keep + 1)


class Pump(threading.Thread):
    """Copies until every writer has closed the pipe. `passed_on` is a descriptor, None for nowhere."""

    def __init__(self, source: int, file: RotatingFile, passed_on: int | None) -> None:
        super().__init__(name="output", daemon=True)
        self._source = source
        self._file = file
        self._passed_on = passed_on

    def run(self) -> None:
        while chunk := os.read(self._source, _CHUNK):
            self._file.write(chunk)
            if self._passed_on is not None:
                try:
                    write_all(self._passed_on, chunk)
                except OSError:
                    # Whoever read our stdout has gone; the file goes on.
                    self._passed_on = None
        os.close(self._source)


class Notes(threading.Thread):
    """What the supervisor itself has to say: on stderr for people, in vLLM's form in the log file.

    A thread too: nobody who reads stderr slowly may hold up the answer to a probe.
    """

    def __init__(self, file: RotatingFile) -> None:
        super().__init__(name="notes", daemon=True)
        self._file = file
        self._lines: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self.start()

    def __call__(self, text: str, level: str = "INFO") -> None:
        """One line. `level` is INFO or WARNING: errors are vLLM's, and searched for by level."""
        stamp = time.strftime("%m-%d %H:%M:%S")
        logged = f"(Supervisor pid={os.getpid()}) {level} {stamp} [supervisor.py] {text}\n"
        self._lines.put((f"dsv4-deploy: {text}\n".encode(), logged.encode()))

    def run(self) -> None:
        while (line := self._lines.get()) is not None:
            spoken, logged = line
            self._file.write(logged)
            with contextlib.suppress(OSError):
                write_all(2, spoken)

    def close(self, timeout_s: float) -> None:
        """Write what is still to be written, as far as it can be in that time."""
        self._lines.put(None)
        self.join(timeout_s)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte, however many calls it takes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
