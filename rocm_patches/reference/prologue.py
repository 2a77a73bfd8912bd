"""Query and key preparation of one attention layer: normalise, rotate, and put the key into the window cache.

In: projected queries and the already kv_norm-ed key (DeepSeek-V4 has one key head, and value = key). Out:
queries ready for attention; the key's row is in the cache, where attention reads even its own token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_patches.reference.kv_cache import Rows
from rocm_patches.reference.rope import rotate


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension in fp32, times `weight` when given."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.float()


def query(q: Tensor, positions: Tensor, table: Tensor, padded_heads: int, eps: float) -> Tensor:
    """Per-head RMS norm without gain, then RoPE.

    q [T, h, 512] -> [T, padded_heads, 512] in q's dtype; heads past h are zero.
    """
    out = rotate(rms_norm(q, eps), positions, table).to(q.dtype)
    return F.pad(out, (0, 0, 0, padded_heads - q.shape[1]))


def insert_key(
    kv: Tensor, positions: Tensor, table: Tensor, cache: Tensor, slots: Tensor, page_rows: int, rows: Rows
) -> None:
    """Rotate kv [T, 512] and write the rows whose slot (int64 [<= T]) is >= 0 into `cache`."""
    live = slots >= 0
    n = slots.shape[0]
    turned = rotate(kv[:n][live], positions[:n][live], table)
    rows.write(cache, slots[live], turned, page_rows)
