"""Finding: what one check found, and what a person should do about it.

In: what a check saw. Out: a value that prints as a line, as a block, or as JSON. The F and W numbers name
rows of the project's collection of public failures; `link` is one public place where it happened.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """`found` says what is there, with the value; `why` and `fix` are sentences and are empty when all is
    well. A `fail` would not work; a `warn` will, but not as well as it could."""

    check: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""
    refs: tuple[str, ...] = ()
    link: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, why: str, fix: str, *refs: str, link: str = "") -> Finding:
    return Finding(check, "warn", found, why, fix, refs, link)


def fail(check: str, found: str, why: str, fix: str, *refs: str, link: str = "") -> Finding:
    return Finding(check, "fail", found, why, fix, refs, link)
