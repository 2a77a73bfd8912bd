"""Attention's way out: undo the rotation at the query's position, then the grouped low-rank projection.

Values carry RoPE because they are the keys; leaving the inverse rotation out is wrong, not approximate.
"""

from __future__ import annotations

from torch import Tensor

from rocm_patches.reference.rope import rotate


def inverse_rotate(o: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """o [T, h, 512] -> fp32 [T, h, 512], last 64 dimensions turned back by each token's angle."""
    return rotate(o, positions, table, inverse=True)


def grouped_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [G, T, K], weight [G, R, K] -> fp32 [G, T, R], one product per group (wo_a)."""
    return x.float() @ weight.float().transpose(1, 2)
