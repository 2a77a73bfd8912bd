"""Patches of vllm/models/deepseek_v4/attention.py: queries and keys on their way into attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.patches import switch
from rocm_patches.patches.compressor import pages_of, whole_pages
from rocm_patches.registry import Patch, Target

MODULE = "vllm.models.deepseek_v4.attention"


def _on_triton(original: Callable[..., Any]) -> Callable[..., Any]:
    wanted = switch.wanted("prologue")

    @functools.wraps(original)
    def _fused_qnorm_rope_kv_insert(self: Any, q: Any, kv: Any, positions: Any, attn_metadata: Any) -> Any:
        if not wanted or not isinstance(attn_metadata, dict) or self.padded_heads != self.n_local_heads:
            return original(self, q, kv, positions, attn_metadata)
        cache = self.swa_cache_layer.kv_cache
        if not whole_pages(cache) or cache.shape[2] != 584:
            return original(self, q, kv, positions, attn_metadata)
        from rocm_patches.kernels import prologue

        return prologue.prologue(
            q,
            kv,
            None,  # normed already
            positions,
            self.rotary_emb.cos_sin_cache,
            pages_of(cache),
            attn_metadata[self.swa_cache_layer.prefix].slot_mapping,
            cache.shape[1],
            eps=self.eps,
        )

    return _fused_qnorm_rope_kv_insert


PATCHES = (
    Patch(
        id="prologue-kernel",
        title="Query norm, RoPE and key insert by this bundle's kernel, on request",
        symptom="a NaN byte (0x80) in the window cache, should the compiled operator's conversion write one",
        cause="the operator is compiled code, which nobody could check without a gfx942",
        remedy=f"{switch.SWITCH} with `prologue`: one launch for one, which never writes 0x80. Off by default: it "
        "saves no launch, and no AMD GPU has timed it",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/attention.py",
        upstream_state="no report of such a byte is known",
        drop_when="an MI300X has shown that the operator writes none",
        platforms=("gfx942",),
        targets=(Target(MODULE, "DeepseekV4Attention._fused_qnorm_rope_kv_insert", _on_triton),),
    ),
)
