"""Ctrl-C, SIGTERM and a closed terminal as one exception, at a moment of our choosing.

The first signal raises Interrupted (unless held back); later ones only make `hurry()` true, so that cleaning
up is never cut short half-way but an impatient operator is heard.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The operator or the system asked this program to end. `exit_code` is 128 + the signal, as shells do."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interrupts:
    """Context manager that installs the handlers and puts the old ones back."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._count = 0
        self._held = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            # `nohup` and shells that start background jobs ignore some of these on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def hurry(self) -> bool:
        """True after a second signal: skip every wait."""
        return self._count > 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back while something must not be torn in two; raise at the end of the block if one
        came."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending is not None:
            number, self._pending = self._pending, None
            raise Interrupted(number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            return
        if self._held:
            self._pending = number
            return
        raise Interrupted(number)
