"""Who is who among this machine's processes, from /proc, so that nobody else's is ever signalled.

A pid alone proves nothing (it may belong to something else by now); a pid with its start time and the
machine's boot id does. Children of a server are found by the marker that they inherit in their environment.
Format of /proc: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal

MARKER = "DSV4_INSTANCE"
PROC = pathlib.Path("/proc")


@dataclasses.dataclass(frozen=True)
class Process:
    """One process at the moment of looking. `start_ticks` counts clock ticks from boot to its start."""

    pid: int
    state: str
    session: int
    start_ticks: int


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process that stays the same one even after its pid has been given to another."""

    pid: int
    start_ticks: int
    boot_id: str


def look(pid: int) -> Process | None:
    """What runs under this pid now; None if nothing does, or only a zombie that waits for its parent."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program's name stands in parentheses and may hold anything, so count from the last one.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return Process(pid, fields[0], int(fields[3]), int(fields[19]))


def boot_id() -> str:
    """The id of this boot of the kernel; "" where the kernel does not say."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def identify(pid: int) -> Identity | None:
    """The identity of a running process."""
    process = look(pid)
    return Identity(pid, process.start_ticks, boot_id()) if process else None


def is_running(identity: Identity) -> bool:
    """True when that very process still runs."""
    process = look(identity.pid)
    if process is None or process.start_ticks != identity.start_ticks:
        return False
    return boot_id() == identity.boot_id


def is_taken_over(identity: Identity) -> bool:
    """True when its pid now belongs to another process."""
    return look(identity.pid) is not None and not is_running(identity)


def members(instance: str, leader: Identity | None) -> list[Process]:
    """Every running process of one server: those that carry its marker, and those of its leader's session
    whose environment cannot be read.

    The session counts only while the leader's pid has not been given to another process. This process is
    never among them.
    """
    wanted = f"{MARKER}={instance}".encode()
    session = leader.pid if leader and leader.boot_id == boot_id() and not is_taken_over(leader) else None
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        process = look(int(entry.name))
        if process is None:
            continue
        environment = _environment(process.pid)
        if environment:
            ours = wanted in environment.split(b"\0")
        else:
            ours = (
                session is not None
                and leader is not None
                and process.session == session
                and process.start_ticks >= leader.start_ticks
            )
        if ours:
            found.append(process)
    return found


def send(process: Process | Identity, number: signal.Signals) -> None:
    """Signal a process, unless it is gone or its pid has been given to another meanwhile."""
    now = look(process.pid)
    if now is not None and now.start_ticks == process.start_ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def title(pid: int) -> str:
    """What a process calls itself, for people: "VLLM::EngineCore", "python3"; "?" when it is gone."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")[0]
        name = (PROC / str(pid) / "comm").read_bytes()
    except OSError:
        return "?"
    return (command.rpartition(b"/")[2] or name.strip()).decode(errors="replace")


def listener_on(port: int) -> str:
    """Who listens on a TCP port, for people: "python3 (pid 123)"; "another process" if the kernel won't
    say."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process"


def _environment(pid: int) -> bytes:
    """The environment that the process was started with; empty when it is gone, not ours to read, or
    wiped."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().strip(b"\0")
    except OSError:
        return b""
