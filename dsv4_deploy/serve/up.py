"""`up`: from a ServingSpec to a running server that has answered the original request.

In: what is asked for. Out: the Answer, printed by the CLI. Like `docker compose up` it converges: what
already runs as asked is left alone, what runs otherwise is replaced, what has died is cleaned up and started
again. Until the first answer the server is ours to end: any failure or signal leaves nothing running and
nothing recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence

from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.plan.gather import gather
from dsv4_deploy.plan.plan import Plan, make_plan
from dsv4_deploy.plan.watch import STOP_LOADING_S, Watch
from dsv4_deploy.serve import child, command, postmortem, probe, procs, state, tiny_cache
from dsv4_deploy.serve.interrupts import Interrupts
from dsv4_deploy.serve.logfile import Tail, last_lines
from dsv4_deploy.serve.progress import Event, Progress, Stage
from dsv4_deploy.serve.report import Report
from dsv4_deploy.spec import ServingSpec
from dsv4_deploy.validate import completion

POLL_S = 0.2
# What the supervisor gets beyond what it gives vLLM, to find the last processes and end them.
SUPERVISOR_MARGIN_S = 20.0
# How long a dying server may take until its supervisor has named the cause and ended.
DEATH_S = 60.0


@dataclasses.dataclass(frozen=True)
class Result:
    """A server that has answered. `ready_s` is None when it was already running before."""

    record: state.Record
    answer: completion.Answer
    ready_s: float | None


def plan_for(spec: ServingSpec, *, dry_run: bool, report: Report) -> Plan:
    """Gather the facts and plan. A dry run reads only: it needs neither GPUs, nor vLLM, nor the tiny
    checkpoint.

    Raises DeployError.
    """
    facts = gather(spec, os.environ, dry_run=dry_run)
    plan = make_plan(spec, facts)
    if not dry_run:
        command.check(plan.device, os.environ)
        if plan.model == str(facts.tiny_directory):
            tiny_cache.ensure(facts.tiny_directory, report.note)
    return plan


def up(
    spec: ServingSpec,
    plan: Plan,
    watch: Watch,
    store: state.Store,
    report: Report,
    interrupts: Interrupts,
    timeout_s: float | None = None,
) -> Result:
    """Make the plan true and ask the server. `timeout_s` bounds the wait for readiness and for each answer.

    Raises DeployError when it cannot be done, Interrupted when a signal came.
    """
    launcher = command.launcher(os.environ)
    patience = timeout_s or float(plan.ready_timeout_s)

    def on_wait(holder: str) -> None:
        report.note(f"Another dsv4-deploy ({holder}) works on port {plan.port}; waiting for it.")

    with store.lock(plan.port, patience, on_wait) as locked:
        if not locked:
            raise DeployError(
                f"another dsv4-deploy still works on port {plan.port} after {patience:.0f} s",
                why="Only one at a time may change what runs on a port.",
                fix="Wait for it or end it, then try again.",
            )
        record = store.load(plan.port)
        if record is not None and record.is_running():
            if record.digest == digest(plan, launcher, watch):
                return _attach(record, store, report, interrupts, patience)
            _announce_replacement(record, [*launcher, *plan.argv], report)
            note_running_requests(record, report)
            end(record, store, stop_timeout(record), interrupts)
        elif record is not None:
            _clean_up_dead(record, store, report, interrupts)
        check_ports(plan, watch)
        record = new_record(spec, plan, watch, launcher, store)
        return _start(record, store, report, interrupts, patience)


def digest(plan: Plan, launcher: Sequence[str], watch: Watch) -> str:
    """A fingerprint of the whole deployment: with the same one there is nothing to change."""
    content = json.dumps([plan.digest(launcher), watch.to_dict()])
    return hashlib.sha256(content.encode()).hexdigest()


def new_record(
    spec: ServingSpec, plan: Plan, watch: Watch, launcher: Sequence[str], store: state.Store
) -> state.Record:
    """The record of a deployment that starts now, with a fresh log. Raises DeployError."""
    return state.new_record(
        instance=str(uuid.uuid4()),
        spec=spec.to_dict(),
        device=plan.device,
        served_name=plan.served_name,
        tp=plan.tp,
        port=plan.port,
        url=reachable_url(plan.host, plan.port),
        argv=(*launcher, *plan.argv),
        env=plan.environment,
        digest=digest(plan, launcher, watch),
        log=str(store.rotate_log(plan.port)),
        shutdown_timeout_s=plan.shutdown_timeout_s,
        ready_timeout_s=plan.ready_timeout_s,
        watch=watch.to_dict(),
        health_url=reachable_url(watch.host, watch.port),
    )


def stop_timeout(record: state.Record) -> float:
    """How long a deployment may take to end after SIGTERM, in seconds."""
    if not record.ready:
        return STOP_LOADING_S + SUPERVISOR_MARGIN_S
    return Watch(**record.watch).stop_bound_s(record.shutdown_timeout_s) + SUPERVISOR_MARGIN_S


def end(record: state.Record, store: state.Store, timeout_s: float, interrupts: Interrupts) -> list[int]:
    """Stop a server with everything it started and forget it; return the pids that had to be killed.

    A signal that comes meanwhile is raised when that is done. Raises DeployError when something survives.
    """
    with interrupts.held():
        # Tells an `up` that waits for this server, or follows it, that it is meant to end.
        with contextlib.suppress(DeployError):
            store.request_stop(record)
        killed = child.stop(record.instance, record.leader, timeout_s, interrupts.hurry)
        store.clear(record)
        return killed


def follow(record: state.Record, store: state.Store, interrupts: Interrupts, tail: Tail) -> None:
    """Copy the server's log to stdout until it ends. A signal stops the server and is passed on as
    Interrupted.

    Raises DeployError when the server dies by itself.
    """
    try:
        while record.is_running():
            _copy(tail)
            time.sleep(POLL_S)
        _copy(tail)
    except BaseException:
        end(record, store, stop_timeout(record), interrupts)
        raise
    if store.stop_requested(record):
        return
    end(record, store, 0, interrupts)
    raise _died(record, store)


def _copy(tail: Tail) -> None:
    for line in tail.lines():
        print(line, flush=True)


def _attach(
    record: state.Record, store: state.Store, report: Report, interrupts: Interrupts, patience: float
) -> Result:
    """Ask a server that already runs as wanted. It is not ours to end here, whatever happens."""
    report.note(f"Already running on port {record.port} (pid {record.pid}), exactly as asked; not restarted.")
    progress = Progress()
    progress.reached = Stage.LISTENING
    tail = Tail(store.log(record.port), from_end=True)
    try:
        with report.live("waiting for the server"):
            _wait_ready(record, store, progress, tail, report, time.monotonic() + patience)
        return Result(record, _ask(record, store, progress, report, patience), None)
    except DeployError:
        if not record.is_running():
            end(record, store, 0, interrupts)
        raise


def _start(
    record: state.Record,
    store: state.Store,
    report: Report,
    interrupts: Interrupts,
    patience: float,
) -> Result:
    progress = Progress()
    with _ours_until_answered(record, store, report, interrupts) as started:
        # Recorded before it exists: should this program be killed in between, the next one finds the server
        # by its marker.
        store.save(record)
        report.restart_clock()
        begun = time.monotonic()
        with interrupts.held():
            process = _start_supervisor(record, store)
            record = started.become(_with_pid(record, process.pid))
            store.save(record)
        _show(report, progress.reach(Stage.STARTED, f"supervisor pid {process.pid}, log {record.log}"))
        tail = Tail(pathlib.Path(record.log))
        with report.live("vLLM is starting"):
            _wait_ready(record, store, progress, tail, report, begun + patience, process)
        ready_s = time.monotonic() - begun
        record = started.become(store.load(record.port) or record)
        _show(report, progress.reach(Stage.READY))
        answer = _ask(record, store, progress, report, patience)
        started.keep()
    return Result(record, answer, ready_s)


def _start_supervisor(record: state.Record, store: state.Store) -> subprocess.Popen[bytes]:
    """The supervisor, in a session of its own, so that it lives on when this program has ended."""
    own_words = os.open(
        _supervisor_log(record, store), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
    )
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return child.start(
            [sys.executable, "-m", "dsv4_deploy.serve", str(record.port)],
            {},
            record.instance,
            stdout=nowhere,
            stderr=own_words,
        )
    finally:
        os.close(own_words)
        os.close(nowhere)


def _supervisor_log(record: state.Record, store: state.Store) -> pathlib.Path:
    return store.directory(record.port) / "supervisor.log"


class _Started:
    """The server that a failure must take down with it, until `keep` says that it may stay."""

    def __init__(self, record: state.Record) -> None:
        self.record = record
        self.kept = False

    def become(self, record: state.Record) -> state.Record:
        self.record = record
        return record

    def keep(self) -> None:
        self.kept = True


@contextlib.contextmanager
def _ours_until_answered(
    record: state.Record, store: state.Store, report: Report, interrupts: Interrupts
) -> Iterator[_Started]:
    started = _Started(record)
    try:
        yield started
    except BaseException:
        if not started.kept:
            end(started.record, store, STOP_LOADING_S + SUPERVISOR_MARGIN_S, interrupts)
            report.note("The server that was starting has been stopped; nothing of it is left.")
        raise


def _with_pid(record: state.Record, pid: int) -> state.Record:
    # Ours to reap, so even if it has ended by now its pid cannot belong to anybody else; then it has no
    # start time.
    identity = procs.identify(pid)
    return dataclasses.replace(record, pid=pid, start_ticks=identity.start_ticks if identity else 0)


def _wait_ready(
    record: state.Record,
    store: state.Store,
    progress: Progress,
    tail: Tail,
    report: Report,
    deadline: float,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Until /startupz says 200. `process` is the supervisor when this program started it."""
    while True:
        for line in tail.lines():
            _show(report, progress.feed(line))
        report.activity(progress.activity)
        if process:
            process.poll()  # one that has ended stays a zombie until it is asked
        if not record.is_running():
            if store.stop_requested(record):
                raise DeployError(
                    "the server was stopped while it was loading",
                    why="Somebody ran `dsv4-deploy down` meanwhile.",
                    fix="Run `dsv4-deploy up` again when that is settled.",
                )
            raise _died(record, store)
        started, reason = probe.verdict(record.health_url, "startup")
        if started:
            return
        if progress.reached is Stage.LISTENING:
            report.activity(reason)
        if time.monotonic() >= deadline:
            raise DeployError(
                f"the server was not ready in time; it came as far as: {_how_far(progress)}",
                why=f"{record.health_url}/startupz says: {reason}.",
                fix=f"Look at {record.log}. Where the machine is merely slow, give it longer: --timeout "
                "SECONDS.",
            )
        time.sleep(POLL_S)


def _how_far(progress: Progress) -> str:
    return progress.reached.name.lower().replace("_", " ") if progress.reached is not None else "nothing"


def _ask(
    record: state.Record, store: state.Store, progress: Progress, report: Report, patience: float
) -> completion.Answer:
    def on_first_token() -> None:
        _show(report, progress.reach(Stage.FIRST_TOKEN))

    with report.live("asking for a poem"):
        try:
            return completion.ask(record.url, patience, on_first_token)
        except DeployError:
            # A server that dies while it answers looks like a broken connection first; its supervisor's words
            # are better, and come when it has found them.
            deadline = time.monotonic() + DEATH_S
            time.sleep(1.0)
            while record.is_running() and not probe.verdict(record.health_url, "live")[0]:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_S)
            if not record.is_running():
                raise _died(record, store) from None
            raise


def _died(record: state.Record, store: state.Store) -> DeployError:
    """The error for a deployment that has ended by itself, in the words that its supervisor has left."""
    known = postmortem.read(store.directory(record.port) / "cause.json")
    if known is None:
        lines = []
        with contextlib.suppress(OSError):
            lines = last_lines(_supervisor_log(record, store), 12)
        return DeployError(
            "the supervisor ended without a word about vLLM",
            why="It was killed, or could not begin; its last lines are below.",
            fix=f"Look at {record.log}, then run `dsv4-deploy up` again.",
            detail="\n".join(lines),
        )
    how, text = known
    return DeployError(
        how, why="What its log gives as the cause is below.", fix=f"The whole log: {record.log}", detail=text
    )


def _announce_replacement(record: state.Record, argv: list[str], report: Report) -> None:
    old, new = _flags(list(record.argv)), _flags(argv)
    changes = [
        f"{name} {old.get(name, '(unset)')} -> {new.get(name, '(unset)')}"
        for name in [*old, *(name for name in new if name not in old)]
        if old.get(name) != new.get(name)
    ]
    report.note(
        f"Another deployment of ours runs on port {record.port} (pid {record.pid}); replacing it: "
        f"{', '.join(changes) or 'its environment differs'}."
    )


def _flags(argv: list[str]) -> dict[str, str]:
    """The command line as flag -> value, for comparing two of them; the words before the first flag are one
    item."""
    flags: dict[str, str] = {}
    name = "command"
    for word in argv:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            flags[name] = value or "on"
        else:
            flags[name] = word if flags.get(name, "on") == "on" else f"{flags[name]} {word}"
    return flags


def note_running_requests(record: state.Record, report: Report) -> None:
    """Say what a stop may have to wait for."""
    if busy := probe.requests_in_flight(record.url):
        wait = Watch(**record.watch).drain_s
        report.note(f"Waiting up to {wait:.0f} s for {busy} running request(s) to finish.")


def _clean_up_dead(record: state.Record, store: state.Store, report: Report, interrupts: Interrupts) -> None:
    left = procs.members(record.instance, record.leader)
    words = f"; ending {len(left)} of its processes that were left behind" if left else ""
    report.note(f"The server of an earlier run on port {record.port} (pid {record.pid}) has died{words}.")
    end(record, store, STOP_LOADING_S + SUPERVISOR_MARGIN_S, interrupts)


def check_ports(plan: Plan, watch: Watch) -> None:
    """Make sure that the server and its probes will be able to listen. Raises DeployError."""
    if watch.port == plan.port:
        raise refused(
            f"port {plan.port} cannot be both the server's and the health probes'",
            why="They are two programs.",
            fix="Use another --health-port.",
        )
    check_port(plan.host, plan.port)
    check_port(watch.host, watch.port, option="--health-port")


def check_port(address: str, port: int, option: str = "--port") -> None:
    """Make sure that a server will be able to listen there. Raises DeployError that names who has the port."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise refused(
            f"--host {address} is not an address", why=str(error), fix="Use 127.0.0.1, 0.0.0.0 or a name."
        ) from error
    with socket.socket(found[0], socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(found[4])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise DeployError(
                    f"cannot listen on {address} port {port}: {error.strerror}",
                    why="The address must belong to this machine, and ports below 1024 are for root.",
                    fix="Use another --host or --port.",
                ) from error
            raise DeployError(
                f"port {port} is in use by {procs.listener_on(port)}",
                why="dsv4-deploy did not start it (or no longer knows that it did), so it is left alone.",
                fix=f"Use another port: {option} N.",
            ) from error


def reachable_url(address: str, port: int) -> str:
    """Where this machine reaches a server that listens on `address`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _show(report: Report, event: Event | None) -> None:
    if event is not None:
        report.stage(event)
