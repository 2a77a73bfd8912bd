"""Shared memory that a crashed vLLM leaves behind: found out while it lives, removed when it is dead.

In: the processes of one server. Out: a list of their files in /dev/shm, kept there as
dsv4-deploy.<instance>.json, and the removal of those that nobody uses any more. A message queue takes up to
240 MiB, and a pod's /dev/shm outlives its containers. The names (psm_..., vllm_offload_...) do not say whose
they are, so ours are those that one of our own processes was seen to have mapped; a file is removed only when
it is still that very file (inode), no process that can be seen has it, and no living supervisor or API server
holds the lock on the list, which works across containers too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterable

from dsv4_deploy.serve import procs

SHM = pathlib.Path("/dev/shm")  # noqa: S108 (that is where POSIX shared memory lives)
_LIST = re.compile(r"^dsv4-deploy\.[0-9a-f-]+\.json$")


class Segments:
    """The list of one server. `descriptor` is its lock; a child that inherits it keeps the list alive."""

    def __init__(self, instance: str, shm: pathlib.Path = SHM) -> None:
        """Raises OSError when /dev/shm cannot be written."""
        self._shm = shm
        self._path = shm / f"dsv4-deploy.{instance}.json"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(self._path, flags, 0o600)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._known: dict[str, int] = {}

    def note(self, members: Iterable[procs.Process]) -> None:
        """Remember what these processes have mapped or open in /dev/shm now."""
        found = {
            name: inode
            for process in members
            for name, inode in _used_by(process.pid, self._shm).items()
            if not _LIST.match(name)
        }
        if found.items() <= self._known.items():
            return
        self._known.update(found)
        content = json.dumps(self._known).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)

    def sweep(self) -> list[str]:
        """The server has ended: remove what is left of it. Returns the names removed."""
        known, self._known = self._known, {}
        return _remove(known, self._shm)

    def close(self) -> list[str]:
        """The supervisor ends as well: remove what is left, and the list. Returns the names removed."""
        removed = self.sweep()
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self.descriptor)
        return removed


def clean(shm: pathlib.Path = SHM) -> list[str]:
    """Remove what servers of ours have left whose supervisor, and API server, are dead. Returns the names."""
    removed: list[str] = []
    try:
        lists = [path for path in shm.iterdir() if _LIST.match(path.name)]
    except OSError:
        return removed
    for path in lists:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                about = os.fstat(descriptor)
                # Anybody may write to /dev/shm: a list is only ours when the file is.
                if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                removed += _remove(_decode(os.read(descriptor, about.st_size)), shm)
                path.unlink()
            finally:
                os.close(descriptor)
    return removed


def _decode(content: bytes) -> dict[str, int]:
    """The names and inodes of a list; nothing of one that was cut off when its supervisor was killed."""
    try:
        known = json.loads(content)
    except ValueError:
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: inode for name, inode in known.items() if isinstance(inode, int)}


def _remove(known: dict[str, int], shm: pathlib.Path) -> list[str]:
    """Unlink those of the files that are still the same ones, ours, and used by nobody."""
    left = {}
    for name, inode in known.items():
        if "/" in name or name in ("", ".", ".."):
            continue
        with contextlib.suppress(OSError):
            about = (shm / name).lstat()
            if about.st_ino == inode and about.st_uid == os.getuid() and stat.S_ISREG(about.st_mode):
                left[name] = inode
    if not left:
        return []
    for entry in procs.PROC.iterdir():
        if entry.name.isdigit():
            for name, inode in _used_by(int(entry.name), shm).items():
                if left.get(name) == inode:
                    del left[name]
    removed = []
    for name in left:
        with contextlib.suppress(OSError):
            (shm / name).unlink()
            removed.append(name)
    return sorted(removed)


def _used_by(pid: int, shm: pathlib.Path) -> dict[str, int]:
    """Files below `shm` that a process has mapped or open: name -> inode. Nothing for a process that is gone or
    not ours to see."""
    prefix = f"{shm}/"
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), (procs.PROC / str(pid) / "maps").open(errors="replace") as maps:
        for line in maps:
            # Format: https://man7.org/linux/man-pages/man5/proc_pid_maps.5.html
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefix) and not fields[5].endswith(" (deleted)"):
                found[fields[5].removeprefix(prefix)] = int(fields[4])
    with contextlib.suppress(OSError):
        for entry in (procs.PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith(prefix) and not target.endswith(" (deleted)"):
                    found[target.removeprefix(prefix)] = entry.stat().st_ino
    return found
