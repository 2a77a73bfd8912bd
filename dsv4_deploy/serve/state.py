"""What this user has started, remembered on disk so that it outlives both `up` and a crash of the server.

One directory per port holds state.json (a Record), vllm.log, the log of the run before, and a lock file.
Nothing secret is ever written: the environment kept is only what the plan added. Files are replaced as a
whole, so a reader sees the old one or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve import output, procs

SCHEMA = 2
LOCK_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Record:
    """One server that was started. `pid` and `start_ticks` are its supervisor's, None in the instant before it
    exists.

    `argv` is vLLM's full command, `env` the variables that the plan added, `created` seconds since the epoch,
    `ready` whether it has ever been ready. `watch` are the fields of a plan.watch.Watch, `health_url` is where
    the supervisor answers probes. `ready_timeout_s` and `shutdown_timeout_s` are what the plan gives vLLM to load
    and to end.
    """

    instance: str
    pid: int | None
    start_ticks: int | None
    boot_id: str
    spec: Mapping[str, Any]
    device: str
    served_name: str
    tp: int
    port: int
    url: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    digest: str
    log: str
    created: float
    ready: bool
    shutdown_timeout_s: int
    ready_timeout_s: int
    watch: Mapping[str, Any]
    health_url: str

    @property
    def leader(self) -> procs.Identity | None:
        """The supervisor's process, as it was when it started."""
        if self.pid is None or self.start_ticks is None:
            return None
        return procs.Identity(self.pid, self.start_ticks, self.boot_id)

    def is_running(self) -> bool:
        """True when the very process that was started still runs."""
        return self.leader is not None and procs.is_running(self.leader)


def root(environ: Mapping[str, str]) -> pathlib.Path:
    """Where state is kept: $DSV4_STATE_DIR, else dsv4-deploy under $XDG_STATE_HOME or ~/.local/state."""
    if own := environ.get("DSV4_STATE_DIR"):
        return pathlib.Path(own).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return pathlib.Path(base).expanduser().absolute() / "dsv4-deploy"


class Store:
    """The state directory. `warn` receives one line for people when something in it had to be put right."""

    def __init__(self, directory: pathlib.Path, warn: Callable[[str], None]) -> None:
        self._root = directory
        self._warn = warn

    def directory(self, port: int) -> pathlib.Path:
        """The directory of one port; it need not exist."""
        return self._root / str(port)

    def log(self, port: int) -> pathlib.Path:
        """The log of the current or last server on that port."""
        return self.directory(port) / "vllm.log"

    def ports(self) -> list[int]:
        """The ports with a recorded server, ascending."""
        try:
            return sorted(
                int(entry.name)
                for entry in self._root.iterdir()
                if entry.name.isdigit() and (entry / "state.json").exists()
            )
        except OSError:
            return []

    def load(self, port: int) -> Record | None:
        """The record of that port. A file that cannot be understood is moved aside, reported, and counts as
        none."""
        path = self.directory(port) / "state.json"
        try:
            return _decode(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DeployError(
                f"cannot read {path}", why=str(error), fix="Give this user access, or set DSV4_STATE_DIR."
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            aside = path.with_name(f"state.json.unreadable-{time.time_ns()}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            self._warn(
                f"the state file of port {port} cannot be understood ({error}); moved it to {aside}. If a "
                "server is still running there, its processes have DSV4_INSTANCE in their environment."
            )
            return None

    def save(self, record: Record) -> None:
        """Write the record of its port, as a whole or not at all. Raises DeployError."""
        self._prepare(record.port)
        path = self.directory(record.port) / "state.json"
        content = json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=2) + "\n"
        with self._writing(path):
            descriptor, name = tempfile.mkstemp(prefix=".state.", dir=path.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                pathlib.Path(name).replace(path)
            except BaseException:
                pathlib.Path(name).unlink(missing_ok=True)
                raise

    def clear(self, record: Record) -> None:
        """Forget that server, unless another has taken its port meanwhile; the log stays."""
        current = self.load(record.port)
        if current is None or current.instance == record.instance:
            for name in ("state.json", "stop"):
                (self.directory(record.port) / name).unlink(missing_ok=True)

    def rotate_log(self, port: int) -> pathlib.Path:
        """Keep the last run's log as vllm.log.1 (and so on) and return the path for the new one. Raises
        DeployError."""
        self._prepare(port)
        path = self.log(port)
        with self._writing(path):
            output.shift(path)
        return path

    def request_stop(self, record: Record) -> None:
        """Let an `up` that waits for this server, or follows it, know that its end is wanted."""
        path = self.directory(record.port) / "stop"
        with self._writing(path), _open_private(path, os.O_WRONLY | os.O_TRUNC) as file:
            file.write(record.instance)

    def stop_requested(self, record: Record) -> bool:
        """True after `request_stop`, and when the server was forgotten or replaced by somebody else."""
        current = self.load(record.port)
        if current is None or current.instance != record.instance:
            return True
        try:
            return (self.directory(record.port) / "stop").read_text(encoding="ascii") == record.instance
        except OSError:
            return False

    @contextlib.contextmanager
    def lock(self, port: int, wait_s: float, on_wait: Callable[[str], None]) -> Iterator[bool]:
        """Hold the port's lock, so that only one `up` or `down` changes it at a time.

        Waits up to `wait_s` seconds; yields False when another process still has it then. `on_wait` is
        called once, with who has it, when there is something to wait for. The kernel releases the lock of a
        process that dies.
        """
        self._prepare(port)
        path = self.directory(port) / "lock"
        with self._writing(path), _open_private(path, os.O_RDWR) as file:
            deadline = time.monotonic() + wait_s
            told = False
            while not _try_lock(file.fileno()):
                if not told and wait_s > 0:
                    file.seek(0)
                    on_wait(f"pid {file.read().strip() or '?'}")
                    told = True
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(LOCK_POLL_S)
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield True
            finally:
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)

    def _prepare(self, port: int) -> None:
        with self._writing(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory(port).mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _writing(self, path: pathlib.Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DeployError(
                f"cannot write {path}: {error.strerror or error}",
                why="dsv4-deploy remembers there what it has started, so that it can stop it again.",
                fix="Make the directory writable, or set DSV4_STATE_DIR to one that is.",
            ) from error


def new_record(**fields: Any) -> Record:
    """A Record for a server that starts now; `fields` are all that this machine does not supply."""
    return Record(
        pid=None, start_ticks=None, boot_id=procs.boot_id(), created=time.time(), ready=False, **fields
    )


def _open_private(path: pathlib.Path, flags: int) -> IO[str]:
    mode = "w" if flags & os.O_WRONLY else "r+"
    return os.fdopen(os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600), mode, encoding="ascii")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _decode(text: str) -> Record:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"schema {schema!r}, and this dsv4-deploy writes {SCHEMA}")
    names = {field.name for field in dataclasses.fields(Record)}
    if missing := names - data.keys():
        raise ValueError(f"without {', '.join(sorted(missing))}")
    kinds: dict[str, type | tuple[type, ...]] = {
        "instance": str, "pid": (int, type(None)), "start_ticks": (int, type(None)), "boot_id": str, "spec":
        dict, "device": str, "served_name": str, "tp": int, "port": int, "url": str, "argv": list, "env":
        dict, "digest": str, "log": str, "created": (int, float), "ready": bool, "shutdown_timeout_s": int,
        "ready_timeout_s": int, "watch": dict, "health_url": str,
    }  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"{name} is {data[name]!r}")
    return Record(**{name: data[name] for name in names} | {"argv": tuple(data["argv"])})
