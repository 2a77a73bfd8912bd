"""Patches of vllm/model_executor/layers/sparse_attn_indexer.py, and of the registration of its operator in
vllm/_aiter_ops.py.
"""

from __future__ import annotations

from typing import Any

from rocm_patches.registry import Patch, Target
from rocm_patches.rewrite import rewrite

LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
AITER_OPS = "vllm._aiter_ops"

_register_on_gfx942 = rewrite(
    (
        "from vllm.platforms.rocm import on_gfx11, on_gfx950",
        "from vllm.platforms.rocm import on_gfx11, on_gfx942, on_gfx950",
    ),
    ("(on_gfx11() or on_gfx950())", "(on_gfx11() or on_gfx942() or on_gfx950())"),
)


def _registered(original: Any) -> Any:
    """The module has called the original at its end, in vain where AITER is missing: call the new one."""
    replacement = _register_on_gfx942(original)
    replacement()
    return replacement


PATCHES = (
    Patch(
        id="indexer-without-aiter",
        title="The sparse indexer runs without AITER on gfx942",
        symptom="RuntimeError: Sparse attention indexer ROCm path requires AITER or a supported native "
        "architecture",
        cause="without VLLM_ROCM_USE_AITER=1 the operator is registered and allowed on gfx950 and gfx11 "
        "only, although its parts run on gfx942 as well",
        remedy="register it and let it through on gfx942; its prefill logits then come from torch",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/"
        "sparse_attn_indexer.py",
        upstream_state="gfx950 and gfx11 only",
        drop_when="the gate lets gfx942 through",
        platforms=("gfx942",),
        targets=(
            Target(
                LAYER,
                "SparseAttnIndexer.forward_hip",
                rewrite(
                    (
                        "from vllm.platforms.rocm import on_gfx11, on_gfx950",
                        "from vllm.platforms.rocm import on_gfx11, on_gfx942, on_gfx950",
                    ),
                    ("or on_gfx11()", "or on_gfx11()\n        or on_gfx942()"),
                ),
            ),
            Target(AITER_OPS, "rocm_aiter_ops.register_ops_once", _registered),
        ),
        needs=("prefill-logits-fallback",),
    ),
)
