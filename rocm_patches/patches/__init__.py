"""The catalogue: every patch that this bundle knows, in the order of application. One file per patched vLLM
module, named like it. A file here imports nothing but the standard library and `rocm_patches.registry` at
module level; what needs torch, triton or vLLM is imported inside the replacements.

A new patch: write it, add its file to PATCHES, run `make fingerprints` and `make docs`.
"""

from __future__ import annotations

from rocm_patches.patches import (
    amd_rocm,
    attention,
    chat_completion,
    compressor,
    cpu_mla,
    deepseek_v2,
    fp8_utils,
    fused_compress_quant_cache,
    fused_topk_bias_router,
    mhc,
    mxfp4_oracle,
    parser_deepseek_v4,
    platforms_rocm,
    prometheus,
    rocm_aiter_mla_sparse,
    simple_kv_offload,
    sparse_attn_indexer,
    tokenizers_deepseek_v4,
)
from rocm_patches.registry import Patch

PATCHES: tuple[Patch, ...] = (
    *prometheus.PATCHES,
    *fp8_utils.PATCHES,
    *fused_compress_quant_cache.PATCHES,
    *rocm_aiter_mla_sparse.PATCHES,
    *sparse_attn_indexer.PATCHES,
    *mhc.PATCHES,
    *compressor.PATCHES,
    *attention.PATCHES,
    *amd_rocm.PATCHES,
    *fused_topk_bias_router.PATCHES,
    *deepseek_v2.PATCHES,
    *mxfp4_oracle.PATCHES,
    *platforms_rocm.PATCHES,
    *simple_kv_offload.PATCHES,
    *cpu_mla.PATCHES,
    *parser_deepseek_v4.PATCHES,
    *tokenizers_deepseek_v4.PATCHES,
    *chat_completion.PATCHES,
)
