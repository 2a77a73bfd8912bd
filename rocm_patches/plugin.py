"""vLLM's entry point (`vllm.general_plugins`): `register()` runs in every vLLM process, before any model. In:
the platform that vLLM chose, its version, DSV4_PATCHES and DSV4_PATCHES_SKIP. Out: the patches of
`rocm_patches.patches` for that platform, on the CPU also its operators, and one log line that says so.

Only the standard library is imported here at module level: vLLM merely logs a plugin that fails to import and
goes on without it, while an exception out of `register()` stops the process, which is what a bundle that
promises correct answers wants.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import multiprocessing.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocm_patches.registry import Applier

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
CPU_VLLM = "0.32.0"
_active: str | None = None
_applier: Applier | None = None


def _vllm_release() -> str:
    """vLLM's public version without a local part ("0.32.0" for "0.32.0+cpu")."""
    return importlib.metadata.version("vllm").split("+")[0]


def _platform() -> str:
    """`cpu`, an AMD architecture such as `gfx942`, or `other`.

    Reads what vLLM has found out already; asks no device, since some of its processes must not touch one.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_rocm():
        from vllm.platforms import rocm

        return str(rocm._GCN_ARCH).split(":")[0]
    return "other"


def _vllm_root() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations  # noqa: S101 (vLLM runs this)
    return Path(spec.submodule_search_locations[0]).parent


def register() -> None:
    """Install what this platform needs. Re-entrant: a second call does nothing.

    Raises RuntimeError (PatchError is one) when vLLM's version is outside the supported window or a patch
    does not fit it, before anything is changed.
    """
    global _active, _applier
    if _active is not None:
        return
    from rocm_patches import registry, report
    from rocm_patches.patches import PATCHES

    platform, release = _platform(), _vllm_release()
    if platform == "cpu" and release != CPU_VLLM:
        raise RuntimeError(
            f"rocm_patches {importlib.metadata.version('dsv4-deploy')} does not know vLLM {release}. It "
            f"supports {CPU_VLLM} here. Install that release, or start vLLM without this plugin "
            "(VLLM_PLUGINS='')."
        )
    selection = registry.select(PATCHES, registry.Sources(_vllm_root()), platform, release, os.environ)
    applier = registry.Applier(selection, changed=report.write)
    text = f"{platform}: {len(selection.patches)} patches"
    if platform == "cpu":
        from rocm_patches.cpu import gates, operators

        gates.open_early()
        text = f"cpu: {len(operators.OPERATORS)} DeepSeek-V4 operators from rocm_patches.reference"
    applier.arm()
    _active, _applier = f"({text}): {registry.summary(selection)}", applier
    _announce(applier)
    # A forked process has everything already and is not asked to register again.
    multiprocessing.util.register_after_fork(applier, report.write)
    multiprocessing.util.register_after_fork(applier, _announce)


def _announce(_: Applier) -> None:
    """The line in the log that says that this process is patched, and with what."""
    from vllm.logger import init_logger

    process = multiprocessing.current_process().name
    line = f"rocm_patches active in process {os.getpid()}, {process} {_active}"
    logger = init_logger("vllm.rocm_patches")
    if logger.isEnabledFor(logging.INFO):
        logger.info(line)
    else:
        # vLLM's API server loads plugins while it builds its argument parser, before its logging is set up.
        print(line, file=sys.stderr, flush=True)


def active() -> str | None:
    """What `register()` installed in this process, or None before it ran."""
    return _active


def applier() -> Applier | None:
    """The patches of this process and what became of them, or None before `register()` ran."""
    return _applier
