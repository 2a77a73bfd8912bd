"""What the three probes answer, and why: a small state machine without a clock, a socket or a process.

In: what the supervisor sees (the child's phase, vLLM's counters, canaries) and the time. Out: Verdicts.
The rules, after https://github.com/gonka-ai/gonka/issues/1421 and
https://github.com/huggingface/text-generation-inference/pull/244: a busy server proves itself by its counters,
an idle one by a canary, and neither being busy nor loading is ever a reason to be killed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from dsv4_deploy.plan.watch import Watch
from dsv4_deploy.serve.counters import Counters


class Phase(enum.Enum):
    """Where a server is in its life."""

    LOADING = "loading"
    WARMING = "warming up"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A probe's answer: 200 or 503, and one sentence for people."""

    ok: bool
    reason: str


@dataclasses.dataclass
class _Engine:
    """One engine's counters at the last look, since when it has work, and when it last moved."""

    position: tuple[float, ...]
    pending: int
    busy_since: float | None
    moved: float


class Health:
    """The health of one life of vLLM. `clock` gives seconds that only grow."""

    def __init__(self, watch: Watch, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._last_good: float | None = None
        self._canary_sent: float | None = None
        self._canary_out = False
        self._unanswered_since: float | None = None
        self._canary_failure = ""
        self._started = False
        self.dead = ""
        self.phase = Phase.LOADING
        self.step = "vLLM has just been started"

    def enter(self, phase: Phase, step: str) -> None:
        """A new phase began; `step` says what it does, or why."""
        self.phase = phase
        self.step = step
        if phase is Phase.SERVING:
            # The warm-up has just got its answers.
            self._last_good = self._clock()
            self._started = True

    def died(self, reason: str) -> None:
        """The process has ended, or vLLM itself says that its engine is dead. A later, better reason replaces
        an earlier one."""
        self.dead = reason

    def saw(self, counters: Counters) -> None:
        """vLLM's counters were read."""
        now = self._clock()
        for name, seen in counters.engines.items():
            known = self._engines.get(name)
            if known is None:
                self._engines[name] = _Engine(seen.position, seen.pending, now if seen.pending else None, now)
                continue
            if seen.position != known.position:
                known.position, known.moved = seen.position, now
                self._last_good = now
                # Whatever the canary waits for, this engine is alive and at work.
                self._unanswered_since = None
            known.pending = seen.pending
            if not seen.pending:
                known.busy_since = None
            elif known.busy_since is None:
                known.busy_since = now

    def canary_sent(self) -> None:
        """A canary is on its way; until it is answered it counts as a running request."""
        self._canary_sent, self._canary_out = self._clock(), True
        if self._unanswered_since is None:
            self._unanswered_since = self._canary_sent

    def canary_answered(self) -> None:
        """It came back as it should."""
        self._canary_out, self._unanswered_since = False, None
        self._canary_failure = ""
        self._last_good = self._clock()

    def canary_failed(self, reason: str) -> None:
        """It did not, in time. The clock of a hang goes on from when the first of a row was sent."""
        self._canary_out = False
        self._canary_failure = reason

    def canary_refused(self) -> None:
        """The server is too full to take it, which says nothing about its health."""
        self._canary_out, self._unanswered_since = False, None

    def canary_due(self) -> bool:
        """True when the server is idle and has shown no sign of life for a canary period. At most one canary
        is out at a time, and at most one is sent per period."""
        if self.phase is not Phase.SERVING or self._canary_out or self.pending():
            return False
        period = self._watch.canary_period_s
        return self._age(self._last_good) >= period and self._age(self._canary_sent) >= period

    def pending(self) -> int:
        """Requests that the engines run or hold, at the last look."""
        return sum(engine.pending for engine in self._engines.values())

    def stalled_s(self) -> float:
        """For how long somebody has been waiting without any movement; 0 when all is well."""
        now = self._clock()
        waits = [
            now - max(engine.busy_since, engine.moved)
            for engine in self._engines.values()
            if engine.busy_since is not None
        ]
        if self._unanswered_since is not None:
            waits.append(now - self._unanswered_since)
        return max(waits, default=0.0)

    def stalled(self) -> bool:
        """True when that is longer than any healthy step takes."""
        watched = self.phase in (Phase.SERVING, Phase.DRAINING)
        return watched and self.stalled_s() > self._watch.stall_s

    def startup(self) -> Verdict:
        """/startupz: loaded, listed under its name, warmed up with sound answers; stays so afterwards."""
        if self.dead:
            return Verdict(False, self.dead)
        if not self._started:
            return Verdict(False, f"{self.phase.value}: {self.step}")
        return Verdict(True, "started")

    def ready(self) -> Verdict:
        """/readyz: an answer or a movement within the window, and not on the way out."""
        if self.dead:
            return Verdict(False, self.dead)
        if self.phase is not Phase.SERVING:
            return Verdict(False, f"{self.phase.value}: {self.step}")
        age = self._age(self._last_good)
        if age > self._watch.ready_window_s:
            last = f"; the last canary: {self._canary_failure}" if self._canary_failure else ""
            return Verdict(
                False,
                f"no answer and no progress for {age:.0f} s (limit {self._watch.ready_window_s:.0f} s){last}",
            )
        return Verdict(True, "serving")

    def live(self) -> Verdict:
        """/livez: 503 only when the process is gone, the engine is dead, or running requests do not move."""
        if self.dead:
            return Verdict(False, self.dead)
        if self.stalled():
            waiting = self.pending() or 1
            return Verdict(
                False,
                f"no progress for {self.stalled_s():.0f} s while {waiting} request(s) wait "
                f"(limit {self._watch.stall_s:.0f} s)",
            )
        return Verdict(True, self.phase.value)

    def _age(self, moment: float | None) -> float:
        return self._clock() - moment if moment is not None else float("inf")
