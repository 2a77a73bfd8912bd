"""Where the tiny checkpoint of the no-GPU mode lives, and making it when it is first needed.

In: the environment. Out: a complete checkpoint directory in the user's cache. Two that need it at once make
it once.
"""

from __future__ import annotations

import fcntl
import pathlib
import shutil
from collections.abc import Callable, Mapping

from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint


def directory(environ: Mapping[str, str]) -> pathlib.Path:
    """Its path: under $DSV4_CACHE_DIR, else dsv4-deploy in $XDG_CACHE_HOME or ~/.cache. It need not exist."""
    from dsv4_deploy.tiny import TINY_VERSION

    if own := environ.get("DSV4_CACHE_DIR"):
        cache = pathlib.Path(own)
    else:
        cache = pathlib.Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "dsv4-deploy"
    return cache.expanduser().absolute() / f"tiny-v{TINY_VERSION}"


def ensure(path: pathlib.Path, note: Callable[[str], None]) -> checkpoint.Checkpoint:
    """The tiny checkpoint in `path`, made now if it is not there or not complete. Raises DeployError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                try:
                    return checkpoint.read(path)
                except DeployError as problem:
                    note(f"Making the tiny checkpoint again: {problem.what}.")
                    shutil.rmtree(path)
            else:
                note(f"Making the tiny checkpoint in {path} (once, a few seconds).")
            _write(path)
            return checkpoint.read(path)
    except OSError as error:
        raise DeployError(
            f"cannot write the tiny checkpoint to {path}: {error.strerror or error}",
            why="The no-GPU mode keeps its model in the user's cache directory.",
            fix="Make the directory writable, or set DSV4_CACHE_DIR to one that is.",
        ) from error


def _write(path: pathlib.Path) -> None:
    from dsv4_deploy.tiny import write_tiny

    try:
        write_tiny(path)
    except ImportError as error:
        raise DeployError(
            f"the tiny checkpoint cannot be made: Python package {error.name} is missing",
            why="Writing its tensors and its tokenizer needs torch, safetensors and tokenizers.",
            fix="Run `make up`: it installs the no-GPU set.",
        ) from error
