"""Sparse attention with a sink over cache rows: window segment and compressed segment in one softmax.

Keys are values. Each head has one extra logit, the sink, that enters the denominator only. A query sees the
rows that its slot lists name, in any order; a row with no valid slot at all and a sink of -inf gives zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_patches.reference.kv_cache import Rows, read_table

# A slice of queries materialises [slice, rows, 512] fp32 keys; this bounds it to 8 MiB, which the allocator reuses
# and a processor's cache holds. With 256 MiB, 2,100 queries over 640 rows each took 11 to 16 s instead of 1.9 s (8
# heads, one thread of a virtual machine): the rest was page faults.
_SLICE_ELEMENTS = 1 << 21


def attend(q: Tensor, keys: Tensor, index: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention of every query over its own rows of a table.

    q [T, h, d], keys fp32 [U, d], index int64 [T, K] into keys, valid bool [T, K], sink fp32 [h].
    Returns fp32 [T, h, d].
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    step = max(1, _SLICE_ELEMENTS // max(1, index.shape[1] * keys.shape[1]))
    sink = sink.float().view(1, -1, 1)
    for a in range(0, q.shape[0], step):
        rows = keys[index[a : a + step]]
        score = scale * (q[a : a + step].float() @ rows.transpose(1, 2))
        score = score.masked_fill(~valid[a : a + step].unsqueeze(1), float("-inf"))
        top = torch.maximum(score.amax(-1, keepdim=True), sink)
        top = top.masked_fill(top == float("-inf"), 0.0)
        weight = (score - top).exp()
        total = weight.sum(-1, keepdim=True) + (sink - top).exp()
        out[a : a + step] = (weight @ rows) / total.masked_fill(total == 0, 1.0)
    return out


def sparse_attention(
    q: Tensor,
    window: tuple[Tensor, Tensor, int],
    compressed: tuple[Tensor, Tensor, int],
    sink: Tensor,
    scale: float,
    rows: Rows,
) -> Tensor:
    """Attention over two segments given as (cache uint8 [pages, bytes], slots int64 [T, K], page_rows).

    q [T, h, 512]; slots are global, -1 for "none"; the compressed segment may have K = 0. Returns fp32
    [T, h, 512].
    """
    tables, indices, valids, base = [], [], [], 0
    for cache, slots, page_rows in (window, compressed):
        if slots.shape[1] == 0:
            continue
        table, index = read_table(rows, cache, slots, page_rows)
        tables.append(table)
        indices.append(index + base)
        valids.append(slots >= 0)
        base += len(table)
    index, valid = torch.cat(indices, 1), torch.cat(valids, 1)
    used = valid.any(0)  # lists are as long as the longest context could make them
    used[:1] = True  # one column stays, for the sink
    return attend(q, torch.cat(tables), index[:, used], valid[:, used], sink, scale)
