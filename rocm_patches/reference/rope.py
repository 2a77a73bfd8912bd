"""Rotary position embedding on the last 64 dimensions, interleaved pairs, and its inverse.

The table is fp32 [positions, 64]: 32 cosines, then 32 sines; YaRN is already in it. One table serves the
window layers and another the compressed layers (vllm/models/deepseek_v4/common/rope.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROPE_DIM = 64


def rotate(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 64 dimensions of x by the angle of each row's position; copy the others.

    x [T, ..., d] with d >= 64, positions int [T], table fp32 [P, 64]. A pair (a, b) becomes
    (a cos - b sin, b cos + a sin); `inverse` turns the other way. Returns fp32, same shape.
    """
    x = x.float()
    cos, sin = table[positions].float().chunk(2, -1)
    if inverse:
        sin = -sin
    between = (1,) * (x.dim() - 2)
    cos, sin = (t.view(t.shape[0], *between, t.shape[-1]) for t in (cos, sin))
    a, b = x[..., -ROPE_DIM:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :-ROPE_DIM], turned), -1)
