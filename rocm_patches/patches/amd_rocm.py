"""Patches of vllm/models/deepseek_v4/amd/rocm.py: attention's output projection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.patches import switch
from rocm_patches.patches.prepared import prepared
from rocm_patches.registry import Patch, Target

MODULE = "vllm.models.deepseek_v4.amd.rocm"


def projection(layer: Any) -> Any:
    """The layer's wo_a as the kernels read it, made once; None where it is not block-scaled FP8 of whole blocks."""
    weight = layer.wo_a.weight
    return prepared(weight, "projection", lambda: _made(layer, weight))


def _made(layer: Any, weight: Any) -> Any:
    from vllm.logger import init_logger
    from vllm.model_executor.layers.quantization.utils.fp8_utils import get_fp8_block_weight_scale

    from rocm_patches.kernels import output

    scale = get_fp8_block_weight_scale(layer.wo_a)
    if scale is None or weight.element_size() != 1:
        return None
    try:
        return output.prepare(weight.detach(), scale.detach(), layer.n_local_groups)
    except ValueError as error:
        init_logger("vllm.rocm_patches").warning("wo_a stays bf16: %s", error)
        return None


def _in_fp8(original: Callable[..., Any]) -> Callable[..., Any]:
    wanted = switch.wanted("output")

    @functools.wraps(original)
    def _o_proj(self: Any, o: Any, positions: Any) -> Any:
        if not wanted or self._wo_a_fp8_weight is not None or (made := projection(self)) is None:
            return original(self, o, positions)
        from rocm_patches.kernels import output

        # The attention kernels have turned their output back already (inverse_rope=False in vLLM's own path).
        table = self.rotary_emb.cos_sin_cache
        z = output.project(o, made, positions, table, rotated=True).flatten(1)
        if self._wo_b_scale is not None:
            return self._bpre_attn_gemm(self.wo_b.weight, self._wo_b_scale, z, True)
        return self.wo_b(z)

    return _o_proj


PATCHES = (
    Patch(
        id="output-projection-fp8",
        title="The output projection reads its weight in FP8, on request",
        symptom="wo_a takes twice its memory traffic, and a bf16 copy of itself in memory",
        cause="vLLM's FP8 path for it is for gfx950; elsewhere it keeps a dequantised copy",
        remedy=f"{switch.SWITCH} with `output`: the activations are quantised per 128 columns and multiplied in FP8. "
        "Off by default: not shown to be faster (docs/performance.md), and it rounds the activations",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/amd/rocm.py",
        upstream_state="FP8 for gfx950 only",
        drop_when="vLLM has an FP8 wo_a for gfx942",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "DeepseekV4ROCMAiterMLAAttention._o_proj", _in_fp8),
            Target(MODULE, "DeepseekV4ROCMAiterMLAAttention._bpre_attn_gemm"),
            Target("vllm.v1.attention.ops.rocm_aiter_mla_sparse", "_get_cached_wo_a_bf16"),
        ),
    ),
)
