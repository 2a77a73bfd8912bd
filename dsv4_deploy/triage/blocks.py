"""Gathers what one process says about one failure: the head, the traceback and the exception that closes it.

In: entries of a log in which several processes write at once. Out: `Block`s, each with the line that names
the error. vLLM writes tracebacks in two ways, as a log record on every line or raw to stderr, and Python
chains exceptions, of which only one is the cause.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from dsv4_deploy.triage.lines import Entry

MOST_BLOCKS = 64
"""Of one run of vLLM that are kept; the cause is among the first."""
HEAD_LINES = 4
TAIL_LINES = 24
MOST_EXCEPTIONS = 8
MOST_FRAMES = 400
"""Lines after which a traceback without an exception is given up."""
MESSAGE_LINES = 3
"""Lines that are taken as the rest of a message after a raw traceback."""
PATIENCE = 200
"""Lines of others after which a raw traceback does not go on any more."""

_TRACEBACK = "Traceback (most recent call last):"
_CAUSED = "The above exception was the direct cause of the following exception:"
_MEANWHILE = "During handling of the above exception, another exception occurred:"
_NATIVE = (
    "Fatal Python error", "FATAL", "terminate called", "Segmentation fault", "core dumped", "panicked",
)  # fmt: skip


@dataclasses.dataclass
class Block:
    """One process's report of a failure. `known` holds the ids of rules and the numbers of the lines that they
    matched, for whoever keeps rules."""

    first: Entry
    known: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    words: frozenset[str] = frozenset()
    """Those that `mentions` can be asked for; the ones that were met, wherever they stood, are kept."""
    _met: set[str] = dataclasses.field(default_factory=set)
    _head: list[Entry] = dataclasses.field(default_factory=list)
    _tail: collections.deque[Entry] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=TAIL_LINES)
    )
    _exceptions: list[Entry] = dataclasses.field(default_factory=list)
    _root: Entry | None = None
    _replaces_root: bool = False
    _frames: int = 0
    _in_traceback: bool = False
    _message_lines: int = 0

    def add(self, entry: Entry) -> None:
        """Take one more line of the same process."""
        if len(self._head) < HEAD_LINES:
            self._head.append(entry)
        else:
            self._tail.append(entry)
        text = entry.text
        self._met.update(word for word in self.words - self._met if word in text)
        if text.startswith(_TRACEBACK):
            self._in_traceback, self._frames = True, 0
        elif text.startswith(_CAUSED):
            self._message_lines = MESSAGE_LINES
        elif text.startswith(_MEANWHILE):
            # Python only met the first exception on the way; the next one is what went wrong.
            self._replaces_root, self._message_lines = True, MESSAGE_LINES
        elif not self._in_traceback:
            self._message_lines -= bool(text)
        elif text and not text[0].isspace():
            self._close(entry)
        else:
            self._frames += 1
            self._in_traceback = self._frames < MOST_FRAMES

    def _close(self, entry: Entry) -> None:
        self._in_traceback, self._message_lines = False, MESSAGE_LINES
        if self._root is None or self._replaces_root:
            self._root = entry
        self._replaces_root = False
        if len(self._exceptions) < MOST_EXCEPTIONS:
            self._exceptions.append(entry)

    @property
    def is_open(self) -> bool:
        """Whether a raw traceback goes on with the next line."""
        return self._in_traceback or self._message_lines > 0

    @property
    def is_cut(self) -> bool:
        """Whether its traceback has not come to an exception yet."""
        return self._in_traceback and self._root is None

    @property
    def error(self) -> Entry:
        """The line that says what is wrong: the exception that a chain of them began with, or the first
        line."""
        return self._root or self.first

    @property
    def stops_a_server(self) -> bool:
        """Whether this looks like an end, and not like a record about one request."""
        return bool(self._exceptions) or self.first.level == "CRITICAL" or self.is_native

    @property
    def is_native(self) -> bool:
        """Whether the process crashed outside Python."""
        return not self.first.level and any(word in self.first.text for word in _NATIVE)

    def mentions(self, words: Sequence[str]) -> bool:
        """Whether one of the words stood in a line."""
        return not self._met.isdisjoint(words)

    def lines(self) -> list[Entry]:
        """The first and the last lines."""
        return [*self._head, *self._tail]


class Blocks:
    """Sorts entries into blocks, one at a time per process. `words` are those that the blocks look out for."""

    def __init__(self, words: frozenset[str] = frozenset()) -> None:
        self._words = words
        self.all: list[Block] = []
        self._current: dict[str, Block] = {}
        self._raw: Block | None = None
        self._silence = 0

    @property
    def full(self) -> bool:
        """Whether no more blocks are kept."""
        return len(self.all) >= MOST_BLOCKS

    @property
    def waiting(self) -> bool:
        """Whether lines that say nothing by themselves may belong to a block."""
        return self._raw is not None and self._raw.is_open and self._silence < PATIENCE

    def feed(self, entry: Entry, *, is_trouble: bool) -> Block | None:
        """The block that this line belongs to, None when it belongs to none. `is_trouble`: it may open
        one."""
        self._silence += 1
        if entry.level not in ("ERROR", "CRITICAL", ""):
            return None
        block = self._current.get(entry.process)
        if block is None or not self._goes_on(block, entry):
            if not (entry.level or is_trouble) or self.full:
                return None
            block = self._current[entry.process] = Block(entry, words=self._words)
            self.all.append(block)
        block.add(entry)
        if not entry.level:
            self._raw, self._silence = block, 0
        return block

    def _goes_on(self, block: Block, entry: Entry) -> bool:
        # Every line of a record repeats where it comes from; a raw traceback is known by its form.
        if entry.level:
            return (entry.level, entry.place) == (block.first.level, block.first.place)
        return not block.first.level and block.is_open and self._silence <= PATIENCE
