"""What triage has to say about one log: the cause, where it stands, what to do; as text and as JSON.

In: the parts, found by `triage.search`. Out: text for people (cut to a number of bytes where a place is
small, such as Kubernetes' termination log) and a dictionary for programs.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

SCHEMA = 1
TERMINATION_LOG = pathlib.Path("/dev/termination-log")
TERMINATION_LIMIT = 4096
"""Bytes that Kubernetes keeps of a termination message:
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/"""
_CUT = "[cut here; the whole diagnosis: dsv4-deploy triage]"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the log. `number` counts newlines from 1, as editors and `sed -n 12p` do; `text` is without
    colours and control characters, shortened, and without anything that looks like a secret."""

    number: int
    text: str


@dataclasses.dataclass(frozen=True)
class Cause:
    """A known cause of failures. `id` is a number of the public failure log (F01) or one of this bundle's
    own (D01); `cause` and `fix` are sentences; `links` are public addresses."""

    id: str
    title: str
    cause: str
    fix: str
    links: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The answer for one log.

    `verdict`: "known" when a rule names the cause, "healthy" when vLLM reports no failure, else "unknown".
    `line` is the first real error, None where there is none; `speakers` are the processes that said the same;
    `excerpt` holds the few lines that matter. `possible` are causes that the same words can have as well.
    `notes` are facts that help: how far the server came, hints, what to look for next.
    """

    log: str
    verdict: Literal["known", "unknown", "healthy"]
    summary: str
    cause: Cause | None = None
    line: Line | None = None
    speakers: tuple[str, ...] = ()
    excerpt: tuple[Line, ...] = ()
    possible: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The number of the cause, or "unknown"."""
        return self.cause.id if self.cause else "unknown"

    def text(self, limit: int | None = None) -> str:
        """For people. With `limit` at most that many bytes of UTF-8, cut between lines where possible."""
        whole = "\n".join(self._lines()) + "\n"
        return whole if limit is None else _cut(whole, limit)

    def to_dict(self) -> dict[str, Any]:
        """For programs: plain values, the same as `text` says."""
        return {"schema": SCHEMA, "id": self.id, **dataclasses.asdict(self)}

    def _lines(self) -> list[str]:
        lines = [f"{self.id}: {self.summary}"]
        if self.line:
            lines.append(f"  line {self.line.number}: {self.line.text}")
        if len(self.speakers) > 1:
            lines.append(f"  said by: {_few(self.speakers)}")
        if self.cause:
            lines += _about(self.cause)
        for cause in self.possible:
            lines.append(f"  or {cause.id}: {cause.title}")
            lines += [f"  {line}" for line in _about(cause)]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {line.number:>6} | {line.text}".rstrip() for line in self.excerpt]
        return lines


def _about(cause: Cause) -> list[str]:
    return [f"  cause: {cause.cause}", f"  fix: {cause.fix}", *(f"  see: {link}" for link in cause.links)]


def _few(names: tuple[str, ...], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes, whole characters, whole lines where one fits, and a last line that says so."""
    encoded = text.encode("utf-8", errors="replace")
    if len(encoded) <= limit:
        return encoded.decode("utf-8")
    tail = f"{_CUT}\n"
    room = limit - len(tail)
    if room <= 0:
        return encoded[: max(0, limit)].decode("utf-8", errors="ignore")
    lines = encoded[:room].rpartition(b"\n")
    # A single endless line is cut inside, with room for the newline.
    kept = lines[0] + lines[1] or encoded[: room - 1] + b"\n"
    return kept.decode("utf-8", errors="ignore") + tail


def write_termination_log(diagnosis: Diagnosis, path: pathlib.Path = TERMINATION_LOG) -> bool:
    """Leave the diagnosis where Kubernetes shows it (`kubectl describe pod`); False when there is no such
    file. It is written in place, because Kubernetes mounts this one file. Raises OSError."""
    if not path.is_file():
        return False
    path.write_bytes(diagnosis.text(TERMINATION_LIMIT).encode("utf-8"))
    return True
