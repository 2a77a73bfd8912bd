"""Opens vLLM 0.32.0's CPU back end to DeepSeek-V4 on processors without AMX.

Stock vLLM ties three choices to AMX (FP8 linear, FP4 experts, chunked prefill with prefix caching) and has some
metadata kernels in Triton only. Each function below opens one gate and nothing else; the names of what they touch
are those of vLLM 0.32.0. Two bugs that stop DeepSeek-V4 on every CPU are patches: rocm_patches/patches/cpu_mla.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from rocm_patches.cpu import metadata, operators

_MARK = "_dsv4_gate"
_libraries: list[torch.library.Library] = []


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method `owner.name` by make(original), keeping its kind; once, however often called."""
    raw = vars(owner)[name]
    original = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
    if getattr(original, _MARK, False):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, True)
    setattr(owner, name, type(raw)(replacement) if raw is not original else replacement)


def _amx_reported() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True)


def open_early() -> None:
    """What every vLLM process needs: the operators, and the platform's choices. Idempotent."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    if not _libraries:
        current_platform.import_kernels()
        _libraries.append(operators.install())
    _custom_ops._supports_cpu_fp8_w8a16 = True

    def with_prefill_features(original: Callable[..., Any]) -> Callable[..., Any]:
        # Chunked prefill and prefix caching are switched off for this model where AMX is missing.
        def check_and_update_config(cls: Any, vllm_config: Any) -> None:
            with _amx_reported():
                original(cls, vllm_config)

        return check_and_update_config

    def with_attention_gates(original: Callable[..., Any]) -> Callable[..., Any]:
        # The worker calls this right after the plugins, before it imports a model: the first moment at
        # which attention modules may be imported without an import cycle.
        def register_triton_kernel_overrides(cls: Any) -> None:
            original(cls)
            open_in_worker()

        return register_triton_kernel_overrides

    _wrap(CpuPlatform, "check_and_update_config", with_prefill_features)
    _wrap(CpuPlatform, "register_triton_kernel_overrides", with_attention_gates)


def open_in_worker() -> None:
    """What the process that runs the model needs besides. Idempotent."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4
    from vllm.triton_utils import HAS_TRITON, dispatcher

    _wrap(
        CPUFp8BlockScaledMMKernel, "is_supported", lambda _: lambda cls, compute_capability=None: (True, None)
    )
    _wrap(CPUExpertsMxfp4, "_supports_current_device", lambda _: lambda: True)

    if not HAS_TRITON:
        missing = {name: body for name, body in metadata.KERNELS.items() if name not in dispatcher._registry}
        if missing:
            dispatcher.register_kernels(missing)
