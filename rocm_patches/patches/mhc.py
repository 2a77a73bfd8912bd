"""Patches of vllm/model_executor/layers/mhc.py: which kernels mix DeepSeek-V4's residual streams."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, PatchError, Target

MODULE = "vllm.model_executor.layers.mhc"
SWITCH = "DSV4_MHC"

# The sizes of a decode step, an odd batch and a prefill chunk: the launch geometry depends on them.
_PROBED_TOKENS = (1, 17, 256)
# fp32 sums over 4 x hidden products against torch's; a wrong kernel is off by orders of magnitude more.
_TOLERANCE = 2e-2


def aiter_is_too_old() -> bool:
    """AITER before 0.1.14 has a race in mhc_pre (https://github.com/vllm-project/vllm/pull/43950)."""
    from importlib import metadata

    for name in ("amd-aiter", "aiter"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = []
        for part in version.split("+")[0].split(".")[:3]:
            digits = "".join(c for c in part if c.isdigit())
            numbers.append(int(digits) if digits else 0)
        return tuple(numbers) < (0, 1, 14)
    return False  # built from a source tree without metadata: the probe decides


def probe(hidden: int, device: Any) -> str | None:
    """Run AITER's mhc_pre on small inputs and compare with torch. None, or what is wrong with it."""
    import torch
    from vllm.model_executor.kernels.mhc import mhc_pre_torch

    generator = torch.Generator().manual_seed(0)
    fn = (torch.randn(24, 4 * hidden, generator=generator) * hidden**-0.5).to(device)
    scale = torch.ones(3, device=device)
    base = torch.randn(24, generator=generator).to(device)
    for tokens in _PROBED_TOKENS:
        residual = torch.randn(tokens, 4, hidden, generator=generator).bfloat16().to(device)
        inputs = (residual, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
        try:
            got = torch.ops.vllm.mhc_pre_aiter(*inputs)
            error = max(
                float((a.float() - b.float()).abs().max())
                for a, b in zip(got, mhc_pre_torch(*inputs), strict=True)
            )
        except Exception as problem:  # a refused launch must cost speed, not the server
            return f"{tokens} tokens of {hidden}: {str(problem).splitlines()[0]}"
        if not error <= _TOLERANCE * max(1.0, float(residual.float().abs().max())):
            return f"{tokens} tokens of {hidden}: off by {error:.3g}"
    return None


def _tried_first(original: Callable[..., bool]) -> Callable[..., bool]:
    """AITER's kernels where they are new enough and pass a probe on this GPU; vLLM's torch ones elsewhere."""

    @functools.cache
    def usable(hidden: int, device: Any) -> bool:
        from vllm.logger import init_logger

        logger = init_logger("vllm.rocm_patches")
        wanted = os.environ.get(SWITCH, "").strip().lower() or "auto"
        if wanted not in ("auto", "aiter", "torch"):
            raise PatchError(f"{SWITCH}={wanted} is none of auto, aiter, torch")
        if wanted != "auto":
            return wanted == "aiter"
        fault = "AITER is older than 0.1.14, whose mhc_pre has a race" if aiter_is_too_old() else None
        if fault := fault or probe(hidden, device):
            logger.warning("mHC: torch instead of AITER, slower. AITER's kernel failed: %s", fault)
        return not fault

    @functools.wraps(original)
    def _aiter_mhc_supported(residual: Any, norm_weight: Any, *, supports_norm: bool) -> bool:
        if not original(residual, norm_weight, supports_norm=supports_norm):
            return False
        import torch

        # Inside torch.compile nothing may be tried; the profiling run before it has.
        if torch.compiler.is_compiling():
            return True
        return usable(residual.shape[-1], residual.device)

    return _aiter_mhc_supported


PATCHES = (
    Patch(
        id="mhc-backend",
        title="AITER's mHC kernels are tried before they are trusted",
        symptom="`mhc_pre ... invalid configuration argument` in the first profiling run; or, with an old "
        "AITER, lower accuracy",
        cause="vLLM takes AITER's mHC whenever aiter can be imported; some builds cannot launch it on "
        "gfx942, and those before 0.1.14 have a race",
        remedy=f"one small run per process against torch; on failure vLLM's torch kernels, with a warning. "
        f"{SWITCH}=aiter|torch decides by hand. TileLang, wrong on gfx942, stays off as vLLM has it",
        upstream="https://github.com/ROCm/aiter/issues/4633",
        upstream_state="open; the race is fixed in AITER 0.1.14",
        drop_when="the image's AITER launches mhc_pre on every gfx942 part",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "_aiter_mhc_supported", _tried_first),
            Target(MODULE, "MHCPreOp.forward_hip"),
            Target(MODULE, "MHCFusedPostPreOp.forward_hip"),
            Target(MODULE, "_has_tilelang_mhc"),
            Target("vllm.model_executor.kernels.mhc.torch", "mhc_pre_torch"),
        ),
        rows=("F04", "F66", "F80"),
    ),
)
