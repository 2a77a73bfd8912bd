"""Where files lie and how fast they can be read: file system, free space, read speed.

In: a path that may not exist yet. Out: a `Storage`, and from `read_speed` a measurement that leaves the page
cache as it was. The time to load a checkpoint is its size over that speed; nothing else about it takes long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import pathlib
import time

from dsv4_deploy.facts.gpu import ROOT
from dsv4_deploy.facts.host import mounts

# Of the types that name a server elsewhere, those that clusters use.
# https://man7.org/linux/man-pages/man5/nfs.5.html, https://wiki.lustre.org, https://docs.ceph.com
NETWORK_TYPES = frozenset(
    {"nfs", "nfs4", "lustre", "ceph", "fuse.ceph", "beegfs", "gpfs", "wekafs", "cifs", "smb3", "9p",
     "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.sshfs", "glusterfs", "fuse.glusterfs"}
)  # fmt: skip

_BLOCK_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Storage:
    """The file system that holds a path. `existing` is the nearest directory that is already there; free
    space is in bytes."""

    existing: pathlib.Path
    kind: str
    free_bytes: int
    writable: bool

    @property
    def is_network(self) -> bool:
        return self.kind in NETWORK_TYPES


@dataclasses.dataclass(frozen=True)
class ReadSpeed:
    """How fast a file was read: bytes per second, over so many bytes. `direct` is False when the file system
    does not let the page cache be passed by; then a cached file looks faster than its disk."""

    bytes_per_s: float
    sample_bytes: int
    direct: bool


def describe(path: pathlib.Path, root: pathlib.Path = ROOT) -> Storage:
    """The file system of `path`, or of where it would be made. Raises OSError when nothing of it can be
    looked at."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    status = os.statvfs(existing)
    return Storage(
        existing=existing,
        kind=_file_system(existing.resolve(), root),
        free_bytes=status.f_bavail * status.f_frsize,
        writable=os.access(existing, os.W_OK),
    )


def read_speed(path: pathlib.Path, *, seconds: float = 1.0, limit_bytes: int = 2**30) -> ReadSpeed | None:
    """Read from the middle of a file for about `seconds`, past the page cache where that is possible.

    None when the file is too small to tell anything. Raises OSError when it cannot be read.
    """
    size = path.stat().st_size
    if size < 2 * _BLOCK_BYTES:
        return None
    file, direct = _open(path)
    try:
        # Direct reads need aligned memory and offsets; anonymous maps are page-aligned.
        with contextlib.closing(mmap.mmap(-1, _BLOCK_BYTES)) as buffer:
            # The beginning is where an earlier look at the header has been.
            offset = size // 2 // _BLOCK_BYTES * _BLOCK_BYTES
            done, begun = 0, time.monotonic()
            while done < limit_bytes and offset < size and time.monotonic() - begun < seconds:
                count = os.preadv(file, [buffer], offset)
                if count <= 0:
                    break
                done += count
                offset += count
                if count % mmap.PAGESIZE:
                    break
            elapsed = time.monotonic() - begun
    finally:
        os.close(file)
    return ReadSpeed(done / max(elapsed, 1e-6), done, direct) if done else None


def _open(path: pathlib.Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _file_system(path: pathlib.Path, root: pathlib.Path) -> str:
    """The type of the last mount that covers the path: later mounts hide earlier ones."""
    best, kind = -1, "unknown"
    for _, point, mounted in mounts(root):
        mount = pathlib.PurePath(point)
        if (path == mount or mount in path.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), mounted
    return kind
