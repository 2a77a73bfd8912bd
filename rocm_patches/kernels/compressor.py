"""The KV compressor in one launch, decode and prefill alike: state rows saved, entries that complete pooled, normed,
rotated, quantised and written.

In: the fp32 scores of the step's tokens and the state of earlier ones. A window that begins before this step reads
those rows from the state cache; rows of this step are read from the scores themselves, so no program waits for
another one's state. Out: state rows, and 584-byte or 132-byte cache rows in the dialect their reader expects.
Formulas: `rocm_patches.reference.compressor`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.kernels import formats
from rocm_patches.kernels.launch import launch, target_of
from rocm_patches.kernels.prologue import check_cache, store_row


@triton.jit
def store_key(
    entry, cache_ptr, slot, page_stride, PAGE_ROWS: tl.constexpr, OCP: tl.constexpr, NATIVE_FNUZ: tl.constexpr
):
    """Write one rotated indexer key, bf16 [128], as 128 codes in the page's data and one fp32 scale in its tail."""
    offset = slot % PAGE_ROWS
    base = cache_ptr + slot // PAGE_ROWS * page_stride
    codes, exponent = formats.quantise(entry.to(tl.float32), 1, 128, NATIVE_FNUZ)
    tl.store(base + offset * 128 + tl.arange(0, 128), tl.reshape(codes, [128]))
    scale = (base + PAGE_ROWS * 128 + offset * 4).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1)
    tl.store(scale, formats.power_of_two(exponent - (1 if OCP else 0)))


@triton.jit
def compress_kernel(
    scores_ptr,
    ape_ptr,
    positions_ptr,
    requests_ptr,
    state_ptr,
    state_slots_ptr,
    block_table_ptr,
    gain_ptr,
    table_ptr,
    cache_ptr,
    cache_slots_ptr,
    stride_scores,
    stride_page,
    stride_row,
    stride_table,
    page_stride,
    eps,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    OCP: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
):
    """Program per token. A row is [values | gates], each (1 + OVERLAP) DIM wide; the older half of an overlapping
    window uses the first DIM columns of both, the newer half the last."""
    WIDTH: tl.constexpr = (2 if OVERLAP else 1) * DIM
    WINDOW: tl.constexpr = (2 if OVERLAP else 1) * RATIO
    token = tl.program_id(0)
    slot = tl.load(state_slots_ptr + token).to(tl.int64)
    if slot >= 0:
        position = tl.load(positions_ptr + token).to(tl.int32)
        wide = tl.arange(0, WIDTH)
        mine = scores_ptr + token.to(tl.int64) * stride_scores + wide
        to = state_ptr + slot // STATE_ROWS * stride_page + slot % STATE_ROWS * stride_row + wide
        tl.store(to, tl.load(mine))
        tl.store(to + WIDTH, tl.load(mine + WIDTH) + tl.load(ape_ptr + position % RATIO * WIDTH + wide))
        target = tl.load(cache_slots_ptr + token).to(tl.int64)
        if ((position + 1) % RATIO == 0) & (target >= 0):
            request = tl.load(requests_ptr + token)
            column = tl.arange(0, DIM)
            top = tl.full([DIM], float("-inf"), tl.float32)
            total = tl.zeros([DIM], tl.float32)
            pooled = tl.zeros([DIM], tl.float32)
            for start in range(0, WINDOW, ROWS):
                row = start + tl.arange(0, ROWS)
                where = position - WINDOW + 1 + row
                known = where >= 0
                source = token - WINDOW + 1 + row
                fresh = known & (source >= 0)
                fresh = fresh & (tl.load(requests_ptr + source, fresh, -1) == request)
                fresh = fresh & (tl.load(positions_ptr + source, fresh, -1).to(tl.int32) == where)
                old = known & (fresh == 0)
                page = tl.load(block_table_ptr + request * stride_table + where // STATE_ROWS, old, 0).to(
                    tl.int64
                )
                first = tl.where(row >= RATIO, DIM, 0) if OVERLAP else row * 0
                first = first[:, None] + column[None, :]
                # Two masked loads rather than one through a chosen pointer: AMD's backend cannot select pointers
                # of different origin (Triton 3.6).
                fresh, old = fresh[:, None], old[:, None]
                here = scores_ptr + source.to(tl.int64)[:, None] * stride_scores + first
                there = (
                    state_ptr
                    + page[:, None] * stride_page
                    + (where % STATE_ROWS)[:, None] * stride_row
                    + first
                )
                value = tl.where(fresh, tl.load(here, fresh, 0.0), tl.load(there, old, 0.0))
                bias = tl.load(ape_ptr + (where % RATIO)[:, None] * WIDTH + first, fresh, 0.0)
                gate = tl.load(here + WIDTH, fresh, 0.0) + bias
                gate = tl.where(fresh, gate, tl.load(there + WIDTH, old, float("-inf")))
                higher = tl.maximum(top, tl.max(gate, 0))
                # Before the sequence's start a whole tile may be -inf: exp(-inf - -inf) would be NaN.
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weight = tl.exp(gate - shift[None, :])
                keep = tl.exp(top - shift)
                total = total * keep + tl.sum(weight, 0)
                pooled = pooled * keep + tl.sum(weight * value, 0)
                top = higher
            entry = pooled / total
            entry = entry * tl.rsqrt(tl.sum(entry * entry, 0) / DIM + eps)
            entry = entry * tl.load(gain_ptr + column).to(tl.float32)
            table = table_ptr + (position // RATIO * RATIO).to(tl.int64) * 64
            entry = tl.reshape(formats.turn_row(tl.reshape(entry, [1, DIM]), table, False, 1, DIM), [DIM])
            # A NaN of one token must not reach all that attend to its entry; codes never hold one (formats).
            entry = tl.where(entry == entry, entry, 0.0).to(tl.bfloat16)
            if DIM == 512:
                store_row(entry, cache_ptr, target, page_stride, PAGE_ROWS, OCP, NATIVE_FNUZ)
            else:
                store_key(entry, cache_ptr, target, page_stride, PAGE_ROWS, OCP, NATIVE_FNUZ)


def compress(
    scores: Tensor,
    ape: Tensor,
    positions: Tensor,
    requests: Tensor,
    state: Tensor,
    state_slots: Tensor,
    block_table: Tensor,
    gain: Tensor,
    table: Tensor,
    cache: Tensor,
    cache_slots: Tensor,
    page_rows: int,
    *,
    ratio: int,
    eps: float = 1e-6,
    dialect: fp8.Dialect = fp8.OCP,
) -> None:
    """Save the state of a step's tokens and write the entries that complete.

    scores fp32 [T, 2 w], values then gates; ape fp32 [ratio, w]; positions int [T]; requests int [T], the
    token's row of `block_table` int [R, n] (state pages); the tokens of a request follow each other. state fp32
    [pages, page_rows, 2 w], changed in place; state_slots int [N], N <= T, -1 to skip a token. gain [d]; table fp32
    [P, 64]; cache uint8 [pages, bytes]; cache_slots int [N], -1 for no entry. w = d for ratio 128, 2 d for ratio
    4; d = 512 writes attention rows, d = 128 indexer keys. Raises ValueError for other shapes.
    """
    width = scores.shape[1] // 2
    overlap = ratio == 4
    dim = width // 2 if overlap else width
    if (
        ratio not in (4, 128)
        or dim not in (128, 512)
        or ape.shape != (ratio, width)
        or state.shape[2] != 2 * width
    ):
        raise ValueError(
            f"compressor scores {tuple(scores.shape)}, position bias {tuple(ape.shape)}, state {tuple(state.shape)}: "
            "ratio 4 takes widths of 2 x 512 or 2 x 128, ratio 128 of 512, and state rows of values and gates"
        )
    check_cache(cache, page_rows, 584 if dim == 512 else 132)
    target = target_of(scores.device)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    launch(
        compress_kernel,
        (state_slots.shape[0],),
        scores,
        ape,
        positions,
        requests,
        state,
        state_slots,
        block_table,
        gain,
        table,
        cache,
        cache_slots,
        scores.stride(0),
        state.stride(0),
        state.stride(1),
        block_table.stride(0),
        cache.stride(0),
        eps,
        target=target,
        warps=4 if dim == 512 else 1,
        DIM=dim,
        RATIO=ratio,
        OVERLAP=overlap,
        ROWS=8,
        STATE_ROWS=state.shape[1],
        PAGE_ROWS=page_rows,
        OCP=dialect is fp8.OCP,
        NATIVE_FNUZ=target.native_fnuz,
    )
