"""Hyper-connections in one launch per seam: post of the last sub-layer, pre of the next, and what follows it.

A seam turns the residual streams x [T, 4, H] and a layer's output into new streams, the mixing coefficients and
the next layer's input, RMS-normed and quantised if asked. The work is split over token blocks and over H; each
part writes its slice of the streams and its share of the mixing product, and the part of a token block that
arrives last adds the shares up, runs Sinkhorn in registers and folds the streams. Large batches do that second
half in a launch of its own. Formulas: `rocm_patches.reference.mhc`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_patches.kernels import formats, sync
from rocm_patches.kernels.launch import Target, cdiv, empty, launch, next_power_of_two, target_of

STREAMS = 4
MIXES = (2 + STREAMS) * STREAMS
GROUP = 128  # columns per scale of the quantised output, the input group of the FP8 linear layers
# Splits can only meet through a counter, one per token block. More token blocks than this finish in a second launch.
_COUNTERS = 256
_MAX_HIDDEN = 16384  # one program holds a whole row in registers
# Tokens of a program that is shared by many: up to here a seam is one launch. Beyond, the head reads its whole weight
# once per token, which costs more than a second launch only above the other number.
_SPLIT_TOKENS = 4
_HEAD_TOKENS = 256


# --- device code ------------------------------------------------------------------------------------


@triton.jit
def _weights(post, comb, j: tl.constexpr, live):
    """What the streams and the layer's output contribute to new stream j: (post_j, comb[0, j] .. comb[3, j])."""
    return (
        tl.load(post + j, live, 0.0)[:, None],
        tl.load(comb + j, live, 0.0)[:, None],
        tl.load(comb + 4 + j, live, 0.0)[:, None],
        tl.load(comb + 8 + j, live, 0.0)[:, None],
        tl.load(comb + 12 + j, live, 0.0)[:, None],
    )


@triton.jit
def _spread(o, x0, x1, x2, x3, w):
    """A new stream: post_j o + sum_i comb[i, j] x_i, rounded to bf16."""
    return (w[0] * o + w[1] * x0 + w[2] * x1 + w[3] * x2 + w[4] * x3).to(tl.bfloat16)


@triton.jit
def _normalise(a, b, c, d, eps):
    """Four numbers over their sum plus eps."""
    r = 1.0 / (a + b + c + d + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _softmax(a, b, c, d, eps):
    """Softmax of four numbers, plus eps."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    r = 1.0 / (a + b + c + d)
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _logit(sums, i: tl.constexpr, live, rstd, scale, base_ptr):
    """Mix i of some tokens, normed, scaled and shifted."""
    return tl.load(sums + i, live, 0.0) * rstd * scale + tl.load(base_ptr + i)


@triton.jit
def _pick(sums, i: tl.constexpr, WIDTH: tl.constexpr):
    """Element i of a vector, for every thread."""
    return tl.sum(tl.where(tl.arange(0, WIDTH) == i, sums, 0.0), 0)


@triton.jit
def _coefficients(
    shares_ptr,
    sums_ptr,
    scale_ptr,
    base_ptr,
    post_ptr,
    comb_ptr,
    first,
    T,
    rms_eps,
    hc_eps,
    HIDDEN: tl.constexpr,
    MIXES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """post and comb of TOKENS tokens from `first` on.

    Their summed mixes go through memory (sums fp32 [T, WIDTH]), so that each comes back as a vector over tokens.
    The 4 x 4 matrix is sixteen such vectors: Sinkhorn's 39 half-steps then need no other lane.
    """
    token = first + tl.arange(0, TOKENS)
    live = token < T
    mixes = tl.arange(0, WIDTH)
    own = (token // ROWS).to(tl.int64) * (SPLITS * ROWS * WIDTH) + token % ROWS * WIDTH
    at = shares_ptr + own[None, :, None] + mixes[None, None, :]
    at = at + tl.arange(0, SPLITS)[:, None, None] * (ROWS * WIDTH)
    sums = sums_ptr + token.to(tl.int64) * WIDTH
    tl.store(sums[:, None] + mixes[None, :], tl.sum(tl.load(at, live[None, :, None], 0.0), 0), live[:, None])
    tl.debug_barrier()
    rstd = tl.rsqrt(tl.load(sums + MIXES, live, 1.0) / (4 * HIDDEN) + rms_eps)
    post = post_ptr + token * 4
    comb = comb_ptr + token * 16
    s1 = tl.load(scale_ptr + 1)
    for j in tl.static_range(4):
        tl.store(post + j, 2.0 * tl.sigmoid(_logit(sums, 4 + j, live, rstd, s1, base_ptr)), live)
    s = tl.load(scale_ptr + 2)
    c00 = _logit(sums, 8, live, rstd, s, base_ptr)
    c01 = _logit(sums, 9, live, rstd, s, base_ptr)
    c02 = _logit(sums, 10, live, rstd, s, base_ptr)
    c03 = _logit(sums, 11, live, rstd, s, base_ptr)
    c10 = _logit(sums, 12, live, rstd, s, base_ptr)
    c11 = _logit(sums, 13, live, rstd, s, base_ptr)
    c12 = _logit(sums, 14, live, rstd, s, base_ptr)
    c13 = _logit(sums, 15, live, rstd, s, base_ptr)
    c20 = _logit(sums, 16, live, rstd, s, base_ptr)
    c21 = _logit(sums, 17, live, rstd, s, base_ptr)
    c22 = _logit(sums, 18, live, rstd, s, base_ptr)
    c23 = _logit(sums, 19, live, rstd, s, base_ptr)
    c30 = _logit(sums, 20, live, rstd, s, base_ptr)
    c31 = _logit(sums, 21, live, rstd, s, base_ptr)
    c32 = _logit(sums, 22, live, rstd, s, base_ptr)
    c33 = _logit(sums, 23, live, rstd, s, base_ptr)
    c00, c01, c02, c03 = _softmax(c00, c01, c02, c03, hc_eps)
    c10, c11, c12, c13 = _softmax(c10, c11, c12, c13, hc_eps)
    c20, c21, c22, c23 = _softmax(c20, c21, c22, c23, hc_eps)
    c30, c31, c32, c33 = _softmax(c30, c31, c32, c33, hc_eps)
    c00, c10, c20, c30 = _normalise(c00, c10, c20, c30, hc_eps)
    c01, c11, c21, c31 = _normalise(c01, c11, c21, c31, hc_eps)
    c02, c12, c22, c32 = _normalise(c02, c12, c22, c32, hc_eps)
    c03, c13, c23, c33 = _normalise(c03, c13, c23, c33, hc_eps)
    for _ in range(ITERATIONS - 1):
        c00, c01, c02, c03 = _normalise(c00, c01, c02, c03, hc_eps)
        c10, c11, c12, c13 = _normalise(c10, c11, c12, c13, hc_eps)
        c20, c21, c22, c23 = _normalise(c20, c21, c22, c23, hc_eps)
        c30, c31, c32, c33 = _normalise(c30, c31, c32, c33, hc_eps)
        c00, c10, c20, c30 = _normalise(c00, c10, c20, c30, hc_eps)
        c01, c11, c21, c31 = _normalise(c01, c11, c21, c31, hc_eps)
        c02, c12, c22, c32 = _normalise(c02, c12, c22, c32, hc_eps)
        c03, c13, c23, c33 = _normalise(c03, c13, c23, c33, hc_eps)
    tl.store(comb, c00, live)
    tl.store(comb + 1, c01, live)
    tl.store(comb + 2, c02, live)
    tl.store(comb + 3, c03, live)
    tl.store(comb + 4, c10, live)
    tl.store(comb + 5, c11, live)
    tl.store(comb + 6, c12, live)
    tl.store(comb + 7, c13, live)
    tl.store(comb + 8, c20, live)
    tl.store(comb + 9, c21, live)
    tl.store(comb + 10, c22, live)
    tl.store(comb + 11, c23, live)
    tl.store(comb + 12, c30, live)
    tl.store(comb + 13, c31, live)
    tl.store(comb + 14, c32, live)
    tl.store(comb + 15, c33, live)


@triton.jit
def _fold(
    token,
    streams_ptr,
    shares,
    scale_ptr,
    base_ptr,
    y_ptr,
    norm_ptr,
    codes_ptr,
    group_scale_ptr,
    rms_eps,
    hc_eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIXES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE_STRIDE: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
):
    """The layer's input of one token: add its shares up, fold, norm, quantise.

    shares points at the token's row [WIDTH] of the first split; the next split's is SHARE_STRIDE further. The
    loads that depend on nothing come first, so that one latency covers them all.
    """
    token = token.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    x = streams_ptr + token * (4 * HIDDEN) + column
    x0 = tl.load(x, inside, 0.0)
    x1 = tl.load(x + HIDDEN, inside, 0.0)
    x2 = tl.load(x + 2 * HIDDEN, inside, 0.0)
    x3 = tl.load(x + 3 * HIDDEN, inside, 0.0)
    if NORM:
        weight = tl.load(norm_ptr + column, inside, 0.0)
    mixes = tl.arange(0, WIDTH)
    sums = tl.sum(tl.load(shares + tl.arange(0, SPLITS)[:, None] * SHARE_STRIDE + mixes[None, :]), 0)
    rstd = tl.rsqrt(_pick(sums, MIXES, WIDTH) / (4 * HIDDEN) + rms_eps)
    pre = sums * rstd * tl.load(scale_ptr) + tl.load(base_ptr + mixes, mixes < 4, 0.0)
    pre = tl.sigmoid(pre) + hc_eps
    y = _pick(pre, 0, WIDTH) * x0.to(tl.float32) + _pick(pre, 1, WIDTH) * x1.to(tl.float32)
    y += _pick(pre, 2, WIDTH) * x2.to(tl.float32) + _pick(pre, 3, WIDTH) * x3.to(tl.float32)
    y = y.to(tl.bfloat16)
    if NORM:
        y = y.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / HIDDEN + norm_eps) * weight.to(tl.float32)
        y = y.to(tl.bfloat16)
    tl.store(y_ptr + token * HIDDEN + column, y, inside)
    if QUANT:
        groups = tl.reshape(y.to(tl.float32), [COLUMNS // 128, 128])
        exponent = formats.scale_exponent(tl.maximum(tl.max(tl.abs(groups), 1), 1e-4))
        codes = formats.encode(groups * formats.power_of_two(-exponent)[:, None], NATIVE_FNUZ)
        tl.store(codes_ptr + token * HIDDEN + column, tl.reshape(codes, [COLUMNS]), inside)
        group = tl.arange(0, COLUMNS // 128)
        at = group_scale_ptr + token * (HIDDEN // 128) + group
        tl.store(at, formats.power_of_two(exponent), group < HIDDEN // 128)


@triton.jit
def seam_kernel(
    T,
    x_ptr,
    o_ptr,
    post_in_ptr,
    comb_in_ptr,
    fn_ptr,
    arrived_ptr,
    streams_ptr,
    shares_ptr,
    sums_ptr,
    scale_ptr,
    base_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    norm_ptr,
    codes_ptr,
    group_scale_ptr,
    rms_eps,
    hc_eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIXES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
    AMD: tl.constexpr,
    POST: tl.constexpr,
    FINISH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (token block, split of H). TILE >= ROWS is the matrix product's height; rows past ROWS stay empty."""
    pid = tl.program_id(0)
    block = pid // SPLITS
    split = pid % SPLITS
    first = block * ROWS
    row = tl.arange(0, TILE)
    live = (row < ROWS) & (first + row < T)
    inside = live[:, None]
    start = first.to(tl.int64) * (4 * HIDDEN)
    mixes = tl.arange(0, WIDTH)
    live_mix = (mixes < MIXES)[None, :]
    mix = tl.zeros([TILE, WIDTH], tl.float32)
    square = tl.zeros([TILE, BLOCK], tl.float32)
    if POST:
        post = post_in_ptr + (first + row) * 4
        comb = comb_in_ptr + (first + row) * 16
        w0 = _weights(post, comb, 0, live)
        w1 = _weights(post, comb, 1, live)
        w2 = _weights(post, comb, 2, live)
        w3 = _weights(post, comb, 3, live)
    end = tl.minimum((split + 1) * BLOCKS_PER_SPLIT, HIDDEN // BLOCK)
    for b in tl.range(split * BLOCKS_PER_SPLIT, end, num_stages=STAGES):
        column = b * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None] * (4 * HIDDEN) + column[None, :]
        x = x_ptr + start + at
        n0 = tl.load(x, inside, 0.0)
        n1 = tl.load(x + HIDDEN, inside, 0.0)
        n2 = tl.load(x + 2 * HIDDEN, inside, 0.0)
        n3 = tl.load(x + 3 * HIDDEN, inside, 0.0)
        if POST:
            x0 = n0.to(tl.float32)
            x1 = n1.to(tl.float32)
            x2 = n2.to(tl.float32)
            x3 = n3.to(tl.float32)
            o = o_ptr + first.to(tl.int64) * HIDDEN + row[:, None] * HIDDEN + column[None, :]
            o = tl.load(o, inside, 0.0).to(tl.float32)
            n0 = _spread(o, x0, x1, x2, x3, w0)
            n1 = _spread(o, x0, x1, x2, x3, w1)
            n2 = _spread(o, x0, x1, x2, x3, w2)
            n3 = _spread(o, x0, x1, x2, x3, w3)
            to = streams_ptr + start + at
            tl.store(to, n0, inside)
            tl.store(to + HIDDEN, n1, inside)
            tl.store(to + 2 * HIDDEN, n2, inside)
            tl.store(to + 3 * HIDDEN, n3, inside)
        x0 = n0.to(tl.float32)
        x1 = n1.to(tl.float32)
        x2 = n2.to(tl.float32)
        x3 = n3.to(tl.float32)
        square += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
        # The weight is stored with the four streams of a column side by side, so one product takes all of them:
        # element 4 c + s of a row is stream s of column c.
        n = tl.reshape(tl.join(tl.join(n0, n2), tl.join(n1, n3)), [TILE, 4 * BLOCK])
        k = b * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
        weight = fn_ptr + k[:, None] + mixes[None, :] * (4 * HIDDEN)
        mix = tl.dot(n, tl.load(weight, live_mix, 0.0), mix)
        mix = tl.dot(n, tl.load(weight + MIXES * 4 * HIDDEN, live_mix, 0.0), mix)

    mix = tl.where(mixes[None, :] == MIXES, tl.sum(square, 1)[:, None], mix)
    shares = shares_ptr + block.to(tl.int64) * (SPLITS * ROWS * WIDTH)
    share = shares + split * (ROWS * WIDTH) + row[:, None] * WIDTH + mixes[None, :]
    tl.store(share, mix, (row < ROWS)[:, None])
    if FINISH:
        sync.publish(mixes, AMD)
        arrived = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + block, 0)  # ready for the next launch
            for r in range(tl.minimum(ROWS, T - first)):
                _fold(
                    first + r,
                    streams_ptr,
                    shares + r * WIDTH,
                    scale_ptr,
                    base_ptr,
                    y_ptr,
                    norm_ptr,
                    codes_ptr,
                    group_scale_ptr,
                    rms_eps,
                    hc_eps,
                    norm_eps,
                    HIDDEN,
                    COLUMNS,
                    MIXES,
                    WIDTH,
                    SPLITS,
                    ROWS * WIDTH,
                    NORM,
                    QUANT,
                    NATIVE_FNUZ,
                )
            if MIXES > 4:
                _coefficients(
                    shares_ptr,
                    sums_ptr,
                    scale_ptr,
                    base_ptr,
                    post_ptr,
                    comb_ptr,
                    first,
                    T,
                    rms_eps,
                    hc_eps,
                    HIDDEN,
                    MIXES,
                    WIDTH,
                    SPLITS,
                    ROWS,
                    ROWS,
                    ITERATIONS,
                )


@triton.jit
def finish_kernel(
    T,
    streams_ptr,
    shares_ptr,
    sums_ptr,
    scale_ptr,
    base_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    norm_ptr,
    codes_ptr,
    group_scale_ptr,
    rms_eps,
    hc_eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIXES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
    AMD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The second half as a launch of its own: programs for the coefficients of TOKENS tokens each, then one per token
    for its fold, the youngest token first: its streams are what the launch before has left in the cache."""
    pid = tl.program_id(0)
    extra = tl.cdiv(T, TOKENS) if MIXES > 4 else 0
    if pid >= extra:
        token = T - 1 - (pid - extra)
        shares = shares_ptr + (token // ROWS).to(tl.int64) * (SPLITS * ROWS * WIDTH) + token % ROWS * WIDTH
        _fold(
            token,
            streams_ptr,
            shares,
            scale_ptr,
            base_ptr,
            y_ptr,
            norm_ptr,
            codes_ptr,
            group_scale_ptr,
            rms_eps,
            hc_eps,
            norm_eps,
            HIDDEN,
            COLUMNS,
            MIXES,
            WIDTH,
            SPLITS,
            ROWS * WIDTH,
            NORM,
            QUANT,
            NATIVE_FNUZ,
        )
    elif MIXES > 4:
        _coefficients(
            shares_ptr,
            sums_ptr,
            scale_ptr,
            base_ptr,
            post_ptr,
            comb_ptr,
            pid * TOKENS,
            T,
            rms_eps,
            hc_eps,
            HIDDEN,
            MIXES,
            WIDTH,
            SPLITS,
            ROWS,
            TOKENS,
            ITERATIONS,
        )


@triton.jit
def head_kernel(
    x_ptr,
    fn_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    y_ptr,
    rms_eps,
    hc_eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
):
    """The head's fold, one program per token with the whole row in registers; its weight is small enough for every
    program to read all of it from the cache."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    at = x_ptr + token * (4 * HIDDEN) + column
    x0 = tl.load(at, inside, 0.0).to(tl.float32)
    x1 = tl.load(at + HIDDEN, inside, 0.0).to(tl.float32)
    x2 = tl.load(at + 2 * HIDDEN, inside, 0.0).to(tl.float32)
    x3 = tl.load(at + 3 * HIDDEN, inside, 0.0).to(tl.float32)
    square = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 0)
    rstd = tl.rsqrt(square / (4 * HIDDEN) + rms_eps) * tl.load(scale_ptr)
    y = tl.zeros([COLUMNS], tl.float32)
    for m in tl.static_range(4):
        weight = fn_ptr + m * (4 * HIDDEN) + column
        mix = x0 * tl.load(weight, inside, 0.0) + x1 * tl.load(weight + HIDDEN, inside, 0.0)
        mix += x2 * tl.load(weight + 2 * HIDDEN, inside, 0.0) + x3 * tl.load(weight + 3 * HIDDEN, inside, 0.0)
        pre = tl.sigmoid(tl.sum(mix, 0) * rstd + tl.load(base_ptr + m)) + hc_eps
        y += pre * (x0 if m == 0 else x1 if m == 1 else x2 if m == 2 else x3)
    y = y.to(tl.bfloat16)
    if NORM:
        y = y.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / HIDDEN + norm_eps)
        y = (y * tl.load(norm_ptr + column, inside, 0.0).to(tl.float32)).to(tl.bfloat16)
    tl.store(y_ptr + token * HIDDEN + column, y, inside)


# --- launcher ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixing:
    """What a seam needs of its weights, prepared once.

    fn fp32 [m, 4 H], as it came. parts bf16 [2, m, H, 4]: fn as the sum of two bf16 numbers, exact to 2^-17 of each
    weight, with the streams of a column side by side. scale fp32 [3] and base fp32 [24], or [1] and [4] for the
    head. arrived int32: the counters of the token blocks, zero between launches; one seam at a time may use
    them, which holds because each seam of a model has its own.
    """

    fn: Tensor
    parts: Tensor
    scale: Tensor
    base: Tensor
    arrived: Tensor

    @property
    def mixes(self) -> int:
        return int(self.parts.shape[1])


def prepare(fn: Tensor, scale: Tensor, base: Tensor) -> Mixing:
    """Split fn fp32 [m, 4 H] (m = 24, or 4 for the head) for the matrix units.

    Raises ValueError for another number of streams or a hidden size that is no multiple of 64.
    """
    mixes, width = fn.shape
    if mixes not in (MIXES, STREAMS) or width % (STREAMS * 64) or width > STREAMS * _MAX_HIDDEN:
        raise ValueError(
            f"hyper-connection weight of shape {tuple(fn.shape)}: the kernels take {MIXES} mixes (or {STREAMS}, "
            f"the head) over {STREAMS} streams of a hidden size that is a multiple of 64, up to {_MAX_HIDDEN}"
        )
    fn = fn.float().contiguous()
    columns = fn.unflatten(1, (STREAMS, -1)).transpose(1, 2)
    high = columns.bfloat16()
    parts = torch.stack((high, (columns - high.float()).bfloat16()))
    arrived = torch.zeros(_COUNTERS, dtype=torch.int32, device=fn.device)
    return Mixing(fn, parts.contiguous(), scale.float(), base.float(), arrived)


@dataclass(frozen=True)
class Tiling:
    """How a seam is cut up: `rows` tokens per program in a matrix product of height `tile`, `block` columns of every
    stream per step, `splits` programs per token block; `one_launch` says who finishes."""

    tile: int
    rows: int
    block: int
    splits: int
    warps: int
    stages: int
    one_launch: bool


def tiling(tokens: int, hidden: int, target: Target) -> Tiling:
    """Tile of a seam. Decode splits H so that a token's weights arrive through many units; prefill does not."""
    if tokens <= _SPLIT_TOKENS:
        return Tiling(16, 1, 32, min(128, next_power_of_two(hidden // 32)), 4, 2, True)
    if tokens <= 128:
        tile = 16 if tokens <= 16 else 32
        room = max(8, 2 * target.compute_units // cdiv(max(tokens, 1), tile))
        splits = min(64, next_power_of_two(hidden // 32), next_power_of_two(room + 1) // 2)
        return Tiling(tile, tile, 32, splits, 4, 2, False)
    return Tiling(64, 64, 32, 8, 4, 2 if target.amd else 3, False)


@dataclass(frozen=True)
class Seam:
    """What comes out of a seam. streams bf16 [T, 4, H] (the input where there was no post); y bf16 [T, H], normed if a
    norm weight was given; post fp32 [T, 4] and comb fp32 [T, 4, 4] for the next post (empty for the head); codes uint8
    [T, H] (FNUZ) and scales fp32 [T, H / 128] of y if asked, else empty."""

    streams: Tensor
    y: Tensor
    post: Tensor
    comb: Tensor
    codes: Tensor
    scales: Tensor


def seam(
    x: Tensor,
    mixing: Mixing,
    *,
    layer_output: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    iterations: int = 20,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    quantise: bool = False,
    tile: Tiling | None = None,
) -> Seam:
    """Post of the last sub-layer (where its output is given), then pre of the next.

    x bf16 [T, 4, H]: residual streams. layer_output bf16 [T, H] with post fp32 [T, 4] and comb fp32 [T, 4, 4] of the
    seam before. norm_weight bf16 [H] folds the following RMSNorm in; `quantise` also gives y in FP8, for which
    H must be a multiple of 128. Raises ValueError for what the kernel does not take.
    """
    check_streams(x, mixing)
    tokens, _, hidden = x.shape
    if (layer_output is None) != (post is None) or (post is None) != (comb is None):
        raise ValueError(
            "layer_output, post and comb go together: they are the sub-layer that has just ended"
        )
    if quantise and hidden % GROUP:
        raise ValueError(f"the quantised output needs a hidden size divisible by {GROUP}, not {hidden}")
    target = target_of(x.device)
    t = tile or tiling(tokens, hidden, target)
    blocks = cdiv(tokens, t.rows)
    one_launch = t.one_launch and blocks <= _COUNTERS
    mixes = mixing.mixes
    width = 32 if mixes == MIXES else 16
    x = x.contiguous()
    device, bf16 = x.device, torch.bfloat16
    mixed, coded = tokens if mixes == MIXES else 0, tokens if quantise else 0
    out = Seam(
        streams=x if layer_output is None else empty(device, tokens, STREAMS, hidden, dtype=bf16),
        y=empty(device, tokens, hidden, dtype=bf16),
        post=empty(device, mixed, STREAMS),
        comb=empty(device, mixed, STREAMS, STREAMS),
        codes=empty(device, coded, hidden, dtype=torch.uint8),
        scales=empty(device, coded, hidden // GROUP),
    )
    shares = empty(device, blocks, t.splits, t.rows, width)
    last_part = (
        out.streams,
        shares,
        empty(device, mixed, width),
        mixing.scale,
        mixing.base,
        out.y,
        out.post,
        out.comb,
        out.y if norm_weight is None else norm_weight,
        out.codes,
        out.scales,
        rms_eps,
        hc_eps,
        norm_eps,
    )
    columns = next_power_of_two(hidden)
    shape = {
        "HIDDEN": hidden,
        "COLUMNS": columns,
        "MIXES": mixes,
        "WIDTH": width,
        "SPLITS": t.splits,
        "ROWS": t.rows,
        "ITERATIONS": iterations,
        "NORM": norm_weight is not None,
        "QUANT": quantise,
        "NATIVE_FNUZ": target.native_fnuz,
        "AMD": target.amd,
    }
    launch(
        seam_kernel,
        (blocks * t.splits,),
        tokens,
        x,
        x if layer_output is None else layer_output.contiguous(),
        mixing.scale if post is None else post.contiguous(),
        mixing.scale if comb is None else comb.contiguous(),
        mixing.parts,
        mixing.arrived,
        *last_part,
        target=target,
        warps=t.warps,
        **shape,
        POST=layer_output is not None,
        FINISH=one_launch,
        TILE=t.tile,
        BLOCK=t.block,
        BLOCKS_PER_SPLIT=cdiv(hidden // t.block, t.splits),
        STAGES=t.stages,
    )
    if not one_launch:
        # Coefficients: a lane per token where tokens are many, a program per token where they are few and their
        # shares many.
        each = 64 if tokens > 512 else 1
        warps = max(4, columns // (2048 if target.amd else 1024))
        grid = (tokens + (cdiv(tokens, each) if mixes == MIXES else 0),)
        launch(finish_kernel, grid, tokens, *last_part, target=target, warps=warps, **shape, TOKENS=each)
    return out


def check_streams(x: Tensor, mixing: Mixing) -> None:
    """Raises ValueError unless x is bf16 [T, 4, H] for the H of the weight."""
    hidden = mixing.parts.shape[2]
    if x.dtype != torch.bfloat16 or x.dim() != 3 or x.shape[1:] != (STREAMS, hidden):
        raise ValueError(
            f"residual streams of shape {tuple(x.shape)} and type {x.dtype} do not fit a mixing weight for "
            f"H = {hidden}: bf16 [T, {STREAMS}, {hidden}] is expected"
        )


def head(
    x: Tensor,
    mixing: Mixing,
    *,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    tile: Tiling | None = None,
) -> Tensor:
    """The streams folded for the model's last norm, and normed where its weight is given: bf16 [T, 4, H] -> [T, H].

    One launch up to 256 tokens: up to 4 of them as a seam, whose splits share a token's work. Beyond, or with a tile
    given, as a seam too. Raises ValueError as `seam` does, and for
    a mixing that is not a head's.
    """
    if mixing.mixes != STREAMS:
        raise ValueError(f"the head mixes {STREAMS} streams into one; this weight has {mixing.mixes} mixes")
    tokens, _, hidden = x.shape
    if tile is not None or tokens <= _SPLIT_TOKENS or tokens > _HEAD_TOKENS:
        made = seam(
            x, mixing, rms_eps=rms_eps, hc_eps=hc_eps, norm_weight=norm_weight, norm_eps=norm_eps, tile=tile
        )
        return made.y
    check_streams(x, mixing)
    target = target_of(x.device)
    x = x.contiguous()
    y = empty(x.device, tokens, hidden, dtype=torch.bfloat16)
    columns = next_power_of_two(hidden)
    launch(
        head_kernel,
        (tokens,),
        x,
        mixing.fn,
        mixing.scale,
        mixing.base,
        y if norm_weight is None else norm_weight,
        y,
        rms_eps,
        hc_eps,
        norm_eps,
        target=target,
        warps=min(16, max(4, columns // (512 if target.amd else 256))),
        HIDDEN=hidden,
        COLUMNS=columns,
        NORM=norm_weight is not None,
    )
    return y


def post(layer_output: Tensor, residual: Tensor, post_mix: Tensor, comb: Tensor) -> Tensor:
    """Post alone, after the last layer: bf16 [T, H], [T, 4, H], fp32 [T, 4], [T, 4, 4] -> bf16 [T, 4, H]."""
    tokens, streams, hidden = residual.shape
    target = target_of(residual.device)
    out = empty(residual.device, tokens, streams, hidden, dtype=torch.bfloat16)
    block = 512
    launch(
        post_kernel,
        (tokens, cdiv(hidden, block)),
        residual.contiguous(),
        layer_output.contiguous(),
        post_mix.contiguous(),
        comb.contiguous(),
        out,
        target=target,
        warps=2 if target.amd else 4,
        HIDDEN=hidden,
        BLOCK=block,
    )
    return out


@triton.jit
def post_kernel(x_ptr, o_ptr, post_ptr, comb_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    o = tl.load(o_ptr + token * HIDDEN + column, inside, 0.0).to(tl.float32)
    x = x_ptr + token * (4 * HIDDEN) + column
    x0 = tl.load(x, inside, 0.0).to(tl.float32)
    x1 = tl.load(x + HIDDEN, inside, 0.0).to(tl.float32)
    x2 = tl.load(x + 2 * HIDDEN, inside, 0.0).to(tl.float32)
    x3 = tl.load(x + 3 * HIDDEN, inside, 0.0).to(tl.float32)
    for j in tl.static_range(4):
        c = comb_ptr + token * 16 + j
        out = tl.load(post_ptr + token * 4 + j) * o + tl.load(c) * x0
        out += tl.load(c + 4) * x1 + tl.load(c + 8) * x2 + tl.load(c + 12) * x3
        to = out_ptr + token * (4 * HIDDEN) + j * HIDDEN + column
        tl.store(to, out.to(tl.bfloat16), inside)
