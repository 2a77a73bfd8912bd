"""What happens to a server after `up` has returned: `down`, `status` and `logs`.

In: the state directory and a port. Out: sentences, rows and log lines. All of it also works when the server
or the `up` that started it has died in any way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Literal

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import probe, procs, state
from dsv4_deploy.serve.interrupts import Interrupts
from dsv4_deploy.serve.logfile import Tail, last_lines
from dsv4_deploy.serve.report import Report
from dsv4_deploy.serve.up import end, note_running_requests, stop_timeout

POLL_S = 0.2
# How long an `up` that is at work on the port gets to notice that its server was stopped, and to clean up.
OTHER_S = 60.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One recorded server. `uptime_s` is None unless it runs; "dead": its process is gone; "stale": its pid
    or boot belongs to something else now, and is left alone."""

    port: int
    model: str
    tp: int
    device: str
    pid: int | None
    state: Literal["loading", "ready", "dead", "stale"]
    uptime_s: float | None
    url: str
    log: str


def down(
    port: int, store: state.Store, report: Report, interrupts: Interrupts, timeout_s: float | None
) -> None:
    """Stop what runs on that port; when nothing does, say so. Raises DeployError when it cannot be stopped.

    `timeout_s` is how long the server may take to end by itself before it is killed (None: what it was
    started with).
    """
    if not store.directory(port).exists():
        report.note(_nothing(port, store))
        return
    deadline = time.monotonic() + OTHER_S
    while True:
        # An `up` holds the lock while it waits for its server. It must not keep `down` waiting: end the
        # server under its hands; it notices, cleans up and lets go.
        with store.lock(port, 0, lambda _holder: None) as locked:
            record = store.load(port)
            if record is not None and (locked or record.is_running()):
                _stop(record, store, report, interrupts, timeout_s)
                return
            if locked:
                report.note(_nothing(port, store))
                return
        if time.monotonic() > deadline:
            raise DeployError(
                f"another dsv4-deploy has been working on port {port} for {OTHER_S:.0f} s without starting "
                "a server",
                why="It may be writing a checkpoint or waiting for requests to finish.",
                fix="End it with Ctrl-C, or try again.",
            )
        time.sleep(POLL_S)


def status(store: state.Store) -> list[Row]:
    """A row per recorded server, by port."""
    return [_row(record) for port in store.ports() if (record := store.load(port)) is not None]


def logs(port: int, store: state.Store, lines: int, follow: bool) -> Iterator[str]:
    """The last lines of the server's log; with `follow` also those to come, until the server has ended.

    Raises DeployError when nothing has run on that port yet.
    """
    path = store.log(port)
    try:
        tail = Tail(path, from_end=True)
        yield from last_lines(path, lines)
    except FileNotFoundError:
        raise DeployError(
            f"there is no log for port {port}",
            why="No server was started on that port by this user.",
            fix=_others(port, store) or "Start one: dsv4-deploy up",
        ) from None
    while follow:
        record = store.load(port)
        yield from tail.lines()
        if record is None or not record.is_running():
            return
        time.sleep(POLL_S)


def _stop(
    record: state.Record,
    store: state.Store,
    report: Report,
    interrupts: Interrupts,
    timeout_s: float | None,
) -> None:
    row = _row(record)
    patience = stop_timeout(record) if timeout_s is None else timeout_s
    if row.state == "ready":
        note_running_requests(record, report)
    with report.live(f"stopping the server on port {record.port}"):
        ended = end(record, store, patience, interrupts)
    rest = f"; ended {len(ended)} process(es) that it had left behind" if ended else ""
    if row.state == "stale":
        report.note(
            f"The server on port {record.port} is long gone{rest}. Its pid {record.pid} belongs to "
            "something else now, which was left alone."
        )
    elif row.state == "dead":
        report.note(f"The server on port {record.port} had already died{rest}.")
    elif ended:
        report.note(f"Stopped the server on port {record.port}; {len(ended)} process(es) had to be killed.")
    else:
        report.note(f"Stopped the server on port {record.port}.")


def _row(record: state.Record) -> Row:
    if record.is_running():
        condition: Literal["loading", "ready", "dead", "stale"] = (
            "ready" if probe.verdict(record.health_url, "startup")[0] else "loading"
        )
    elif record.boot_id != procs.boot_id() or (record.leader and procs.is_taken_over(record.leader)):
        condition = "stale"
    else:
        condition = "dead"
    return Row(
        port=record.port,
        model=record.served_name,
        tp=record.tp,
        device=record.device,
        pid=record.pid,
        state=condition,
        uptime_s=max(0.0, time.time() - record.created) if record.is_running() else None,
        url=record.url,
        log=record.log,
    )


def _nothing(port: int, store: state.Store) -> str:
    return f"Nothing is running on port {port}. {_others(port, store)}".rstrip()


def _others(port: int, store: state.Store) -> str:
    others = [str(other) for other in store.ports() if other != port]
    return f"There is a server on port {', '.join(others)} (use --port)." if others else ""
