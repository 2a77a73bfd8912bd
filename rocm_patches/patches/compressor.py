"""Patches of vllm/models/deepseek_v4/compressor.py: the KV compressor in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.patches import switch
from rocm_patches.registry import Patch, Target

MODULE = "vllm.models.deepseek_v4.compressor"


def pages_of(cache: Any) -> Any:
    """A paged cache uint8 [pages, rows, bytes] as [pages, rows * bytes], pages strided as they are. No copy."""
    return cache.as_strided((cache.shape[0], cache.shape[1] * cache.shape[2]), (cache.stride(0), 1))


def whole_pages(cache: Any) -> bool:
    """Whether a cache is uint8 and each of its pages is one stretch of memory."""
    import torch

    return cache.dtype == torch.uint8 and cache.dim() == 3 and cache.stride()[1:] == (cache.shape[2], 1)


def _one_launch(original: Callable[..., None]) -> Callable[..., None]:
    wanted = switch.wanted("compressor")

    @functools.wraps(original)
    def forward(self: Any, kv_score: Any, positions: Any, rotary_emb: Any) -> None:
        from vllm.forward_context import get_forward_context
        from vllm.models.deepseek_v4.compressor import DeepseekCompressor

        steps = get_forward_context().attn_metadata
        # A subclass (0.33.0 has one for gfx950) writes another layout; the profiling run has no caches.
        if not wanted or type(self) is not DeepseekCompressor or not isinstance(steps, dict):
            return original(self, kv_score, positions, rotary_emb)
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        table = rotary_emb.cos_sin_cache
        if not _fits(self, kv_score, table, cache):
            return original(self, kv_score, positions, rotary_emb)
        from rocm_patches import fp8
        from rocm_patches.kernels import compressor

        step = steps[self.state_cache.prefix]
        compressor.compress(
            kv_score,
            self.ape,
            positions,
            step.token_to_req_indices,
            self.state_cache.kv_cache,
            step.slot_mapping,
            step.block_table,
            self.norm.weight,
            table,
            pages_of(cache),
            steps[self.k_cache_prefix].slot_mapping,
            cache.shape[1],
            ratio=self.compress_ratio,
            eps=self.rms_norm_eps,
            # As their readers have it (docs/patches.md): attention's compressed rows are OCP, indexer keys FNUZ.
            dialect=fp8.OCP if self.head_dim == 512 else fp8.FNUZ,
        )
        return None

    return forward


def _fits(layer: Any, kv_score: Any, table: Any, cache: Any) -> bool:
    """Whether the kernel takes this layer: DeepSeek-V4's ratios and widths, fp32 scores, bytes in the cache."""
    import torch

    row = {512: 584, 128: 132}.get(layer.head_dim)
    return (
        not layer.use_fp4_cache
        and layer.compress_ratio in (4, 128)
        and layer.rope_head_dim == 64
        and {kv_score.dtype, table.dtype} == {torch.float32}
        and table.stride(0) == 64
        and whole_pages(cache)
        and cache.shape[2] == row
    )


PATCHES = (
    Patch(
        id="compressor-kernel",
        title="The KV compressor in one launch instead of two or three",
        symptom="two launches a compressor and token on decode, three in a step with prefill at ratio 128; a layer of "
        "ratio 4 has two compressors",
        cause="state rows are saved by one kernel and read back by the next, which is what orders them",
        remedy="one launch: rows of this step come from the scores themselves, older ones from the state cache. "
        f"Without NaN, in the dialect that each reader expects. {switch.SWITCH} without `compressor` switches it off",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/compressor.py",
        upstream_state="two launches in 0.32.0 and 0.33.0",
        drop_when="vLLM's compressor is one launch on ROCm",
        platforms=("gfx942",),
        after=("indexer-key-dialect", "compressed-cache-nan"),
        needs=("indexer-key-dialect",),
        targets=(
            Target(MODULE, "DeepseekCompressor.forward", _one_launch),
            Target(MODULE, "DeepseekCompressor.__init__"),
            Target(MODULE, "CompressorStateCache"),
            Target(MODULE, "CompressorMetadataBuilder"),
            Target("vllm.models.deepseek_v4.common.ops.save_partial_states", "SavePartialStatesKernel"),
        ),
    ),
)
