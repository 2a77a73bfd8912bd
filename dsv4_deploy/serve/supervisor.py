"""The process above vLLM: starts it, watches it, answers the probes, drains it, names the cause when it dies.

In: a Record (what to start) and a Watch (how to watch it), signals. Out: an exit code, and on the way the side
port, vLLM's output on stdout and in vllm.log, the cause of a death in cause.json and in Kubernetes' termination
log. It is an asyncio program with one rule: nothing that the probes need ever waits for vLLM.

Exit codes: 0 stopped as asked and no request was cut off; 1 vLLM died, hung or never became sound;
3 stopped as asked, but requests were still running at the deadline; 128 + N a second signal N hurried it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import httpx

from dsv4_deploy.errors import FAILED, DeployError
from dsv4_deploy.plan.watch import STOP_LOADING_S, STOP_MARGIN_S, Watch
from dsv4_deploy.serve import (
    canary,
    child,
    endpoints,
    postmortem,
    priority,
    probe,
    procs,
    reaper,
    segments,
    state,
    warmup,
)
from dsv4_deploy.serve.counters import Counters, parse
from dsv4_deploy.serve.exporter import Exporter
from dsv4_deploy.serve.health import Health, Phase
from dsv4_deploy.serve.output import Notes, Pump, RotatingFile

if TYPE_CHECKING:
    import subprocess

DRAINED = 0
CUT_OFF = 3
# rocm_patches/admission.py refuses new requests once the file that this variable names exists.
DRAIN_FLAG = "DSV4_DRAIN_FLAG"

LOADING_POLL_S = 0.5
DRAIN_POLL_S = 0.25
# One look may take this long before it counts as unanswered: a saturated API server is slow, not dead
# (https://github.com/vllm-project/vllm/issues/38157 saw 40 s).
POLL_TIMEOUT_S = 60.0
# What reading something else than a list of models raises.
_NO_LIST = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
WARM_UP_ATTEMPTS = 3
WARM_UP_PAUSE_S = 2.0
# vLLM's API server notices a dead engine within 5 s and ends; one that does not is ended.
DEAD_ENGINE_S = 30.0
# A probe that comes every second shall see the cause before the supervisor is gone.
LINGER_S = 2.0
RESTART_PAUSE_S = 2.0
# What vLLM's processes have still to say arrives at once when they have ended.
PUMP_S = 5.0
NOTES_S = 5.0
SEGMENTS_LOADING_S = 5.0
SEGMENTS_SERVING_S = 60.0
# A thread that looks through /proc must not hold up an answer by Python's usual 5 ms.
SWITCH_INTERVAL_S = 0.0005


class _FailedError(Exception):
    """vLLM runs, but is of no use: its warm-up is not sound, it hangs, or its engine is dead."""


@dataclasses.dataclass
class _Life:
    """One run of vLLM."""

    process: subprocess.Popen[bytes]
    leader: procs.Identity | None
    pump: Pump
    ended: asyncio.Event


class Supervisor:
    """Runs one deployment from start to end. `passed_on` is where vLLM's output goes besides the log."""

    def __init__(
        self,
        record: state.Record,
        watch: Watch,
        store: state.Store,
        file: RotatingFile,
        shared_memory: segments.Segments,
        *,
        passed_on: int | None,
        termination_log: pathlib.Path,
    ) -> None:
        self._record = record
        self._watch = watch
        self._store = store
        self._file = file
        self._note = Notes(file)
        self._passed_on = passed_on
        self._termination_log = termination_log
        self._flag = store.directory(record.port) / "draining"
        self._cause = store.directory(record.port) / "cause.json"
        self._health = Health(watch, time.monotonic)
        self._exporter = Exporter(passthrough=watch.passthrough)
        self._segments = shared_memory
        self._life: _Life | None = None
        self._left_behind = False
        self._signals: list[int] = []
        self._stop = asyncio.Event()

    async def run(self, listener: socket.socket) -> int:
        """Serve until it is over; `listener` is the bound side port. Returns the exit code."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        priority.prefer_short_turns()
        reaper.adopt_orphans()
        self._install_signals()
        if removed := segments.clean():
            self._note(f"removed shared memory that a crashed server had left: {', '.join(removed)}")
        application = endpoints.application(
            {
                "/startupz": lambda: self._health.startup(),
                "/readyz": lambda: self._health.ready(),
                "/livez": lambda: self._health.live(),
            },
            lambda: self._exporter.body(self._health),
        )
        async with endpoints.serving(application, listener):
            self._note(f"health on {self._record.health_url}: /startupz /readyz /livez /metrics")
            try:
                return await self._lives()
            finally:
                self._tell_removed(await asyncio.to_thread(self._segments.close))
                await asyncio.to_thread(self._note.close, NOTES_S)

    def _tell_removed(self, names: list[str]) -> None:
        if names:
            self._note(f"removed shared memory that vLLM had left: {', '.join(names)}")

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # `nohup` and shells that start background jobs ignore some of these on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._asked_to_stop, number)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._pass_on, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def _asked_to_stop(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self._note(f"{signal.Signals(number).name} again: stopping at once")
            return
        self._note(f"{signal.Signals(number).name}: no new requests from now on")
        # Both at once and before anything else: the door is shut, and /readyz says so.
        with contextlib.suppress(OSError):
            self._flag.touch()
        if self._health.phase in (Phase.WARMING, Phase.SERVING):
            self._health.enter(Phase.DRAINING, "running requests are being finished")
        self._stop.set()

    def _pass_on(self, number: int) -> None:
        if self._life and self._life.leader:
            procs.send(self._life.leader, signal.Signals(number))

    def _reap(self) -> None:
        reaper.reap(self._life.process if self._life else None)
        if self._life and self._life.process.returncode is not None:
            self._life.ended.set()

    def _hurried(self) -> bool:
        return len(self._signals) > 1

    async def _lives(self) -> int:
        for left in range(self._watch.restarts, -1, -1):
            code = await self._one_life()
            if code is not None:
                return code
            if not left or self._stop.is_set() or self._left_behind:
                return FAILED
            self._note(
                f"starting vLLM again in {RESTART_PAUSE_S:.0f} s; {left - 1} restart(s) left after this"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), RESTART_PAUSE_S)
            if self._stop.is_set():
                return DRAINED
            self._exporter.restarts.inc()
            self._health = Health(self._watch, time.monotonic)
        return FAILED

    async def _one_life(self) -> int | None:
        """From start to end of one vLLM. An exit code, or None when it died."""
        self._flag.unlink(missing_ok=True)
        self._cause.unlink(missing_ok=True)
        self._file.start_over()
        life = self._life = self._start()
        watching = asyncio.create_task(self._watch_over())
        try:
            await _first(life.ended.wait(), self._stop.wait(), watching)
            if self._stop.is_set() and not life.ended.is_set() and not watching.done():
                watching.cancel()
                return await self._drain(life)
            if life.ended.is_set():
                died = f"{self._health.dead}; then vLLM ended" if self._health.dead else "vLLM died"
                raise _FailedError(f"{died}: {postmortem.how(life.process.returncode)}")
            await watching
        except _FailedError as failure:
            await self._died(life, str(failure))
        except BaseException:
            # A mistake of ours must not leave a server behind.
            await self._end_group(life, 0.0)
            raise
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            self._exporter.vllm(b"")
        return None

    def _start(self) -> _Life:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            process = child.start(
                self._record.argv,
                {**self._record.env, DRAIN_FLAG: str(self._flag)},
                self._record.instance,
                stdout=writing,
                stderr=writing,
                tethered=True,
                inherit=[self._segments.descriptor],
            )
        finally:
            os.close(writing)
        pump = Pump(reading, self._file, self._passed_on)
        pump.start()
        self._note(f"vLLM started, pid {process.pid}")
        return _Life(process, procs.identify(process.pid), pump, asyncio.Event())

    # --- watching ------------------------------------------------------------------------------------

    async def _watch_over(self) -> None:
        """Ask vLLM until cancelled. Raises _FailedError when it is beyond help."""
        client = httpx.AsyncClient(
            base_url=self._record.url, headers=probe.auth_headers(), trust_env=False, timeout=POLL_TIMEOUT_S
        )
        try:
            async with client, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._note_segments())
                length = await self._until_listening(client)
                await self._warm_up(client, length)
                tasks.create_task(self._canaries(client))
                await self._looks(client)
        except ExceptionGroup as group:
            if failed := group.subgroup(_FailedError):
                raise failed.exceptions[0] from None
            raise

    async def _until_listening(self, client: httpx.AsyncClient) -> int:
        """Wait until vLLM answers and lists the model; the longest request that it takes, in tokens."""
        while True:
            await asyncio.sleep(LOADING_POLL_S)
            with contextlib.suppress(httpx.HTTPError, *_NO_LIST):
                if (await client.get("/health")).status_code != 200:
                    continue
                answer = await client.get("/v1/models")
                if answer.status_code in (401, 403):
                    raise _FailedError("vLLM wants another API key than VLLM_API_KEY is here")
                models = {model["id"]: model for model in answer.json()["data"]}
                if self._record.served_name in models:
                    return int(models[self._record.served_name].get("max_model_len") or 0)
                self._health.step = f"/v1/models lists {sorted(models)}, not {self._record.served_name}"

    async def _warm_up(self, client: httpx.AsyncClient, max_model_len: int) -> None:
        def on_step(step: str) -> None:
            if not self._stop.is_set():
                self._health.enter(Phase.WARMING, step)

        attempt = 1
        on_step("the first request")
        while True:
            try:
                seconds = await warmup.run(
                    client,
                    self._record.served_name,
                    max_model_len,
                    float(self._record.ready_timeout_s),
                    on_step,
                )
                break
            except warmup.WarmupError as error:
                await self._look(client)
                if self._health.dead:
                    raise await self._dead_engine() from error
                self._note(f"warm-up, attempt {attempt} of {WARM_UP_ATTEMPTS}: {error}", "WARNING")
                if attempt == WARM_UP_ATTEMPTS:
                    raise _FailedError(f"the warm-up failed: {error}") from error
                attempt += 1
                on_step(f"attempt {attempt}; before: {error}")
                await asyncio.sleep(WARM_UP_PAUSE_S)
        for name, taken in seconds.items():
            self._exporter.warm_up.labels(name).set(taken)
        await self._look(client)
        if self._stop.is_set():
            return
        self._health.enter(Phase.SERVING, "")
        self._record = dataclasses.replace(self._record, ready=True)
        try:
            await asyncio.to_thread(self._store.save, self._record)
        except DeployError as error:
            # A full disk makes `status` say "starting"; it is no reason to end a server that answers.
            self._note(f"{error}; it serves all the same", "WARNING")
        told = ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
        self._note(f"ready; warm-up: {told}")

    async def _looks(self, client: httpx.AsyncClient) -> None:
        was_ready = True
        while True:
            await asyncio.sleep(self._watch.poll_s)
            await self._look(client)
            ready = self._health.ready()
            if ready.ok != was_ready and self._health.phase is Phase.SERVING:
                was_ready = ready.ok
                self._note("ready again" if ready.ok else f"not ready: {ready.reason}", "WARNING")
            if self._health.dead:
                raise await self._dead_engine()
            if self._health.stalled() and self._watch.restarts:
                raise _FailedError(f"vLLM hangs: {self._health.live().reason}")

    async def _look(self, client: httpx.AsyncClient) -> Counters | None:
        """Read vLLM's counters, and what it thinks of its engine. None when there are none to be had."""
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                health, metrics = await asyncio.gather(client.get("/health"), client.get("/metrics"))
        except (httpx.HTTPError, TimeoutError):
            self._exporter.unread.inc()
            self._exporter.vllm(b"")
            return None
        if health.status_code == 503:
            self._health.died("vLLM's engine is dead")
        self._exporter.vllm(metrics.content)
        counters = parse(metrics.content)
        if counters is not None:
            self._health.saw(counters)
        return counters

    async def _dead_engine(self) -> _FailedError:
        """The probes know already; let vLLM end by itself and log why. What to raise when it does not."""
        self._note(self._health.dead, "WARNING")
        await asyncio.sleep(DEAD_ENGINE_S)
        return _FailedError(f"{self._health.dead}, and its API server did not end")

    async def _canaries(self, client: httpx.AsyncClient) -> None:
        priority_allowed = _flag_value(self._record.argv, "scheduling-policy") == "priority"
        while True:
            await asyncio.sleep(min(1.0, self._watch.canary_period_s / 4))
            if not self._health.canary_due():
                continue
            self._health.canary_sent()
            outcome = await canary.send(
                client,
                self._record.served_name,
                self._watch.canary_timeout_s,
                priority_allowed=priority_allowed,
            )
            self._exporter.canaries.labels(outcome.result).inc()
            if outcome.result == "ok":
                self._exporter.canary_latency.observe(outcome.seconds)
                self._exporter.canary_success.set(time.time())
                self._health.canary_answered()
            elif outcome.result == "refused":
                self._health.canary_refused()
            else:
                self._health.canary_failed(outcome.reason)
                self._note(f"canary failed: {outcome.reason}", "WARNING")

    async def _note_segments(self) -> None:
        while True:
            loading = self._health.phase is Phase.LOADING
            await asyncio.sleep(SEGMENTS_LOADING_S if loading else SEGMENTS_SERVING_S)
            await asyncio.to_thread(self._remember_segments)

    def _remember_segments(self) -> None:
        if self._life is not None:
            with contextlib.suppress(OSError):
                self._segments.note(procs.members(self._record.instance, self._life.leader))

    # --- ending --------------------------------------------------------------------------------------

    async def _drain(self, life: _Life) -> int:
        """Finish what runs, stop vLLM; the exit code. Raises _FailedError when it dies meanwhile, or hangs."""
        cut_off = 0
        if self._health.phase is Phase.DRAINING:
            async with httpx.AsyncClient(base_url=self._record.url, trust_env=False, timeout=5.0) as client:
                cut_off = await self._until_idle(client, life)
                if cut_off and not self._hurried():
                    self._note(
                        f"{cut_off} request(s) still run; vLLM's own shutdown gives them "
                        f"{self._record.shutdown_timeout_s} s more",
                        "WARNING",
                    )
                self._health.enter(Phase.STOPPING, "vLLM is shutting down")
                patience = self._record.shutdown_timeout_s + STOP_MARGIN_S
                stopping = asyncio.create_task(self._end_group(life, patience))
                while cut_off and not stopping.done():
                    seen = await self._look(client)
                    cut_off = cut_off if seen is None else seen.pending
                    await _first(stopping, asyncio.sleep(DRAIN_POLL_S))
                killed = await stopping
        else:
            self._health.enter(Phase.STOPPING, "stopped while it was loading")
            killed = await self._end_group(life, STOP_LOADING_S)
        await asyncio.to_thread(life.pump.join, PUMP_S)
        self._flag.unlink(missing_ok=True)
        ended = f"stopped; {len(killed)} process(es) had to be killed" if killed else "stopped"
        if self._hurried():
            self._note(
                f"{ended}; hurried by a second signal while {cut_off} request(s) were running", "WARNING"
            )
            return 128 + self._signals[-1]
        if cut_off:
            self._note(f"{ended}; {cut_off} request(s) were cut off at the deadline", "WARNING")
            return CUT_OFF
        self._note(f"{ended}; no request was cut off")
        return DRAINED

    async def _until_idle(self, client: httpx.AsyncClient, life: _Life) -> int:
        """Wait until no request runs; how many still do at the deadline. Raises _FailedError."""
        deadline = time.monotonic() + self._watch.drain_s
        left = self._health.pending()
        zeros = 0
        while not self._hurried():
            seen = await self._look(client)
            if life.ended.is_set():
                raise _FailedError(f"vLLM died while it drained: {postmortem.how(life.process.returncode)}")
            if self._health.dead:
                raise _FailedError(f"{self._health.dead}; it died while it drained")
            if self._health.stalled():
                raise _FailedError(f"vLLM hangs: {self._health.live().reason}")
            if seen is not None:
                left, zeros = seen.pending, 0 if seen.pending else zeros + 1
            # Two looks: several API servers do not change their counts at the same instant.
            if zeros == 2 or time.monotonic() >= deadline:
                break
            await _first(life.ended.wait(), asyncio.sleep(DRAIN_POLL_S))
        return left

    async def _end_group(self, life: _Life, patience_s: float) -> list[int]:
        return await asyncio.to_thread(
            child.stop, self._record.instance, life.leader, patience_s, self._hurried
        )

    async def _died(self, life: _Life, how: str) -> None:
        """Clean up after a death, find its cause, and tell everybody who wants to know."""
        since = time.monotonic()
        self._health.died(how)
        self._note(how, "WARNING")
        stuck = await asyncio.to_thread(postmortem.stuck, self._record.instance, life.leader)
        await asyncio.to_thread(self._remember_segments)
        try:
            await self._end_group(life, 0.0)
        except DeployError as error:
            # A GPU that hangs holds its processes; the cause is worth all the more.
            stuck.append(str(error))
            self._left_behind = True
        self._tell_removed(await asyncio.to_thread(self._segments.sweep))
        await asyncio.to_thread(life.pump.join, PUMP_S)
        finding = await asyncio.to_thread(
            postmortem.examine, self._file.parts(), how, life.process.returncode, stuck
        )
        self._health.died(f"{how} ({finding.id}: {finding.summary})")
        for line in finding.text().splitlines():
            self._note(line, "WARNING")
        for problem in await asyncio.to_thread(postmortem.write, finding, self._cause, self._termination_log):
            self._note(problem, "WARNING")
        await asyncio.sleep(max(0.0, since + LINGER_S - time.monotonic()))


async def _first(*waits: Awaitable[object]) -> None:
    """Until one of them is done; those that are not are cancelled, tasks that were given are left alone."""
    given = [wait for wait in waits if isinstance(wait, asyncio.Task)]
    made = [asyncio.ensure_future(wait) for wait in waits if not isinstance(wait, asyncio.Task)]
    try:
        await asyncio.wait([*given, *made], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in made:
            task.cancel()


def _flag_value(argv: tuple[str, ...], name: str) -> str | None:
    """The value of a flag in a command line, in either of its two forms; None when it is not there."""
    for number, word in enumerate(argv):
        if word == f"--{name}" and number + 1 < len(argv):
            return argv[number + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def supervise(
    record: state.Record,
    store: state.Store,
    listener: socket.socket,
    *,
    passed_on: int | None,
    termination_log: pathlib.Path,
) -> int:
    """Run one deployment to its end in this process; `record` says what and how. Returns the exit code."""
    try:
        file = RotatingFile(pathlib.Path(record.log))
        shared_memory = segments.Segments(record.instance)
    except OSError as error:
        raise DeployError(
            f"cannot write {error.filename}: {error.strerror}",
            why="vLLM's log is kept in the state directory, and its processes talk through /dev/shm.",
            fix="Make both writable for this user, or set DSV4_STATE_DIR.",
        ) from error
    try:
        supervisor = Supervisor(
            record,
            Watch(**record.watch),
            store,
            file,
            shared_memory,
            passed_on=passed_on,
            termination_log=termination_log,
        )
        code = asyncio.run(supervisor.run(listener))
    finally:
        file.close()
    if code != FAILED:
        store.clear(record)
    return code
