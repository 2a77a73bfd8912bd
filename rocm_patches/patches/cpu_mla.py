"""Patches of vllm/models/deepseek_v4/cpu/cpu_mla.py: two faults that stop DeepSeek-V4 on every CPU, with AMX or
without. What opens vLLM's CPU back end to other processors is not here but in rocm_patches/cpu/gates.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

MODULE = "vllm.models.deepseek_v4.cpu.cpu_mla"
SHARED = "vllm.v1.attention.backends.mla"


def _every_layer_kind(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        return {"c1a": None, "c2a": None, **original(self, num_decode_tokens)}

    return build_tile_scheduler


def _without_empty_prefill(builder: type) -> type:
    """Give the builder a `build` of its own; the inherited one is shared with other models."""
    inherited = builder.build  # type: ignore[attr-defined]

    @functools.wraps(inherited)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        built = inherited(self, *args, **kwargs)
        if built.prefill is not None and not built.prefill.chunks:
            built.num_prefills = 0  # there is nothing to index
        return built

    builder.build = build  # type: ignore[attr-defined]
    return builder


_COMMON: dict[str, Any] = {
    "platforms": ("cpu",),
    "releases": ("0.32.0",),
    "checked": "run with vLLM 0.32.0 on the CPU",
}

PATCHES = (
    Patch(
        id="cpu-tile-keys",
        title="The CPU's window metadata names every kind of layer",
        symptom="KeyError: 'c1a' in the first step",
        cause="the shared builder reads two kinds that came with DeepSeek-V4.1; the CPU's dictionary has three others",
        remedy="add both, empty as the rest is on a CPU",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/cpu/cpu_mla.py",
        upstream_state="0.33.0 has the same lines; no report is known",
        drop_when="the CPU's builder returns all keys that sparse_swa.py reads",
        targets=(
            Target(MODULE, "DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler", _every_layer_kind),
            Target(f"{SHARED}.sparse_swa", "DeepseekSparseSWAMetadataBuilder.build"),
        ),
        **_COMMON,
    ),
    Patch(
        id="cpu-empty-prefill",
        title="Prompts of two or three tokens beside a long request",
        symptom="AssertionError: forward_cpu expects the prefill metadata builder to always produce a single chunk; "
        "the engine dies",
        cause="a step whose prompts are all shorter than one compressed entry, beside a request past 2,051 tokens, "
        "gets no chunk, and the indexer asserts exactly one",
        remedy="such a step has no prefill for the indexer",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/sparse_attn_indexer.py",
        upstream_state="0.33.0 has the same lines; no report is known",
        drop_when="SparseAttnIndexer.forward_cpu takes a step without chunks",
        targets=(
            Target(MODULE, "DeepseekV4CPUIndexerMetadataBuilder", _without_empty_prefill),
            Target(f"{SHARED}.indexer", "DeepseekV32IndexerMetadataBuilder.build"),
            Target("vllm.model_executor.layers.sparse_attn_indexer", "SparseAttnIndexer.forward_cpu"),
        ),
        **_COMMON,
    ),
)
