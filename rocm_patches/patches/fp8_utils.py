"""Patches of vllm/model_executor/layers/quantization/utils/fp8_utils.py and its neighbour w8a8_utils.py: FP8
weights of a checkpoint, turned into the platform's dialect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

UTILS = "vllm.model_executor.layers.quantization.utils"


def check_codes(weight: Any, scale: Any) -> None:
    """Raise ValueError where an OCP block-scaled weight has no FNUZ twin.

    weight: e4m3fn, any shape; scale: fp32, bf16 or e8m0, any shape. Bytes 0x7F and 0xFF are NaN in OCP and
    +-240 in FNUZ; an e8m0 byte 255 is NaN, and 254 cannot be doubled.
    """
    import torch

    codes = weight.view(torch.uint8)
    nan_codes = int(((codes & 0x7F) == 0x7F).sum())
    if scale.dtype == torch.float8_e8m0fnu:
        bad_scales = int((scale.view(torch.uint8) >= 254).sum())
    else:
        bad_scales = int((~(scale * 2).isfinite()).sum())
    if nan_codes or bad_scales:
        raise ValueError(
            f"an FP8 weight of shape {tuple(weight.shape)} holds {nan_codes} NaN codes (0x7F, 0xFF) and "
            f"{bad_scales} scales that are NaN or too large to double. The checkpoint is damaged: compare "
            "its files' hashes with the published ones and download it again."
        )


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(weight: Any, weight_scale: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from vllm.platforms import current_platform

        if current_platform.is_fp8_fnuz() and weight.dtype == torch.float8_e4m3fn:
            check_codes(weight, weight_scale)
        return original(weight, weight_scale, *args, **kwargs)

    return checked


PATCHES = (
    Patch(
        id="checkpoint-fp8-codes",
        title="A damaged FP8 checkpoint is refused, not silently changed",
        symptom="a damaged file loads and answers wrongly: NaN weights have become 240 times their scale, "
        "NaN scales 2^127",
        cause="the conversion from OCP to FNUZ reinterprets the bytes and clamps the scale without looking "
        "for codes that have no twin",
        remedy="count them while loading and stop with the number found",
        upstream="https://github.com/vllm-project/vllm/pull/45681",
        upstream_state="merged; made the conversion work for e8m0 scales, without such a check",
        drop_when="the conversion rejects NaN codes",
        platforms=("gfx942",),
        targets=(
            Target(f"{UTILS}.fp8_utils", "process_fp8_weight_block_strategy", _checked),
            Target(f"{UTILS}.w8a8_utils", "normalize_e4m3fn_to_e4m3fnuz", _checked),
        ),
        rows=("F01",),
    ),
)
