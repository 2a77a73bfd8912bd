"""Attention's way out in FP8: inverse RoPE, quantisation per 128 columns, and the grouped low-rank product (wo_a).

In: attention output o bf16 [T, h, 512] and FNUZ weights with power-of-two scales per 128 x 128 block, converted
once from the checkpoint's OCP bytes without changing a value. Out: z bf16 [T, G, R]. Reading the weight in FP8
halves the bytes of the bf16 copy that vLLM keeps instead. Small batches do it all in one launch, larger ones
quantise first. Formulas: `rocm_patches.reference.output`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.kernels import formats, sync
from rocm_patches.kernels.launch import Target, cdiv, empty, launch, next_power_of_two, target_of

GROUP = 128
HEAD_DIM = 512
# Up to here every program quantises the rows it needs itself, which costs less than a launch.
_FUSED_TOKENS = 16
COUNTERS = 4096


# --- device code ------------------------------------------------------------------------------------


@triton.jit
def quantise_kernel(
    o_ptr,
    positions_ptr,
    table_ptr,
    codes_ptr,
    scales_ptr,
    stride_token,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
):
    """Program (token, block of heads): undo the rotation, quantise in groups of 128."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, 512)
    inside = (head < HEADS)[:, None]
    x = tl.load(o_ptr + token * stride_token + head[:, None] * 512 + column[None, :], inside, 0.0)
    x = x.to(tl.float32)
    if ROTATE:
        table = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * 64
        x = formats.turn_row(x, table, True, BLOCK, 512)
    codes, exponent = formats.quantise(tl.reshape(x, [BLOCK * 512]), BLOCK * 4, 128, NATIVE_FNUZ)
    to = codes_ptr + token * (HEADS * 512) + head[:, None] * 512 + column[None, :]
    tl.store(to, tl.reshape(codes, [BLOCK, 512]), inside)
    group = tl.program_id(1) * (BLOCK * 4) + tl.arange(0, BLOCK * 4)
    scale = formats.power_of_two(exponent)
    tl.store(scales_ptr + token * (HEADS * 4) + group, scale, group < HEADS * 4)


@triton.jit
def product_kernel(
    T,
    o_ptr,
    positions_ptr,
    table_ptr,
    codes_ptr,
    scales_ptr,
    weight_ptr,
    weight_scale_ptr,
    parts_ptr,
    arrived_ptr,
    z_ptr,
    stride_token,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    FUSED: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    NATIVE_FNUZ: tl.constexpr,
    AMD: tl.constexpr,
):
    """Program (split of K and token block, block of a group's R outputs, group). BLOCK divides 128, so a step of 128
    columns has one weight scale; STEPS is their number, rounded up to a power of two.

    FUSED: quantise the rows of o here; otherwise their codes and scales are given. WEIGHT_FIRST: the product is taken
    as weight times activations, because the weight is the tall operand when tokens are few. The split that
    arrives last adds the parts up, in their order.
    """
    split = tl.program_id(0) % SPLITS
    tokens = tl.program_id(0) // SPLITS
    row = tokens * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(2)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = row < T
    inside = live[:, None]
    k = tl.arange(0, 128)
    token = row.to(tl.int64)
    weight = weight_ptr + (group * RANK + output)[:, None] * DEPTH + k[None, :]
    weight_scale = weight_scale_ptr + (group * (RANK // 128) + tl.program_id(1) * BLOCK // 128) * (
        DEPTH // 128
    )
    if FUSED:
        o = o_ptr + (token * stride_token)[:, None] + group * DEPTH + k[None, :]
        # The last group of a head ends in its 64 rotated columns. A pair turns by its angle there, by zero elsewhere.
        pair = tl.arange(0, 64) - 32
        turning = inside & (pair >= 0)[None, :]
        table = table_ptr + (tl.load(positions_ptr + row, live, 0).to(tl.int64) * 64)[:, None] + pair[None, :]
        cos = tl.load(table, turning, 1.0)
        sin = tl.load(table + 32, turning, 0.0)
    else:
        codes = codes_ptr + (token * (GROUPS * DEPTH))[:, None] + group * DEPTH + k[None, :]
        scales = scales_ptr + token * (GROUPS * DEPTH // 128) + group * (DEPTH // 128)
    # Every scale is loaded before the loop: a load that feeds no product would not be pipelined and its latency
    # would be paid at every step.
    steps = tl.arange(0, STEPS)
    factors = tl.load(weight_scale + steps, steps < DEPTH // 128, 0.0)[None, :]
    if not FUSED:
        known = inside & (steps < DEPTH // 128)[None, :]
        factors = tl.load(scales[:, None] + steps[None, :], known, 0.0) * factors
    acc = tl.zeros([BLOCK, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK], tl.float32)
    each: tl.constexpr = (DEPTH // 128 + SPLITS - 1) // SPLITS
    end = tl.minimum((split + 1) * each, DEPTH // 128)
    for step in tl.range(split * each, end, num_stages=STAGES):
        w = formats.as_float8(tl.load(weight + step * 128), NATIVE_FNUZ)
        factor = tl.sum(tl.where(steps[None, :] == step, factors, 0.0), 1)
        if FUSED:
            x = tl.load(o + step * 128, inside, 0.0).to(tl.float32)
            if ROTATE:
                a, b = tl.split(tl.reshape(x, [ROWS, 64, 2]))
                last = step % 4 == 3
                a, b = formats.turn(a, b, tl.where(last, cos, 1.0), tl.where(last, -sin, 0.0))
                x = tl.reshape(tl.join(a, b), [ROWS, 128])
            exponent = formats.scale_exponent(tl.maximum(tl.max(tl.abs(x), 1), 1e-4))
            x = formats.encode(x * formats.power_of_two(-exponent)[:, None], NATIVE_FNUZ)
            factor *= formats.power_of_two(exponent)
        else:
            x = tl.load(codes + step * 128, inside, 0)
        x = formats.as_float8(x, NATIVE_FNUZ)
        if WEIGHT_FIRST:
            acc += tl.dot(w, tl.trans(x)) * factor[None, :]
        else:
            acc += tl.dot(x, tl.trans(w)) * factor[:, None]
    if not NATIVE_FNUZ:
        acc *= 0.25  # both operands were read as OCP, which doubles each
    z = z_ptr + group * RANK
    if WEIGHT_FIRST:
        z = z + (token * (GROUPS * RANK))[None, :] + output[:, None]
        inside = live[None, :]
        cell = tl.arange(0, BLOCK)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    else:
        z = z + (token * (GROUPS * RANK))[:, None] + output[None, :]
        cell = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if SPLITS == 1:
        tl.store(z, acc.to(tl.bfloat16), inside)
    else:
        tile = (tokens * GROUPS + group) * (RANK // BLOCK) + tl.program_id(1)
        parts = parts_ptr + tile.to(tl.int64) * (SPLITS * BLOCK * ROWS) + cell
        tl.store(parts + split * (BLOCK * ROWS), acc)
        sync.publish(output, AMD)
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + tile, 0)  # ready for the next launch
            acc = tl.load(parts)
            for s in tl.static_range(1, SPLITS):
                acc += tl.load(parts + s * (BLOCK * ROWS))
            tl.store(z, acc.to(tl.bfloat16), inside)


# --- launcher ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Projection:
    """wo_a as the kernels read it: FNUZ codes uint8 [G, R, K] and fp32 scales [G, R / 128, K / 128]. arrived int32:
    counters of output tiles, zero between launches; one product at a time may use them."""

    codes: Tensor
    scales: Tensor
    arrived: Tensor


def prepare(weight: Tensor, scale: Tensor, groups: int) -> Projection:
    """wo_a as FNUZ codes; every value stays. weight: e4m3fn, which is converted, or e4m3fnuz, which vLLM has converted
    while loading; [G * R, K] with scales fp32 or e8m0 [G * R / 128, K / 128].

    Raises ValueError for NaN codes or scales (fp8.ocp_to_fnuz) and for shapes that are not whole blocks.
    """
    rows, depth = weight.shape
    if (
        rows % groups
        or rows // groups % GROUP
        or depth % HEAD_DIM
        or scale.shape != (rows // GROUP, depth // GROUP)
    ):
        raise ValueError(
            f"wo_a of shape {tuple(weight.shape)} with scales {tuple(scale.shape)} in {groups} groups: each group "
            f"needs a multiple of {GROUP} rows, and heads of {HEAD_DIM} columns with one scale per {GROUP} x {GROUP}"
        )
    if weight.dtype == torch.float8_e4m3fnuz:
        codes, doubled = weight.view(torch.uint8), scale
    else:
        codes, doubled = fp8.ocp_to_fnuz(weight, scale)
    if doubled.dtype != torch.float32:
        doubled = fp8.decode_e8m0(doubled)
    return Projection(
        codes.view(torch.uint8).view(groups, rows // groups, depth).contiguous(),
        doubled.view(groups, rows // groups // GROUP, depth // GROUP).contiguous(),
        torch.zeros(COUNTERS, dtype=torch.int32, device=weight.device),
    )


@dataclass(frozen=True)
class Tiling:
    """rows x block outputs per program, K in `splits` parts; `fused`: one launch, quantising inside."""

    rows: int
    block: int
    splits: int
    warps: int
    stages: int
    fused: bool


def tiling(tokens: int, groups: int, rank: int, target: Target) -> Tiling:
    """Small batches are bound by the weight's bytes and by latency: many programs with few steps each. Large ones by
    the matrix units."""
    if tokens <= 128:
        rows = 16 if tokens <= _FUSED_TOKENS else 64 if tokens > 32 else 32
        tiles = cdiv(max(tokens, 1), rows) * groups * rank // 64
        fused = tokens <= _FUSED_TOKENS
        room = (4 if fused else 2) * target.compute_units // tiles
        splits = min(16, max(1, next_power_of_two(room + 1) // 2))
        return Tiling(rows, 64, splits, 4, 3 if fused or target.amd else 4, fused)
    return Tiling(128, 128, 1, 8, 2 if target.amd else 4, False)


def project(
    o: Tensor,
    projection: Projection,
    positions: Tensor,
    table: Tensor,
    *,
    rotated: bool = False,
    tile: Tiling | None = None,
) -> Tensor:
    """z = quantise(inverse_rope(o)) wo_a^T per group: bf16 [T, G, R].

    o bf16 [T, h, 512], rows contiguous; positions int [T]; table fp32 [P, 64]. `rotated` says that the rotation has
    been undone already. Raises ValueError where heads and groups do not fit.
    """
    tokens, heads, width = o.shape
    groups, rank, depth = projection.codes.shape
    if width != HEAD_DIM or heads * width != groups * depth or o.dtype != torch.bfloat16:
        raise ValueError(
            f"attention output {tuple(o.shape)} of {o.dtype} does not fit a projection of {groups} groups of {depth} "
            f"columns: bf16 [T, {groups * depth // HEAD_DIM}, {HEAD_DIM}] is expected"
        )
    target = target_of(o.device)
    t = tile or tiling(tokens, groups, rank, target)
    tiles = cdiv(tokens, t.rows) * groups * (rank // t.block)
    if t.splits > 1 and tiles > COUNTERS:
        t = replace(t, splits=1)
    if o.stride(2) != 1 or o.stride(1) != HEAD_DIM:
        o = o.contiguous()
    coded = 0 if t.fused else tokens
    codes = empty(o.device, coded, heads * width, dtype=torch.uint8)
    scales = empty(o.device, coded, heads * width // GROUP)
    z = empty(o.device, tokens, groups, rank, dtype=torch.bfloat16)
    parts = empty(o.device, tiles if t.splits > 1 else 0, t.splits, t.block, t.rows)
    if not t.fused:
        launch(
            quantise_kernel,
            (tokens, cdiv(heads, 4)),
            o,
            positions,
            table,
            codes,
            scales,
            o.stride(0),
            target=target,
            warps=2 if target.amd else 4,
            HEADS=heads,
            BLOCK=4,
            ROTATE=not rotated,
            NATIVE_FNUZ=target.native_fnuz,
        )
    launch(
        product_kernel,
        (cdiv(tokens, t.rows) * t.splits, rank // t.block, groups),
        tokens,
        o,
        positions,
        table,
        codes,
        scales,
        projection.codes,
        projection.scales,
        parts,
        projection.arrived,
        z,
        o.stride(0),
        target=target,
        warps=t.warps,
        GROUPS=groups,
        RANK=rank,
        DEPTH=depth,
        FUSED=t.fused,
        ROTATE=not rotated,
        ROWS=t.rows,
        BLOCK=t.block,
        SPLITS=t.splits,
        STEPS=next_power_of_two(depth // GROUP),
        STAGES=t.stages,
        WEIGHT_FIRST=t.rows < 64,
        NATIVE_FNUZ=target.native_fnuz,
        AMD=target.amd,
    )
    return z
