"""How `up` talks while it works: a live line on a terminal, one plain line per stage everywhere else.

In: stages, activities and notes. Out: text on stderr, so that stdout holds the answer alone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from dsv4_deploy.serve.progress import TITLES, Event


class Report:
    """Plain text, one line per stage, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """One line for people that belongs to no stage."""
        self._print(text)

    def restart_clock(self) -> None:
        """Count seconds from now on."""
        self._started = time.monotonic()

    def stage(self, event: Event) -> None:
        """A stage was reached."""
        detail = f" ({event.detail})" if event.detail else ""
        self._print(f"[{self._seconds():6.1f} s] {TITLES[event.stage]}{detail}")

    def activity(self, text: str) -> None:
        """What happens right now; shown on a terminal only."""

    @contextlib.contextmanager
    def live(self, text: str) -> Iterator[None]:
        """While something is waited for. `text` says what."""
        yield

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveReport(Report):
    """The same lines, with a moving line below them that shows what is going on and for how long."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._status: Any = None
        self._text = ""

    def activity(self, text: str) -> None:
        if self._status is not None:
            shown = f"{self._text}: {text}" if text else self._text
            self._status.update(f"{shown} ({self._seconds():.0f} s)")

    @contextlib.contextmanager
    def live(self, text: str) -> Iterator[None]:
        self._text = text
        with self._console.status(text) as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def _print(self, text: str) -> None:
        # Model names and log lines may hold square brackets, which rich would read as markup.
        self._console.print(text, markup=False, soft_wrap=True)


def report() -> Report:
    """The one that fits where stderr goes."""
    return LiveReport() if sys.stderr.isatty() else Report()
