"""Queries and keys on their way into attention, in one launch: norms, RoPE, and the key's row into the window cache.

In: q bf16 [T, h, 512] from wq_b and kv bf16 [T, 512] from wkv. Out: q normed per head and rotated; the key normed,
rotated, quantised and written as a 584-byte cache row, without ever writing a NaN byte. Formulas:
`rocm_patches.reference.prologue`; layout: `rocm_patches.reference.kv_cache`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.kernels import formats
from rocm_patches.kernels.launch import cdiv, empty, launch, target_of

HEAD_DIM = 512


@triton.jit
def store_row(
    entry, cache_ptr, slot, page_stride, PAGE_ROWS: tl.constexpr, OCP: tl.constexpr, NATIVE_FNUZ: tl.constexpr
):
    """Write one rotated key, bf16 [512], as a row of an attention cache: 448 codes and 64 bf16 values in the page's
    data, seven scale bytes and a zero in its tail. The OCP dialect reads the same codes at half the scale."""
    page = slot // PAGE_ROWS
    offset = slot % PAGE_ROWS
    base = cache_ptr + page * page_stride
    data = base + offset * 576
    column = tl.arange(0, 512)
    codes, exponent = formats.quantise(entry.to(tl.float32), 8, 64, NATIVE_FNUZ)
    tl.store(data + column, tl.reshape(codes, [512]), column < 448)
    turned = (data + 448).to(tl.pointer_type(tl.bfloat16)) + (column - 448)
    tl.store(turned, entry, column >= 448)
    block = tl.arange(0, 8)
    byte = tl.minimum(tl.maximum(exponent + (126 if OCP else 127), 0), 255)
    scale = base + PAGE_ROWS * 576 + offset * 8 + block
    tl.store(scale, tl.where(block < 7, byte, 0).to(tl.uint8))


@triton.jit
def prologue_kernel(
    q_ptr,
    kv_ptr,
    gain_ptr,
    positions_ptr,
    table_ptr,
    out_ptr,
    cache_ptr,
    slots_ptr,
    slot_count,
    stride_q,
    stride_kv,
    page_stride,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    NORM: tl.constexpr,
    OCP: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
):
    """Program (token, block of heads), or (token, last) for the key."""
    token = tl.program_id(0).to(tl.int64)
    table = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * 64
    column = tl.arange(0, 512)
    if tl.program_id(1) < tl.num_programs(1) - 1:
        head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (head < HEADS)[:, None]
        at = head[:, None] * 512 + column[None, :]
        q = tl.load(q_ptr + token * stride_q + at, inside, 0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 1) / 512 + eps)[:, None]
        q = formats.turn_row(q, table, False, BLOCK, 512)
        tl.store(out_ptr + token * (HEADS * 512) + at, q.to(tl.bfloat16), inside)
    elif token < slot_count:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            kv = tl.load(kv_ptr + token * stride_kv + column).to(tl.float32)
            if NORM:
                kv = kv * tl.rsqrt(tl.sum(kv * kv, 0) / 512 + eps) * tl.load(gain_ptr + column).to(tl.float32)
            kv = tl.reshape(formats.turn_row(tl.reshape(kv, [1, 512]), table, False, 1, 512), [512])
            store_row(kv.to(tl.bfloat16), cache_ptr, slot, page_stride, PAGE_ROWS, OCP, NATIVE_FNUZ)


def prologue(
    q: Tensor,
    kv: Tensor,
    kv_gain: Tensor | None,
    positions: Tensor,
    table: Tensor,
    cache: Tensor,
    slots: Tensor,
    page_rows: int,
    *,
    eps: float = 1e-6,
    dialect: fp8.Dialect = fp8.FNUZ,
) -> Tensor:
    """Normed and rotated queries, bf16 [T, h, 512]; `cache` gets the key rows.

    q bf16 [T, h, 512] and kv bf16 [T, 512], rows contiguous; kv_gain [512] is kv_norm's weight, or None for a key that
    is normed already; positions int [T]; table fp32 [P, 64]; cache uint8 [pages, bytes], pages may be strided;
    slots int [<= T], -1 to skip. Raises ValueError for other shapes or types.
    """
    tokens, heads, width = q.shape
    if width != HEAD_DIM or kv.shape != (tokens, HEAD_DIM) or {q.dtype, kv.dtype} != {torch.bfloat16}:
        raise ValueError(
            f"queries {tuple(q.shape)} and keys {tuple(kv.shape)} of {q.dtype} and {kv.dtype}: bf16 [T, h, {HEAD_DIM}] "
            f"and [T, {HEAD_DIM}] are expected"
        )
    check_cache(cache, page_rows, 584)
    target = target_of(q.device)
    if q.stride(2) != 1 or q.stride(1) != HEAD_DIM:
        q = q.contiguous()
    if kv.stride(1) != 1:
        kv = kv.contiguous()
    out = empty(q.device, tokens, heads, HEAD_DIM, dtype=torch.bfloat16)
    block = 4
    launch(
        prologue_kernel,
        (tokens, cdiv(heads, block) + 1),
        q,
        kv,
        kv if kv_gain is None else kv_gain,
        positions,
        table,
        out,
        cache,
        slots,
        slots.shape[0],
        q.stride(0),
        kv.stride(0),
        cache.stride(0),
        eps,
        target=target,
        warps=2 if target.amd else 4,
        HEADS=heads,
        BLOCK=block,
        PAGE_ROWS=page_rows,
        NORM=kv_gain is not None,
        OCP=dialect is fp8.OCP,
        NATIVE_FNUZ=target.native_fnuz,
    )
    return out


def check_cache(cache: Tensor, page_rows: int, row_bytes: int) -> None:
    """Raises ValueError unless cache is uint8 [pages, bytes] with room for page_rows rows in contiguous pages."""
    if (
        cache.dtype != torch.uint8
        or cache.dim() != 2
        or cache.shape[1] < page_rows * row_bytes
        or cache.stride(1) != 1
    ):
        raise ValueError(
            f"cache of shape {tuple(cache.shape)} and type {cache.dtype}: uint8 [pages, bytes] with at least "
            f"{page_rows} x {row_bytes} bytes per page is expected"
        )
