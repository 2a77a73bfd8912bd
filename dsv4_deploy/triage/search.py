"""Finds the cause in a log: goes through its telling lines once, and then weighs what they say.

In: a binary stream, the rules, and what the caller knows besides (exit code, how long the log has been
silent). Out: a `Diagnosis`. What counts, in this order: the first line that a rule knows as a cause; the
first failure that no rule knows but that stops a server; a known way to end; any other error; lines that only
say that something else failed; hints. A file with several starts of vLLM is judged by its last one.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence
from typing import BinaryIO, Literal

from dsv4_deploy.serve.progress import TITLES, Progress, Stage
from dsv4_deploy.triage.blocks import Block, Blocks
from dsv4_deploy.triage.diagnosis import Cause, Diagnosis, Line
from dsv4_deploy.triage.lines import Entry, Parser, Reader, shown
from dsv4_deploy.triage.rules import Book, Kind, Rule, fits, holds, repeated_word

# Signs of vLLM's own process names, places and words; "vllm" alone also stands in a proxy's log. Plain words, and a
# pattern that begins with one character: both are found fast in what is not a log of vLLM and 200 MB long.
_VLLM_WORDS = (
    b"VLLM::", b"vllm/v1/", b"vLLM API server", b"vllm: error:", b"vllm serve: error:", b"rocm_patches ",
    b"[api_server.py:", b"[api_utils.py:", b"[core.py:", b'"vllm.',
)  # fmt: skip
_VLLM_PROCESS = re.compile(rb"\((?:APIServer|EngineCore|Worker|VllmWorker|RayWorker)[\w ]* pid=\d+[,)]")
_SGLANG_WORDS = (b"sglang/srt", b"sglang.srt", b"SGLang")
_QUIET_LEVELS = ("DEBUG", "INFO", "WARNING")
_EXIT_CODE = re.compile(r"exit code:? (-?\d+)")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")
MOST_SPEAKERS = 64
MOST_MATCHES = 64
EXCERPT_BEFORE, EXCERPT_AFTER, LAST_LINES = 5, 2, 6
TAIL_BYTES = 16 << 10


@dataclasses.dataclass
class _Match:
    """The first line that fits a rule, and who else said so."""

    rule: Rule
    entry: Entry
    block: Block | None = None
    speakers: dict[str, None] = dataclasses.field(default_factory=dict)
    count: int = 0


class _Run:
    """What one start of vLLM has said so far."""

    def __init__(self, nearby: frozenset[str]) -> None:
        self.blocks = Blocks(nearby)
        self.matches: dict[str, _Match] = {}
        # The last line of `after` of each rule that holds right now.
        self.open: dict[str, Entry] = {}
        self.progress = Progress()
        self.stopping: Entry | None = None

    def of(self, kind: Kind) -> list[_Match]:
        """What matched, the earliest line first."""
        found = [match for match in self.matches.values() if match.rule.kind == kind]
        return sorted(found, key=lambda match: match.entry.number)

    @property
    def failed(self) -> bool:
        return bool(self.blocks.all or self.of("cause") or self.of("ending") or self.of("consequence"))

    @property
    def reached(self) -> Stage:
        return Stage.STARTED if self.progress.reached is None else self.progress.reached


class Search:
    """Goes through one log. `feed` it, then ask for the `diagnosis`. `facts` are sentences about the machine,
    which count as if each start of vLLM had written them first."""

    def __init__(self, book: Book, facts: Sequence[str] = ()) -> None:
        self._book = book
        self._facts = facts
        self._parser = Parser()
        self._runs = [self._new_run()]
        self._is_vllm = False
        self._is_sglang = False
        self._tail = self._piece = b""
        self._lines = 0
        self.hints: dict[str, _Match] = {}
        # Those whose further lines are only counted, by a word.
        self._repeats: dict[str, bytes] = {}

    def _new_run(self) -> _Run:
        run = _Run(self._book.nearby)
        for fact in self._facts:
            for rule in self._book.rules:
                if holds(rule.after, fact):
                    run.open[rule.about.id] = Entry(0, "", "", "", fact)
        return run

    def feed(self, stream: BinaryIO) -> None:
        """Read the log to its end. Memory does not grow with it."""
        reader = Reader(stream, self._book.wanted(), self._look)
        state = (False, 0)
        for number, line in reader:
            self._begin(line)
            rules = self._book.candidates(line)
            for entry in self._parser.entries(number, line):
                self._take(entry, rules)
            blocks = self._runs[-1].blocks
            reader.every = blocks.waiting
            if (kept := (blocks.full, len(self._repeats))) != state:
                # When enough failures are kept, what no rule knows is not even looked at; and there may be
                # millions of lines that say again what a hint has said.
                state = kept
                reader.wanted = self._book.wanted(not blocks.full, frozenset(self._repeats))
        self._lines = reader.lines

    def _look(self, piece: bytes) -> None:
        if not self._is_vllm:
            self._is_vllm = any(word in piece for word in _VLLM_WORDS) or bool(_VLLM_PROCESS.search(piece))
            self._is_sglang |= any(word in piece for word in _SGLANG_WORDS)
        self._tail = (self._tail + piece[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._piece = piece
        for number, word in self._repeats.items():
            self.hints[number].count += piece.count(word)

    def _begin(self, line: bytes) -> None:
        """Start a new run where this line is the first of one."""
        raw = line.decode("utf-8", errors="replace")
        if holds(self._book.start, raw) and (
            self._runs[-1].failed or self._runs[-1].reached >= Stage.LOADING
        ):
            self._runs.append(self._new_run())
            # The first failed one and the last two are enough to judge by.
            self._runs = self._runs[:1] + self._runs[-2:] if len(self._runs) > 3 else self._runs

    def _take(self, entry: Entry, rules: Sequence[Rule]) -> None:
        run = self._runs[-1]
        quiet = entry.level in _QUIET_LEVELS
        if quiet or not entry.level:
            run.progress.feed(entry.text)
        if run.stopping is None and holds(self._book.stopping, entry.text):
            run.stopping = entry
        if run.stopping is not None:
            return
        block = run.blocks.feed(entry, is_trouble=holds(self._book.trouble, entry.text))
        for rule in rules:
            if rule.after and holds(rule.after, entry.text):
                run.open[rule.about.id] = entry
            elif rule.until and holds(rule.until, entry.text):
                run.open.pop(rule.about.id, None)
            if fits(rule, entry.text) and (rule.kind == "hint" or not quiet):
                self._match(run, rule, entry, block)

    def _match(self, run: _Run, rule: Rule, entry: Entry, block: Block | None) -> None:
        if rule.after and rule.about.id not in run.open:
            return
        if rule.nearby and (block is None or not block.mentions(rule.nearby)):
            return
        # Hints belong to the log, everything else to one start of vLLM.
        matches = self.hints if rule.kind == "hint" else run.matches
        match = matches.setdefault(rule.about.id, _Match(rule, entry, block))
        if word := repeated_word(rule):
            if rule.about.id not in self._repeats:
                self._repeats[rule.about.id] = word
                match.count = self._piece.count(word)
        else:
            match.count += 1
        if len(match.speakers) < MOST_SPEAKERS and entry.process:
            match.speakers[entry.process] = None
        if block is not None and len(block.known) < MOST_MATCHES:
            block.known.add((rule.about.id, entry.number))

    def diagnosis(self, log: str, exit_code: int | None, quiet_s: float, running: Sequence[str]) -> Diagnosis:
        """Weigh what was found. `quiet_s` is for how many seconds the log has not grown, `running` the names
        of the programs that run here now."""
        run = self._runs[-1]
        notes = []
        if not run.failed and run.reached < Stage.LISTENING and len(self._runs) > 1:
            notes.append("A later start in this log has not failed so far; this is about the one before it.")
            run = self._runs[-2]
        elif len(self._runs) > 1:
            notes.append("This log holds several starts of vLLM; this is about the last one.")
        self._check_the_end(run, exit_code, quiet_s, running, notes)
        return _Verdict(self, run, log, exit_code, notes).give()

    def _check_the_end(
        self, run: _Run, exit_code: int | None, quiet_s: float, running: Sequence[str], notes: list[str]
    ) -> None:
        """Rules about a log that simply stops."""
        for rule in self._book.rules:
            last = run.open.get(rule.about.id)
            if last is None:
                continue
            if exit_code in rule.exit_codes:
                run.matches.setdefault(rule.about.id, _Match(rule, last))
            elif rule.quiet_s:
                busy = [name for name in running if name.startswith(rule.unless_running)]
                if quiet_s >= rule.quiet_s and not busy:
                    run.matches.setdefault(rule.about.id, _Match(rule, last))
                else:
                    why = f"{busy[0]} runs" if busy else f"silent for {quiet_s:.0f} of {rule.quiet_s} s"
                    notes.append(f"Line {last.number} began something that has not ended ({why}).")

    @property
    def is_vllm(self) -> bool:
        return self._is_vllm

    @property
    def is_sglang(self) -> bool:
        return self._is_sglang and not self._is_vllm

    @property
    def book(self) -> Book:
        return self._book

    def last_lines(self) -> tuple[Line, ...]:
        """The last lines that say something."""
        lines = re.split(rb"\n", self._tail.removesuffix(b"\n"))
        first = self._lines - len(lines) + 1
        entries = [
            entry
            for at, line in enumerate(lines)
            for entry in self._parser.entries(first + at, line.rstrip(b"\r").rpartition(b"\r")[2])
        ]
        return tuple(_line(entry) for entry in entries if entry.text.strip())[-LAST_LINES:]


class _Verdict:
    """The answer about one run."""

    def __init__(self, search: Search, run: _Run, log: str, exit_code: int | None, notes: list[str]) -> None:
        self._search = search
        self._run = run
        self._log = log
        self._exit_code = exit_code
        self._notes = notes
        self._unknown = [block for block in run.blocks.all if not self._explained(block)]

    def give(self) -> Diagnosis:
        """What counts most."""
        fatal = [block for block in self._unknown if block.stops_a_server]
        plain = [block for block in self._unknown if not block.stops_a_server]
        if causes := self._known("cause"):
            return self._by_rule(causes[0], others=causes[1:], earlier=fatal)
        endings = self._known("ending")
        if fatal:
            return self._by_block(self._worst(fatal), endings)
        if endings:
            return self._by_rule(endings[0], others=endings[1:], earlier=plain)
        if plain:
            return self._by_block(self._worst(plain), [])
        if consequences := self._known("consequence"):
            return self._by_consequence(consequences[0])
        # A server that never listened has another problem than what a hint says.
        idle = self._run.reached < Stage.LISTENING and not self._run.stopping and self._search.is_vllm
        if (hints := self._known("hint")) and not idle:
            return self._by_rule(hints[0], others=hints[1:], earlier=[])
        return self._by_silence()

    def _known(self, kind: Kind) -> list[_Match]:
        if kind == "hint":
            # None of them came first in any sense; the file says which matters most.
            hints = self._search.hints
            found = [hints[rule.about.id] for rule in self._search.book.rules if rule.about.id in hints]
        else:
            found = self._run.of(kind)
        return [match for match in found if self._counts(match.rule)]

    def _counts(self, rule: Rule) -> bool:
        return self._search.is_vllm or rule.anywhere

    def _explained(self, block: Block) -> bool:
        """Whether a rule knows this failure. How it ended explains it only when that is all it says."""
        rules = [(self._search.book.rule(number), line) for number, line in block.known]
        return any(
            self._counts(rule) and (rule.kind not in ("ending", "consequence") or line == block.error.number)
            for rule, line in rules
        )

    def _by_rule(self, match: _Match, others: list[_Match], earlier: list[Block]) -> Diagnosis:
        rule, entry = match.rule, match.entry
        before = [block for block in earlier if block.first.number < entry.number]
        if before:
            error = before[0].error
            self._note(
                f"An error that no rule knows stands before it, line {error.number}: {shown(error.text)}"
            )
        for other in others:
            self._note(
                f"Also in this log, line {other.entry.number}: {other.rule.about.id}, {other.rule.about.title}."
            )
        if rule.ask:
            self._note(rule.ask)
        if code := _EXIT_CODE.search(entry.text):
            self._explain_exit(int(code[1]))
        if rule.kind == "hint" and match.count > 1:
            self._note(f"{match.count} lines say so; this is the first.")
        possible = tuple(self._search.book.rule(number).about for number in rule.possible)
        excerpt = _around(match.block, entry) if match.block else (_line(entry),)
        return self._answer(
            "known", rule.about.title, rule.about, entry, tuple(match.speakers), excerpt, possible
        )

    def _by_block(self, block: Block, endings: list[_Match]) -> Diagnosis:
        error = block.error
        same = [other for other in self._unknown if _alike(other.error.text, error.text)]
        speakers = tuple(dict.fromkeys(other.error.process for other in same if other.error.process))
        if block.is_cut:
            self._note("The log ends inside this traceback; the exception at its end is missing.")
        code = _EXIT_CODE.search(error.text)
        if code:
            self._explain_exit(int(code[1]))
        self._explain_exit(self._exit_code)
        possible = tuple(match.rule.about for match in endings)
        kind = "the first failure in this log" if block.stops_a_server else "the first error in this log"
        return self._answer(
            "unknown", f"no rule knows {kind}", None, error, speakers, _around(block, error), possible
        )

    def _by_consequence(self, match: _Match) -> Diagnosis:
        excerpt = _around(match.block, match.entry) if match.block else (_line(match.entry),)
        return self._answer("unknown", match.rule.about.title, None, None, (), excerpt, (match.rule.about,))

    def _by_silence(self) -> Diagnosis:
        self._explain_exit(self._exit_code)
        verdict: Literal["unknown", "healthy"] = "unknown"
        if not self._search.is_vllm:
            summary = "this does not look like a log of vLLM, and no rule knows anything in it"
        elif self._run.stopping:
            verdict, summary = "healthy", "no failure in this log; vLLM was told to end"
        elif self._exit_code:
            summary = f"no error in this log; the process ended with exit code {self._exit_code}"
        elif self._run.reached >= Stage.LISTENING:
            verdict, summary = "healthy", "no failure in this log; the server was listening"
        else:
            summary = "no error in this log; it ends before the server was listening"
        return self._answer(verdict, summary, None, None, (), self._search.last_lines(), ())

    def _answer(
        self,
        verdict: Literal["known", "unknown", "healthy"],
        summary: str,
        cause: Cause | None,
        entry: Entry | None,
        speakers: tuple[str, ...],
        excerpt: tuple[Line, ...],
        possible: tuple[Cause, ...],
    ) -> Diagnosis:
        for match in self._known("hint"):
            if match.rule.about is not cause:
                lines = "1 line" if match.count == 1 else f"{match.count} lines"
                self._note(
                    f"{match.rule.about.id}, {match.rule.about.title} ({lines}, first {match.entry.number}); "
                    "not the cause of a failure."
                )
        if self._search.is_sglang:
            self._note("This looks like a log of SGLang; this bundle serves with vLLM.")
        if self._search.is_vllm and self._run.progress.reached is not None:
            self._note(f"It came as far as: {TITLES[self._run.reached]}.")
        return Diagnosis(
            log=self._log,
            verdict=verdict,
            summary=summary,
            cause=cause,
            line=_line(entry) if entry else None,
            speakers=speakers,
            excerpt=excerpt,
            possible=possible,
            notes=tuple(self._notes),
        )

    def _worst(self, blocks: list[Block]) -> Block:
        """The earliest; where the engine failed, the earliest of the engine, its workers or a native crash:
        the API server also reports requests that failed by themselves."""
        engine = [block for block in blocks if block.is_native or "APIServer" not in block.first.process]
        return (engine if self._known("consequence") and engine else blocks)[0]

    def _explain_exit(self, code: int | None) -> None:
        number = -code if code and code < 0 else code - 128 if code and code > 128 else None
        if number not in {one.value for one in signal.Signals}:
            return
        name = signal.Signals(number).name
        meaning = {
            "SIGKILL": "somebody, or the kernel when memory ran out (`dmesg` tells), killed it",
            "SIGSEGV": "it crashed outside Python",
            "SIGABRT": "a library gave up and ended it",
            "SIGBUS": "it crashed outside Python; a full /dev/shm does that",
        }.get(name, "a signal ended it")
        self._note(f"Exit code {code} is {name}: {meaning}.")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _alike(one: str, other: str) -> bool:
    """Whether two errors differ in numbers only, such as the rank or an address."""
    return one == other or _CHANGING.sub("N", one) == _CHANGING.sub("N", other)


def _line(entry: Entry) -> Line:
    speaker = f"({entry.process}) " if entry.process else ""
    return Line(entry.number, shown(f"{speaker}{entry.text}"))


def _around(block: Block, entry: Entry) -> tuple[Line, ...]:
    """The lines of a block that matter: how it begins, and what stands around the error."""
    entries = block.lines()
    at = entries.index(entry) if entry in entries else 0
    chosen = [entries[0], *entries[max(1, at - EXCERPT_BEFORE) : at + 1 + EXCERPT_AFTER]]
    # Python underlines the part of a line that it means; that says little on its own.
    return tuple(_line(one) for one in chosen if one.text.strip(" ^~"))
