"""What each vLLM process of a server says about its patches. In: the process's Applier. Out: one small JSON
file per process in a folder that the server's processes share, and a Prometheus collector that turns these
files into the metric `dsv4_patch_info`. Standard library only; prometheus_client is the caller's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocm_patches.registry import Applier

FOLDER = "DSV4_PATCHES_REPORT"
METRIC = "dsv4_patch_info"
_PREFIX = "dsv4-patches-"
_DAY_S = 86400


def folder() -> Path:
    """The folder of this server. The first process makes it, names it in the environment of its children,
    and removes it when it ends."""
    if (given := os.environ.get(FOLDER)) is not None:
        return Path(given)
    owner = os.getpid()
    _remove_leftovers()
    made = tempfile.mkdtemp(prefix=f"{_PREFIX}{owner}-")
    os.environ[FOLDER] = made

    def remove() -> None:
        if os.getpid() == owner:  # a forked child inherits this handler
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return Path(made)


def _remove_leftovers() -> None:
    """Remove this user's folders of servers that were killed, once they are a day old."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        with contextlib.suppress(OSError, ValueError):
            state = old.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _DAY_S:
                owner = int(old.name.removeprefix(_PREFIX).split("-")[0])
                try:
                    os.kill(owner, 0)
                except ProcessLookupError:
                    shutil.rmtree(old)


def process_name() -> str:
    """How vLLM calls this process: EngineCore, VllmWorker-0, ApiServer_0; MainProcess is the front end."""
    return multiprocessing.current_process().name


def write(applier: Applier) -> None:
    """Put this process's state into the folder, atomically. A full disk costs the report, not the server."""
    selection = applier.selection
    state: dict[str, Any] = {
        "pid": os.getpid(),
        "process": process_name(),
        "vllm": selection.release,
        "platform": selection.platform,
        "mode": selection.mode,
        "patches": applier.state | dict.fromkeys(selection.skipped, "skipped"),
        "reasons": dict(selection.skipped),
    }
    with contextlib.suppress(OSError):
        path = folder() / f"{os.getpid()}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(path)


def read() -> list[dict[str, Any]]:
    """The reports of this server's living processes, by process name and pid."""
    found = []
    for path in Path(os.environ.get(FOLDER, os.devnull)).glob("*.json"):
        try:
            os.kill(int(path.stem), 0)
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):  # ended, or just being replaced
            continue
    return sorted(found, key=lambda one: (one["process"], one["pid"]))


class Collector:
    """prometheus_client's interface: one sample per patch and process, value 1."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["patch", "state", "process", "pid", "platform", "vllm"]
        family = GaugeMetricFamily(METRIC, "Patches of rocm_patches in vLLM's processes.", labels=labels)
        for one in read():
            # A process without any patch is reported as well: it is what `patches status` looks for.
            for patch, state in (one["patches"] or {"": "none"}).items():
                values = [patch, state, one["process"], str(one["pid"]), one["platform"], one["vllm"]]
                family.add_metric(values, 1)
        yield family


def register_collector(registry: Any) -> None:
    """Add the collector to a Prometheus registry; once, however often called."""
    with contextlib.suppress(ValueError):  # the registry has it already
        registry.register(Collector())
