"""The verdicts of the three probes, on a clock that the test moves."""

from __future__ import annotations

import itertools

import pytest

from dsv4_deploy.plan.watch import Watch
from dsv4_deploy.serve.counters import Counters, Engine
from dsv4_deploy.serve.health import Health, Phase

WATCH = Watch(
    host="127.0.0.1",
    port=8081,
    poll_s=1,
    canary_period_s=10,
    canary_timeout_s=10,
    ready_window_s=30,
    stall_s=60,
    drain_s=30,
    restarts=0,
    passthrough=True,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(pending: int, position: float, engine: str = "0") -> Counters:
    return Counters({engine: Engine(pending, (position,))}, None, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    """A server that serves and has just been idle."""
    one = Health(WATCH, clock)
    one.enter(Phase.SERVING, "")
    one.saw(seen(0, 0))
    return one


def test_loading_and_warming_are_alive_but_neither_started_nor_ready(clock: Clock) -> None:
    health = Health(WATCH, clock)
    for phase in (Phase.LOADING, Phase.WARMING):
        health.enter(phase, "a step")
        clock.now += 10_000  # however long it takes
        assert not health.startup().ok
        assert "a step" in health.startup().reason
        assert not health.ready().ok
        assert health.live().ok


def test_a_server_that_is_stopped_while_it_loads_has_never_started(clock: Clock) -> None:
    health = Health(WATCH, clock)
    health.enter(Phase.STOPPING, "stopped while it was loading")
    assert not health.startup().ok
    assert health.live().ok


def test_an_idle_server_is_ready_as_long_as_canaries_come_back(health: Health, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 10
        assert health.canary_due()
        health.canary_sent()
        assert not health.canary_due()
        clock.now += 1
        health.canary_answered()
        assert health.ready().ok and health.live().ok and health.startup().ok


def test_a_busy_server_gets_no_canary_and_its_progress_is_its_health(health: Health, clock: Clock) -> None:
    for position in range(1, 200):
        clock.now += 5
        health.saw(seen(64, position))
        assert not health.canary_due()
        assert health.ready().ok and health.live().ok
        assert health.stalled_s() == 0


def test_a_busy_server_without_progress_is_first_not_ready_then_not_alive(
    health: Health, clock: Clock
) -> None:
    health.saw(seen(3, 1))
    clock.now += 30
    health.saw(seen(3, 1))
    assert health.ready().ok
    clock.now += 1
    assert not health.ready().ok
    assert health.live().ok
    clock.now += 30
    assert not health.live().ok
    assert "no progress for 61 s while 3 request(s) wait" in health.live().reason
    health.saw(seen(3, 2))
    assert health.live().ok and health.ready().ok


def test_a_hang_of_an_idle_server_is_found_by_canaries_within_the_bound(health: Health, clock: Clock) -> None:
    began = clock.now
    sent = []
    while health.live().ok:
        if health.canary_due():
            health.canary_sent()
            sent.append(clock.now)
        elif sent and clock.now - sent[-1] == WATCH.canary_timeout_s:
            health.canary_failed("no answer within 10 s")
        clock.now += 1
        health.saw(seen(0, 0))  # the counters of an engine that hangs stay as they were
        assert clock.now - began <= WATCH.hang_bound_s + 1
    assert "while 1 request(s) wait" in health.live().reason
    assert "no answer within 10 s" in health.ready().reason
    # One at a time and one per period, however long it hangs.
    assert all(later - sooner >= WATCH.canary_period_s for sooner, later in itertools.pairwise(sent))


def test_a_canary_that_waits_behind_sudden_load_is_no_evidence_of_a_hang(
    health: Health, clock: Clock
) -> None:
    clock.now += 10
    health.canary_sent()
    for position in range(1, 100):
        clock.now += 2
        health.saw(seen(20, position))
    health.canary_failed("no answer within 10 s")
    assert health.live().ok and health.ready().ok


def test_a_refused_canary_says_nothing(health: Health, clock: Clock) -> None:
    clock.now += 10
    health.canary_sent()
    health.canary_refused()
    assert not health.canary_due(), "not again at once"
    clock.now += 10
    assert health.canary_due()
    assert health.live().ok


def test_idle_for_long_is_not_stalled(health: Health, clock: Clock) -> None:
    health.saw(seen(2, 1))
    clock.now += 5
    health.saw(seen(0, 2))
    clock.now += 10_000
    health.saw(seen(0, 2))
    assert health.live().ok
    health.saw(seen(1, 2))  # a request has just come; its clock starts now
    assert health.stalled_s() == 0


def test_one_engine_of_several_that_hangs_is_seen(health: Health, clock: Clock) -> None:
    for position in range(1, 70):
        clock.now += 1
        health.saw(Counters({"0": Engine(5, (position,)), "1": Engine(5, (1.0,))}, None, None))
    assert not health.live().ok


def test_draining_is_not_ready_but_alive(health: Health) -> None:
    health.enter(Phase.DRAINING, "running requests are being finished")
    assert health.live().ok and health.startup().ok
    assert not health.ready().ok
    assert health.ready().reason == "draining: running requests are being finished"


def test_a_dead_engine_fails_all_three_with_its_cause(health: Health) -> None:
    health.died("vLLM's engine is dead")
    for verdict in (health.startup(), health.ready(), health.live()):
        assert not verdict.ok
        assert verdict.reason == "vLLM's engine is dead"
