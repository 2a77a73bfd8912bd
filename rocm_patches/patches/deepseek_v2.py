"""Patches of vllm/model_executor/models/deepseek_v2.py: models of the V3.2 kind, whose indexer rotates its
queries and keys with a rotary embedding of its own. DeepSeek-V4's does not use this code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

MODULE = "vllm.model_executor.models.deepseek_v2"
ROPE = "vllm.model_executor.layers.rotary_embedding"


def _results_kept(original: Callable[..., None]) -> Callable[..., None]:
    """Let the indexer rely on rotation in place only where the embedding rotates in place."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (a method's name)
        from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
            DeepseekScalingRotaryEmbedding,
        )

        original(self, *args, **kwargs)
        if isinstance(self.indexer_rope_emb, DeepseekScalingRotaryEmbedding):
            self.indexer.is_inplace_rope = False

    return __init__


PATCHES = (
    Patch(
        id="indexer-rope-results",
        title="The V3.2-type indexer keeps the result of its RoPE",
        symptom="DeepSeek-V3.2 and its like attend to the wrong tokens once the context is longer than "
        "index_topk, with --enforce-eager or custom op +rotary_embedding",
        cause="on ROCm the indexer drops the rotary embedding's results and relies on rotation in place "
        "whenever that custom op is on, but the YaRN embedding (DeepseekScalingRotaryEmbedding) returns new "
        "tensors there: queries and keys stay unrotated",
        remedy="take the branch that uses the results for that embedding",
        upstream="https://github.com/vllm-project/vllm/pull/41451",
        upstream_state="the original review's first finding; fixed upstream for embeddings that rotate in "
        "place, not for YaRN",
        drop_when="the branch checks the embedding, or YaRN's forward_hip rotates in place",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "DeepseekV2MLAAttention.__init__", _results_kept),
            Target(MODULE, "Indexer.forward"),
            Target(f"{ROPE}.deepseek_scaling_rope", "DeepseekScalingRotaryEmbedding.forward_hip"),
            Target(f"{ROPE}.deepseek_scaling_rope", "DeepseekScalingRotaryEmbedding.forward_native"),
        ),
    ),
)
