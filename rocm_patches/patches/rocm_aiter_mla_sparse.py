"""Patches of vllm/v1/attention/ops/rocm_aiter_mla_sparse.py: the ROCm operators of the sparse indexer and of
sparse attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Measurement, Patch, Target
from rocm_patches.rewrite import rewrite

MODULE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"


def _prefill_logits_with_fallback(original: Callable[..., Any]) -> Callable[..., Any]:
    """Choose the kernel of the prefill logits by what is installed and switched on, once per process."""

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
            try:
                module = rocm_aiter_mla_sparse.mqa_logits_module()
            except ImportError:  # it looks for a submodule of packages that need not be there
                module = None
            if module is not None:
                logger.info("prefill MQA logits: AITER's Triton kernel")

                def triton(q: Any, kv: tuple[Any, Any], weights: Any, start: Any, end: Any) -> Any:
                    return module.fp8_mqa_logits(q, kv[0], kv[1], weights, start, end)

                return triton
        logger.warning("prefill MQA logits: plain torch, slow, because AITER is off or has no kernel for it")
        from rocm_patches.reference import indexer

        return indexer.prefill_logits

    @functools.wraps(original)
    def rocm_fp8_mqa_logits(
        q: Any, kv: tuple[Any, Any], weights: Any, cu_seqlen_ks: Any, cu_seqlen_ke: Any
    ) -> Any:
        return kernel()(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)

    return rocm_fp8_mqa_logits


def _measure_prefill_logits(device: str) -> list[Measurement]:
    """The kernel that this process uses (on the CPU: the torch one) against float64."""
    import torch

    from rocm_patches import fp8
    from rocm_patches.reference import indexer

    on_gpu = device != "cpu"
    dialect = fp8.FNUZ
    if on_gpu:
        from vllm.platforms import current_platform
        from vllm.v1.attention.ops.rocm_aiter_mla_sparse import rocm_fp8_mqa_logits

        dialect = fp8.FNUZ if current_platform.is_fp8_fnuz() else fp8.OCP
        function = rocm_fp8_mqa_logits
    else:
        function = indexer.prefill_logits
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 64, 128, generator=generator).clamp(-200, 200).to(dialect.dtype)
    k = (torch.randn(512, 128, generator=generator) * 16).to(dialect.dtype)
    scale = torch.exp2(torch.randint(-4, 4, (512, 1), generator=generator).float())
    weights = torch.randn(64, 64, generator=generator)
    starts, ends = torch.zeros(64).int(), (torch.arange(64) * 8 + 8).int()
    inputs = [x.to(device) for x in (q, k, scale, weights, starts, ends)]
    got = function(inputs[0], (inputs[1], inputs[2]), *inputs[3:]).cpu().double()
    dots = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
    truth = torch.einsum("mh,mhn->mn", weights.double(), dots) * scale.double().T
    live = torch.arange(512) < ends.unsqueeze(1)
    error = ((got - truth).abs() / truth.abs().amax())[live].max()
    # 64 heads of 128 products in fp32; AITER's kernels accumulate in fp32 as well.
    return [Measurement("prefill MQA logits", dialect.name, float(error), 1e-4)]


PATCHES = (
    Patch(
        id="prefill-logits-fallback",
        title="Prefill MQA logits where AITER's FlyDSL kernel is absent",
        symptom="ImportError in a worker at the first prompt of more than 2048 (Flash) or 4096 (Pro) tokens; "
        "or, with AITER off, memory of heads x queries x keys",
        cause="rocm_fp8_mqa_logits imports aiter.ops.flydsl.flydsl_fp8_mqa_logits on gfx942 without a "
        "fallback, and falls back to one einsum over all heads, rounded to bf16, elsewhere",
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
        self_test=_measure_prefill_logits,
    ),
    Patch(
        id="decode-output-in-place",
        title="Sparse decode writes into its output",
        symptom="one allocation and one copy of the attention output per layer and decode step",
        cause="rocm_sparse_attn_decode passes its output on to the kernel on gfx950 only",
        remedy="pass it on wherever the kernel can write it: bf16, the queries' shape, contiguous rows",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/" + MODULE.replace(".", "/") + ".py",
        upstream_state="done for gfx950 only",
        drop_when="the gate on gfx950 is gone",
        platforms=("gfx942",),
        targets=(
            Target(
                MODULE,
                "rocm_sparse_attn_decode",
                rewrite(
                    (
                        "output if _ON_GFX950 and output.dtype == torch.bfloat16 else None",
                        "output if output.dtype == torch.bfloat16 and output.shape == q.shape "
                        "and output.stride(-1) == 1 else None",
                    )
                ),
            ),
            # What is handed the output, and the kernel that writes it through its first two strides.
            Target(MODULE, "_rocm_sparse_attn_decode_triton"),
            Target(MODULE, "_rocm_sparse_attn_decode_ragged_triton"),
            Target(MODULE, "_sparse_attn_decode_reduce_kernel"),
        ),
    ),
)
