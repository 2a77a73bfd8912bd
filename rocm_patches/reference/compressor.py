"""The KV compressor: gated pooling of `ratio` tokens into one cache entry.

Each token leaves a state row (values, and gate scores plus the position bias) in a small cache; the token
that completes a block pools the rows of its window per channel with a softmax over the gates, normalises,
rotates at the block's first position and stores the entry. Ratio 4 overlaps: its window is the previous and
the current block, through two sets of columns; ratio 128 has one block and one set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_patches.reference.kv_cache import Rows
from rocm_patches.reference.prologue import rms_norm
from rocm_patches.reference.rope import rotate


def save_state(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, state: Tensor, slots: Tensor
) -> None:
    """Write state rows [kv | score + ape[position mod ratio]].

    kv, score [T, w]; ape [ratio, w]; state fp32 [pages, page_rows, 2w] (changed in place); slots int64
    [<= T], -1 to skip.
    """
    n = slots.shape[0]
    live = slots >= 0
    rows, where = slots[live], positions[:n][live]
    row = torch.cat((kv[:n][live].float(), score[:n][live].float() + ape[where % ape.shape[0]]), -1)
    page_rows = state.shape[1]
    state[torch.div(rows, page_rows, rounding_mode="floor"), rows % page_rows] = row


def pool(state: Tensor, window_slots: Tensor, ratio: int) -> Tensor:
    """Pool the state rows of each window into one vector.

    state fp32 [pages, page_rows, 2 * coff * d]; window_slots int64 [N, W], oldest first, -1 before the
    sequence's start. W = ratio (coff 1) or 2 * ratio (coff 2: the older half uses the first d columns of
    values and gates, the newer half the last d). Returns fp32 [N, d].
    """
    page_rows = state.shape[1]
    known = window_slots >= 0
    safe = window_slots.clamp(min=0)
    rows = state[torch.div(safe, page_rows, rounding_mode="floor"), safe % page_rows]
    value, gate = rows.chunk(2, -1)  # [N, W, coff * d]
    if window_slots.shape[1] == 2 * ratio:
        (old_value, new_value), (old_gate, new_gate) = value.chunk(2, -1), gate.chunk(2, -1)
        value = torch.cat((old_value[:, :ratio], new_value[:, ratio:]), 1)
        gate = torch.cat((old_gate[:, :ratio], new_gate[:, ratio:]), 1)
    missing = ~known.unsqueeze(-1)
    weight = gate.masked_fill(missing, float("-inf")).softmax(1)
    # Uninitialised memory may hold NaN, and 0 x NaN is NaN: mask the values as well as the gates.
    return (weight * value.masked_fill(missing, 0.0)).sum(1)


def compress(
    state: Tensor,
    window_slots: Tensor,
    positions: Tensor,
    slots: Tensor,
    norm_weight: Tensor,
    eps: float,
    table: Tensor,
    cache: Tensor,
    page_rows: int,
    ratio: int,
    rows: Rows,
) -> None:
    """Pool, normalise, rotate and store the entries that complete at this step.

    window_slots int64 [n, W], positions int64 [>= n], slots int64 [>= n] of the entry's cache rows (-1 to
    skip). Acts where (position + 1) mod ratio == 0. Rotation is at the first position of the current block.
    """
    n = min(window_slots.shape[0], slots.shape[0])
    positions, slots = positions[:n], slots[:n]
    due = ((positions + 1) % ratio == 0) & (slots >= 0)
    entry = rms_norm(pool(state, window_slots[:n][due], ratio), eps, norm_weight)
    first = torch.div(positions[due], ratio, rounding_mode="floor") * ratio
    rows.write(cache, slots[due], rotate(entry, first, table), page_rows)
