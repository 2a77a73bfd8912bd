"""vLLM's entry point (`vllm.general_plugins`): `register()` runs in every vLLM process, before any model.

Only the standard library is imported here at module level: vLLM merely logs a plugin that fails to import and
goes on without it, while an exception out of `register()` stops the process, which is what a bundle that
promises correct answers wants.
"""

from __future__ import annotations

import importlib.metadata
import os

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
CPU_VLLM = "0.32.0"
_active: str | None = None


def _vllm_release() -> str:
    """vLLM's public version without a local part ("0.32.0" for "0.32.0+cpu")."""
    return importlib.metadata.version("vllm").split("+")[0]


def register() -> None:
    """Install what this platform needs. Re-entrant: a second call does nothing.

    Raises RuntimeError when vLLM's version is outside the supported window: the names this package
    touches are known for those releases only.
    """
    global _active
    if _active is not None:
        return
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    release = _vllm_release()
    supported = (CPU_VLLM,) if current_platform.is_cpu() else SUPPORTED_VLLM
    if release not in supported:
        raise RuntimeError(
            f"rocm_patches {importlib.metadata.version('dsv4-deploy')} does not know vLLM {release}. It "
            f"supports {' and '.join(supported)} here. Install that release, or start vLLM without this "
            "plugin (VLLM_PLUGINS='')."
        )
    if current_platform.is_cpu():
        from rocm_patches.cpu import gates, operators

        gates.open_early()
        _active = f"cpu: {len(operators.OPERATORS)} DeepSeek-V4 operators from rocm_patches.reference"
    else:
        _active = "no patches for this platform"
    init_logger("vllm.rocm_patches").info("rocm_patches active in process %d (%s)", os.getpid(), _active)


def active() -> str | None:
    """What `register()` installed in this process, or None before it ran."""
    return _active
