"""Runs a function as a user without rights, in a child process. What root may do says nothing about permissions."""

from __future__ import annotations

import os
import pathlib
import traceback
from collections.abc import Callable, Sequence

import pytest

UID = 12345

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def run(function: Callable[[], str], groups: Sequence[int] = ()) -> str:
    """What the function returns when user and group 12345 run it, in these further groups; or the traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens: this copy of the test run must not go on.
        try:
            os.setgroups(list(groups))
            os.setgid(UID)
            os.setuid(UID)
            text = function()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def let_in(path: pathlib.Path) -> None:
    """Let that user reach what is below `path`: pytest keeps its folders private."""
    for directory in (path, *path.parents):
        if directory.stat().st_mode & 0o777 == 0o700:
            directory.chmod(0o711)
