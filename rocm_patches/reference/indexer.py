"""The indexer of ratio-4 layers: score every compressed entry cheaply, keep the best `topk`.

Queries and keys are e4m3 with power-of-two scales; a query's scale is folded into its head weight. No
Hadamard rotation: it is orthogonal and only matters for FP4 (vLLM and transformers leave it out too).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.reference.kv_cache import INDEX_DIM, Rows, read_table
from rocm_patches.reference.rope import rotate

# Bounds what one slice of queries materialises ([slice, entries, 128] keys, [slice, heads, entries] products)
# to 8 MiB of fp32, for the reason that attention.py gives.
_SLICE_ELEMENTS = 1 << 21


def quantise_query(
    q: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    dialect: fp8.Dialect = fp8.OCP,
) -> tuple[Tensor, Tensor]:
    """Rotate and quantise indexer queries.

    q [T, n, 128], weights [T, n]. Returns codes uint8 [T, n, 128] and fp32 [T, n] weights times the
    query's scale, `softmax_scale` and `head_scale`.
    """
    turned = rotate(q, positions, table).to(torch.bfloat16)
    codes, exponent = fp8.quantise_ue8m0(turned, INDEX_DIM, dialect)
    scale = fp8.power_of_two(exponent.squeeze(-1))
    return codes, weights.float() * scale * softmax_scale * head_scale


def paged_logits(
    q: Tensor,
    weights: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    cache: Tensor,
    page_rows: int,
    max_length: int,
    rows: Rows,
) -> Tensor:
    """score[b, t] = sum_h weights[b, h] * relu(q[b, h] . k_t) for t < lengths[b], else -inf.

    q fp32 [B, n, 128] (decoded), weights fp32 [B, n], lengths int [B] in entries, page_table int
    [B, pages]. Returns fp32 [B, max_length].
    """
    out = q.new_full((q.shape[0], max_length), float("-inf"))
    used = min(int(lengths.max()) if lengths.numel() else 0, max_length)
    if used <= 0:
        return out
    entry = torch.arange(used, device=q.device)
    pages = page_table[:, torch.div(entry, page_rows, rounding_mode="floor")].long()
    slots = pages * page_rows + entry % page_rows
    live = entry < lengths.unsqueeze(1)
    keys, index = read_table(rows, cache, slots.masked_fill(~live, -1), page_rows)
    step = max(1, _SLICE_ELEMENTS // (used * INDEX_DIM))
    for a in range(0, q.shape[0], step):
        dots = q[a : a + step] @ keys[index[a : a + step]].transpose(1, 2)  # [b, n, used]
        score = (weights[a : a + step].unsqueeze(1) @ dots.relu()).squeeze(1)
        out[a : a + step, :used] = score.masked_fill(~live[a : a + step], float("-inf"))
    return out


def prefill_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """score[m, n] = sum_h weights[m, h] * relu(q[m, h] . k_n) * scale_n for starts[m] <= n < ends[m].

    q e4m3 [M, n_heads, 128] and kv = (keys e4m3 [N, 128], scales fp32 with N elements), in the dialect of
    their dtypes; weights fp32 [M, n_heads]; starts, ends int [M]. Returns fp32 [M, N], -inf outside.
    Memory beyond inputs and result: 2 x 8 MiB, however many queries, heads and keys.
    """
    keys, scales = kv[0].float(), kv[1].float().reshape(-1)
    out = keys.new_empty((q.shape[0], keys.shape[0]))
    key_step = max(1, min(keys.shape[0], _SLICE_ELEMENTS // q.shape[1]))
    row_step = max(1, _SLICE_ELEMENTS // (q.shape[1] * key_step))
    for a in range(0, q.shape[0], row_step):
        rows = slice(a, a + row_step)
        queries, row_weights = q[rows].float(), weights[rows].float().unsqueeze(1)
        for b in range(0, keys.shape[0], key_step):
            columns = slice(b, b + key_step)
            dots = (queries @ keys[columns].T).relu_()  # [m, n_heads, n]
            out[rows, columns] = (row_weights @ dots).squeeze(1) * scales[columns]
    entry = torch.arange(keys.shape[0], device=q.device)
    outside = (entry < starts.unsqueeze(1)) | (entry >= ends.unsqueeze(1))
    return out.masked_fill_(outside, float("-inf"))


def topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores among the first lengths[b] of each row, best first.

    scores fp32 [B, L]; ties go to the lower index. Returns int32 [B, k], -1 where a row has fewer.
    """
    column = torch.arange(scores.shape[1], device=scores.device)
    masked = scores.masked_fill(column >= lengths.unsqueeze(1), float("-inf"))
    order = masked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    order = torch.nn.functional.pad(order, (0, k - order.shape[1]), value=-1)
    rank = torch.arange(k, device=scores.device)
    return order.masked_fill(rank >= lengths.unsqueeze(1), -1).int()


def to_slots(index: Tensor, page_table: Tensor, page_rows: int) -> Tensor:
    """Global slots int64 of per-request entry indices: index int [B, k] with -1, page_table [B, pages]."""
    safe = index.clamp(min=0).long()
    page = page_table.long().gather(1, torch.div(safe, page_rows, rounding_mode="floor"))
    return torch.where(index < 0, -1, page * page_rows + safe % page_rows)
