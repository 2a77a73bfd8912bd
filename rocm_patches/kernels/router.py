"""Expert choice in one launch: sqrt(softplus), bias, the best k with ties to the lower expert, normalised and scaled;
or the experts that a table fixes for each token id. Formulas: `rocm_patches.reference.router`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int32

from rocm_patches.kernels.launch import cdiv, empty, launch, next_power_of_two, target_of

# Stands for a NaN score: below every real one, above the -inf of a taken expert, so that no expert is taken twice.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def router_kernel(
    T,
    gate_ptr,
    bias_ptr,
    tokens_ptr,
    chosen_ptr,
    weights_ptr,
    ids_ptr,
    stride_gate,
    scale,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    HASH: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program per ROWS tokens; SLOTS >= K is the width of the result tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < T
    slot = tl.arange(0, SLOTS)
    if HASH:
        taken = live[:, None] & (slot < K)[None, :]
        word = tl.load(tokens_ptr + row, live, 0).to(tl.int64)
        ids = tl.load(chosen_ptr + word[:, None] * K + slot[None, :], taken, 0).to(tl.int32)
        g = tl.load(gate_ptr + row.to(tl.int64)[:, None] * stride_gate + ids, taken, 0.0).to(tl.float32)
        weights = tl.sqrt(tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g))))
        weights = tl.where(taken, weights, 0.0)
    else:
        expert = tl.arange(0, WIDTH)
        inside = live[:, None] & (expert < EXPERTS)[None, :]
        g = tl.load(gate_ptr + row.to(tl.int64)[:, None] * stride_gate + expert[None, :], inside, 0.0)
        g = g.to(tl.float32)
        score = tl.sqrt(tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g))))
        key = score + tl.load(bias_ptr + expert, expert < EXPERTS, 0.0)[None, :]
        key = tl.where(key == key, key, _LOWEST)
        key = tl.where((expert < EXPERTS)[None, :], key, float("-inf"))
        ids = tl.zeros([ROWS, SLOTS], tl.int32)
        weights = tl.zeros([ROWS, SLOTS], tl.float32)
        for i in tl.static_range(K):
            best = tl.max(key, 1)
            at = tl.min(tl.where(key == best[:, None], expert[None, :], WIDTH), 1)
            hit = expert[None, :] == at[:, None]
            weight = tl.sum(tl.where(hit, score, 0.0), 1)
            ids = tl.where(slot[None, :] == i, at[:, None], ids)
            weights = tl.where(slot[None, :] == i, weight[:, None], weights)
            key = tl.where(hit, float("-inf"), key)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    to = row[:, None] * K + slot[None, :]
    known = live[:, None] & (slot < K)[None, :]
    tl.store(weights_ptr + to, weights * scale, known)
    tl.store(ids_ptr + to, ids, known)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in 0..1, exact where 1 + x rounds: the rounded sum's error is put back."""
    rounded = 1.0 + x
    return tl.log(rounded) + (x - (rounded - 1.0)) / rounded


def _launch(
    gate: Tensor,
    bias: Tensor,
    tokens: Tensor,
    chosen: Tensor,
    k: int,
    normalise: bool,
    scale: float,
    hashed: bool,
) -> tuple[Tensor, Tensor]:
    rows, experts = gate.shape
    target = target_of(gate.device)
    if gate.stride(1) != 1:
        gate = gate.contiguous()
    weights = empty(gate.device, rows, k)
    ids = empty(gate.device, rows, k, dtype=int32)
    block = 1 if rows <= 4 * target.compute_units else 4
    launch(
        router_kernel,
        (cdiv(rows, block),),
        rows,
        gate,
        bias,
        tokens,
        chosen,
        weights,
        ids,
        gate.stride(0),
        float(scale),
        target=target,
        warps=1,
        EXPERTS=experts,
        WIDTH=next_power_of_two(experts),
        K=k,
        SLOTS=next_power_of_two(k),
        HASH=hashed,
        NORMALISE=normalise,
        ROWS=block,
    )
    return weights, ids


def biased_topk(
    gate: Tensor, bias: Tensor, k: int, normalise: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The k experts with the largest score + bias, best first. gate [T, E] fp32 or bf16, bias fp32 [E] -> weights fp32
    [T, k] (of the scores, without the bias), ids int32 [T, k]. Raises ValueError for k > E."""
    if k > gate.shape[1] or bias.shape != (gate.shape[1],):
        raise ValueError(f"{k} of {gate.shape[1]} experts with a bias of shape {tuple(bias.shape)}")
    return _launch(gate, bias, bias, bias, k, normalise, scale, hashed=False)


def hash_route(gate: Tensor, tokens: Tensor, chosen: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Weights of the experts that `chosen` int [vocabulary, k] fixes by token id. gate [T, E], tokens int [T] -> fp32
    [T, k], int32 [T, k]. The table is trusted: ids beyond E read outside of the gate's row."""
    return _launch(gate, gate, tokens, chosen.contiguous(), chosen.shape[1], True, scale, hashed=True)
