"""vLLM's `_C` operators for DeepSeek-V4 on the CPU, as thin adapters over `rocm_patches.reference`.

Each adapter keeps the argument order of vLLM 0.32.0's call (vllm/_custom_ops.py and the modules named in
docs/architecture.md) and writes where vLLM wants it written. `install` registers them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.cpu.exact import ExactRows
from rocm_patches.cpu.weights import DecodedWeights, from_environment
from rocm_patches.reference import (
    attention,
    compressor,
    experts,
    indexer,
    kv_cache,
    linear,
    mhc,
    output,
    prologue,
    router,
)
from rocm_patches.reference.kv_cache import Rows

MXFP4_METHOD = 4  # vllm._custom_ops.CPUQuantMethod.MXFP4


@dataclass
class _State:
    """What the adapters share in one process: how rows are stored, and decoded weights."""

    rows: Rows
    keys: Rows
    weights: DecodedWeights


def _state_from_environment() -> _State:
    mode = os.environ.get("DSV4_CPU_KV", "fp8")
    if mode == "fp8":
        return _State(kv_cache.AttentionRows(fp8.OCP), kv_cache.IndexerKeys(fp8.OCP), from_environment())
    if mode == "exact":
        return _State(ExactRows(kv_cache.HEAD_DIM), ExactRows(kv_cache.INDEX_DIM), from_environment())
    raise ValueError(f"DSV4_CPU_KV={mode!r} is not known; use 'fp8' (as served) or 'exact' (debugging)")


_state = _State(kv_cache.AttentionRows(), kv_cache.IndexerKeys(), DecodedWeights(0))

# --- weights and GEMM -------------------------------------------------------------------------------


def convert_weight_packed(weight: Tensor) -> Tensor:
    # Native code packs into a private tile layout here. Every consumer is ours, so the layout stays.
    return weight.clone()


def convert_scale_packed(scale: Tensor) -> Tensor:
    return scale.clone()


def weight_packed_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, is_vnni: bool) -> None:
    out.copy_(linear.linear(x, weight, bias))


def fp8_scaled_mm_cpu(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    block_size: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    n, k = block_size
    decoded = _state.weights.get(weight, scale, lambda w, s: fp8.dequantise_block_weight(w, s, (n, k)))
    return linear.linear(x, decoded, bias).to(out_dtype)


def bmm_cpu(out: Tensor, x: Tensor, weight: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    if scale is not None:
        raise NotImplementedError("bmm_cpu with a scale: DeepSeek-V4's wo_a is dequantised when it loads")
    out.copy_(output.grouped_matmul(x, weight))


# --- experts ----------------------------------------------------------------------------------------


def _check_routing(scoring_func: str, fused_shared_experts: int) -> None:
    if scoring_func != "sqrtsoftplus" or fused_shared_experts:
        raise NotImplementedError(
            f"routing by {scoring_func!r} with {fused_shared_experts} fused shared experts "
            "is not DeepSeek-V4's"
        )


def biased_topk_cpu(
    hidden_states: Tensor,
    gate: Tensor,
    bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[Tensor, Tensor]:
    _check_routing(scoring_func, num_fused_shared_experts)
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    return router.biased_topk(gate, bias, topk, renormalize, scale)


def hash_topk_cpu(
    gate: Tensor,
    tid2eid: Tensor,
    topk: int,
    scoring_func: str,
    num_fused_shared_experts: int,
    num_experts: int,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    _check_routing(scoring_func, num_fused_shared_experts)
    return router.hash_route(gate, tid2eid, routed_scaling_factor)


def fused_experts_cpu(
    out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    moe_comp_method: int,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    w1_zero: Tensor | None,
    w2_zero: Tensor | None,
    a1_scale: Tensor | None,
    block_size: list[int] | None,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    alpha: float | None,
    limit: float | None,
    is_vnni: bool,
) -> None:
    if moe_comp_method != MXFP4_METHOD or w1_scale is None or w2_scale is None:
        raise NotImplementedError(
            f"experts in format {moe_comp_method} of vLLM's CPUQuantMethod: the no-GPU mode serves the "
            "published FP4 experts (expert_dtype fp4) only"
        )
    if w1_bias is not None or w2_bias is not None or alpha is not None:
        raise NotImplementedError("experts with a bias or alpha are not DeepSeek-V4's")
    w13 = _state.weights.get(w1, w1_scale, fp8.dequantise_mxfp4)
    down = _state.weights.get(w2, w2_scale, fp8.dequantise_mxfp4)
    out.copy_(experts.routed_experts(x, w13, down, topk_weights, topk_ids, limit))


# --- hyper-connections ------------------------------------------------------------------------------


def hc_pre_fused_cpu(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    hc_mult: int,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return mhc.pre(x, fn, scale, base, sinkhorn_iters, rms_eps, hc_eps)


def hc_post_fused_cpu(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return mhc.post(x, residual, post, comb)


def hc_head_fused_cpu(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, norm_eps: float
) -> Tensor:
    return mhc.head(x, fn, scale, base, norm_eps, hc_eps)


# --- attention --------------------------------------------------------------------------------------


def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
    table: Tensor,
    padded_heads: int,
    eps: float,
    page_rows: int,
) -> Tensor:
    prologue.insert_key(kv, positions, table, cache, slots, page_rows, _state.rows)
    return prologue.query(q, positions, table, padded_heads, eps)


def flash_mla_with_kvcache_cpu(
    out: Tensor,
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    window_page_rows: int,
    compressed_cache: Tensor,
    compressed_slots: Tensor,
    compressed_page_rows: int,
    sink: Tensor,
    scale: float,
) -> None:
    window = (window_cache, window_slots, window_page_rows)
    compressed = (compressed_cache, compressed_slots, compressed_page_rows)
    out.copy_(attention.sparse_attention(q, window, compressed, sink, scale, _state.rows))


def inverse_gptj_rope_o_proj_cpu(o: Tensor, positions: Tensor, table: Tensor, rope_dim: int) -> Tensor:
    return output.inverse_rotate(o, positions, table)


# --- compressor and indexer -------------------------------------------------------------------------


def save_partial_states_cpu(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, state: Tensor, slots: Tensor
) -> None:
    compressor.save_state(kv, score, ape, positions, state, slots)


# The arguments of the next two are those of `_COMPRESS` below, in the reference's own order.
def compress_norm_rope_store_cpu(*args: Any) -> None:
    compressor.compress(*[*args, _state.rows])


def compress_norm_rope_store_indexer_cpu(*args: Any) -> None:
    compressor.compress(*[*args, _state.keys])


def fused_indexer_q_rope_quant_cpu(
    positions: Tensor,
    q: Tensor,
    table: Tensor,
    q_fp8: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    weights_out: Tensor,
) -> None:
    codes, folded = indexer.quantise_query(q, positions, table, weights, softmax_scale, head_scale)
    q_fp8.copy_(codes.view(q_fp8.dtype))
    weights_out.copy_(folded)


def fp8_paged_mqa_logits_cpu(
    q_fp8: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_rows: int,
    max_length: int,
) -> Tensor:
    q = fp8.decode_e4m3(q_fp8)
    return indexer.paged_logits(q, weights, lengths, page_table, cache, page_rows, max_length, _state.keys)


def topk_transform_512_cpu(
    scores: Tensor,
    lengths: Tensor,
    page_tables: Tensor,
    out_pages: Tensor,
    page_size: int,
    out_raw: Tensor | None,
) -> None:
    raw = indexer.topk(scores, lengths, out_pages.shape[1])
    out_pages.copy_(indexer.to_slots(raw, page_tables, page_size))
    if out_raw is not None:
        out_raw.copy_(raw)


# --- registration -----------------------------------------------------------------------------------

_COMPRESS = (
    "(Tensor state, Tensor window_slots, Tensor positions, Tensor slots, Tensor norm_weight, float eps, "
    "Tensor table, Tensor(a0!) cache, int page_rows, int ratio) -> ()"
)

# Schemas of vLLM 0.32.0's calls, `!` on what is written. The order of arguments is vLLM's.
OPERATORS: dict[Callable[..., Any], str] = {
    convert_weight_packed: "(Tensor weight) -> Tensor",
    convert_scale_packed: "(Tensor scale) -> Tensor",
    weight_packed_linear: "(Tensor(a0!) out, Tensor x, Tensor weight, Tensor? bias, bool is_vnni) -> ()",
    fp8_scaled_mm_cpu: (
        "(Tensor x, Tensor weight, Tensor scale, int[] block_size, Tensor? bias, ScalarType out_dtype, "
        "bool is_vnni) -> Tensor"
    ),
    bmm_cpu: "(Tensor(a0!) out, Tensor x, Tensor weight, bool is_vnni, Tensor? scale) -> ()",
    biased_topk_cpu: (
        "(Tensor hidden_states, Tensor gate, Tensor bias, int topk, bool renormalize, str scoring_func, "
        "int num_fused_shared_experts, float? routed_scaling_factor, "
        "bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)"
    ),
    hash_topk_cpu: (
        "(Tensor gate, Tensor tid2eid, int topk, str scoring_func, int num_fused_shared_experts, "
        "int num_experts, float routed_scaling_factor) -> (Tensor, Tensor)"
    ),
    fused_experts_cpu: (
        "(Tensor(a0!) out, Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
        "int moe_comp_method, Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_zero, Tensor? w2_zero, "
        "Tensor? a1_scale, int[]? block_size, Tensor? w1_bias, Tensor? w2_bias, float? alpha, "
        "float? limit, bool is_vnni) -> ()"
    ),
    hc_pre_fused_cpu: (
        "(Tensor x, Tensor fn, Tensor scale, Tensor base, int hc_mult, int sinkhorn_iters, "
        "float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)"
    ),
    hc_post_fused_cpu: "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    hc_head_fused_cpu: (
        "(Tensor x, Tensor fn, Tensor scale, Tensor base, float hc_eps, float norm_eps) -> Tensor"
    ),
    fused_qnorm_rope_kv_insert_cpu: (
        "(Tensor q, Tensor kv, Tensor positions, Tensor(a0!) cache, Tensor slots, Tensor table, "
        "int padded_heads, float eps, int page_rows) -> Tensor"
    ),
    flash_mla_with_kvcache_cpu: (
        "(Tensor(a0!) out, Tensor q, Tensor window_cache, Tensor window_slots, int window_page_rows, "
        "Tensor compressed_cache, Tensor compressed_slots, int compressed_page_rows, Tensor sink, "
        "float scale) -> ()"
    ),
    inverse_gptj_rope_o_proj_cpu: "(Tensor o, Tensor positions, Tensor table, int rope_dim) -> Tensor",
    save_partial_states_cpu: (
        "(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a0!) state, Tensor slots) -> ()"
    ),
    compress_norm_rope_store_cpu: _COMPRESS,
    compress_norm_rope_store_indexer_cpu: _COMPRESS,
    fused_indexer_q_rope_quant_cpu: (
        "(Tensor positions, Tensor q, Tensor table, Tensor(a0!) q_fp8, Tensor weights, "
        "float softmax_scale, float head_scale, Tensor(a1!) weights_out) -> ()"
    ),
    fp8_paged_mqa_logits_cpu: (
        "(Tensor q_fp8, Tensor cache, Tensor weights, Tensor lengths, Tensor page_table, int page_rows, "
        "int max_length) -> Tensor"
    ),
    topk_transform_512_cpu: (
        "(Tensor scores, Tensor lengths, Tensor page_tables, Tensor(a0!) out_pages, int page_size, "
        "Tensor(a1!)? out_raw) -> ()"
    ),
}


def install(namespace: str = "_C") -> torch.library.Library:
    """Register every operator in `namespace` for the CPU and read the DSV4_CPU_* variables.

    Where the name is already defined (a CPU with AMX, whose native operators are compiled in), only the CPU
    body is replaced. The caller keeps the returned library: the registration lives as long as it does.
    Raises ValueError for an unknown DSV4_CPU_KV.
    """
    global _state
    _state = _state_from_environment()
    library = torch.library.Library(namespace, "FRAGMENT")
    for function, schema in OPERATORS.items():
        name = function.__name__
        if not hasattr(getattr(torch.ops, namespace), name):
            library.define(name + schema)
        library.impl(name, function, "CPU", allow_override=True)
    return library
