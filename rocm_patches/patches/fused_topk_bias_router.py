"""Patches of vllm/model_executor/layers/fused_moe/router/fused_topk_bias_router.py: which experts a token gets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.patches import switch
from rocm_patches.registry import Patch, Target

MODULE = "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router"


def _on_triton(original: Callable[..., Any]) -> Callable[..., Any]:
    wanted = switch.wanted("router")

    @functools.wraps(original)
    def fused_topk_bias(
        hidden_states: Any, gating_output: Any, scoring_func: str, e_score_correction_bias: Any, topk: int,
        renormalize: bool, indices_type: Any = None, input_tokens: Any = None, hash_indices_table: Any = None,
        routed_scaling_factor: float = 1.0, bias_vl: Any = None, image_sentinel_lo: int = 0,
    ) -> Any:  # fmt: skip
        import torch
        from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router as module

        hashed = hash_indices_table is not None
        if (
            not wanted
            or scoring_func != "sqrtsoftplus"
            or bias_vl is not None
            or indices_type not in (None, torch.int32)
            or (not renormalize if hashed else e_score_correction_bias is None)
            or module._get_padding_mask(gating_output.shape[0]) is not None
        ):
            return original(
                hidden_states, gating_output, scoring_func, e_score_correction_bias, topk, renormalize, indices_type,
                input_tokens, hash_indices_table, routed_scaling_factor, bias_vl, image_sentinel_lo,
            )  # fmt: skip
        from rocm_patches.kernels import router

        if hashed:
            return router.hash_route(gating_output, input_tokens, hash_indices_table, routed_scaling_factor)
        return router.biased_topk(
            gating_output, e_score_correction_bias, topk, renormalize, routed_scaling_factor
        )

    return fused_topk_bias


PATCHES = (
    Patch(
        id="router-kernel",
        title="Expert choice by this bundle's kernel, on request",
        symptom="none known; to be compared with the compiled operator on AMD hardware",
        cause="the operator that vLLM runs on ROCm is compiled code, which nobody could check without a GPU",
        remedy=f"{switch.SWITCH} with `router`: one launch for one, ties to the lower expert. Off by default: it saves "
        "no launch",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/" + MODULE.replace(".", "/") + ".py",
        upstream_state="no fault is known",
        drop_when="an MI300X has shown that the compiled operator is as fast and as exact",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "fused_topk_bias", _on_triton),
            Target(MODULE, "_get_padding_mask"),
        ),
    ),
)
