"""Patches of vllm/v1/attention/ops/rocm_aiter_mla_sparse.py: the ROCm operators of the sparse indexer and of
sparse attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

MODULE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"


def _prefill_logits_with_fallback(original: Callable[..., Any]) -> Callable[..., Any]:
    """Choose the kernel of the prefill logits by what is installed, once per process."""

    @functools.cache
    def kernel() -> Callable[..., Any]:
        from vllm._aiter_ops import rocm_aiter_ops
        from vllm.logger import init_logger
        from vllm.v1.attention.ops import rocm_aiter_mla_sparse

        logger = init_logger("vllm.rocm_patches")
        if rocm_aiter_ops.is_enabled():
            try:
                from aiter.ops.flydsl import flydsl_fp8_mqa_logits  # noqa: F401
            except Exception as error:  # whatever AITER's import raises, there is no such kernel
                logger.warning("AITER's FlyDSL kernel of the prefill MQA logits is not there: %r", error)
            else:
                return original
        if (module := rocm_aiter_mla_sparse.mqa_logits_module()) is not None:
            logger.info("prefill MQA logits: AITER's Triton kernel")

            def triton(q: Any, kv: tuple[Any, Any], weights: Any, start: Any, end: Any) -> Any:
                return module.fp8_mqa_logits(q, kv[0], kv[1], weights, start, end)

            return triton
        logger.warning("prefill MQA logits: plain torch, slow; AITER's Triton kernel is not there either")
        from rocm_patches.reference import indexer

        return indexer.prefill_logits

    @functools.wraps(original)
    def rocm_fp8_mqa_logits(
        q: Any, kv: tuple[Any, Any], weights: Any, cu_seqlen_ks: Any, cu_seqlen_ke: Any
    ) -> Any:
        return kernel()(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)

    return rocm_fp8_mqa_logits


PATCHES = (
    Patch(
        id="prefill-logits-fallback",
        title="Prefill MQA logits where AITER's FlyDSL kernel is absent",
        symptom="ImportError in a worker at the first prompt of more than 2048 (Flash) or 4096 (Pro) tokens; "
        "or, with AITER off, memory of heads x queries x keys",
        cause="rocm_fp8_mqa_logits imports aiter.ops.flydsl.flydsl_fp8_mqa_logits on gfx942 without a "
        "fallback, and falls back to one einsum over all heads elsewhere",
        remedy="the FlyDSL kernel if it is there, else AITER's Triton kernel, else torch in blocks of "
        "bounded memory; chosen once, logged",
        upstream="https://github.com/vllm-project/vllm/issues/48266",
        upstream_state="open; that report has the same trigger, its cause is not known",
        drop_when="rocm_fp8_mqa_logits has a bounded fallback of its own",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "rocm_fp8_mqa_logits", _prefill_logits_with_fallback),
            Target(MODULE, "rocm_aiter_sparse_attn_indexer"),
            Target(MODULE, "mqa_logits_module"),
        ),
    ),
)
