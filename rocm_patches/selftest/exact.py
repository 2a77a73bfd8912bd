"""DeepSeek-V4's operators in float64, written for reading, from the published definitions and independent of
`rocm_patches.reference`, `fp8` and every kernel, so that an error there cannot hide behind the same one here.

Formulas: transformers 5.19 `models/deepseek_v4` and https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro; formats: the
OCP specifications of 8-bit floating point and of microscaling formats. Everything takes and returns float64 tensors
unless it says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

# dialect -> (exponent bias, largest value that is used). 224: see docs/architecture.md and fp8.py.
E4M3 = {"ocp": (7, 448.0), "fnuz": (8, 224.0)}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^n for integers n, from its bits: pow and ldexp are not exact on a GPU, even for whole numbers."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def e4m3_values(dialect: str, device: torch.device) -> Tensor:
    """The values of all 256 bytes [256]: (8 + m) 2^(e - bias - 3), or m 2^(1 - bias - 3) for e = 0."""
    bias, _ = E4M3[dialect]
    byte = torch.arange(256, device=device)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).double()
    normal = (8 + mantissa) * power_of_two(exponent - bias - 3)
    value = torch.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias - 3))
    value = torch.where(byte >= 128, -value, value)
    nan = (byte & 127) == 127 if dialect == "ocp" else byte == 128
    return value.masked_fill(nan, float("nan"))


def quantised(x: Tensor, block: int, dialect: str) -> Tensor:
    """x [..., n block] as e4m3 with one power of two per block holds it: the value after one rounding."""
    _, limit = E4M3[dialect]
    parts = x.unflatten(-1, (-1, block))
    amax = parts.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(amax / limit)  # mantissa in [1/2, 1): a half means a power of two
    scale = power_of_two(exponent - (mantissa == 0.5).int())
    grid = e4m3_values(dialect, x.device)[:128]
    grid = grid[grid <= limit]
    magnitude = (parts / scale).abs().clamp(max=limit)
    above = torch.searchsorted(grid, magnitude.contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    to_high, to_low = high - magnitude, magnitude - low
    # Of two equally near values the one with the even code: codes count up from 0.
    up = (to_high < to_low) | ((to_high == to_low) & (above % 2 == 0))
    return (torch.where(up, high, low) * parts.sign() * scale).flatten(-2)


def mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes uint8 [..., n] (one a byte) with a scale byte per 32 [..., n / 32] -> values [..., n]."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=codes.device)
    return table[codes.long()] * power_of_two(scale.int() - 127).repeat_interleave(32, -1)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def rotated(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """The last 64 of x [T, ..., d] as 32 complex numbers times cos +- i sin; table [P, 64] = cosines, sines."""
    cos, sin = table[positions].double().chunk(2, -1)
    turn = torch.complex(cos, -sin if inverse else sin).view(len(x), *(1,) * (x.dim() - 2), 32)
    tail = torch.view_as_complex(x[..., -64:].unflatten(-1, (32, 2)).contiguous())
    return torch.cat((x[..., :-64], torch.view_as_real(tail * turn).flatten(-2)), -1)


def mixes(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """x [T, 4, H], fn [m, 4 H] -> [T, m]."""
    flat = x.flatten(1)
    return flat @ fn.T / (flat.square().mean(-1, keepdim=True) + eps).sqrt()


def mhc_pre(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(layer input [T, H], post [T, 4], comb [T, 4, 4]) with 20 Sinkhorn steps."""
    mix = mixes(x, fn, eps)
    pre = 1 / (1 + (-(mix[:, :4] * scale[0] + base[:4])).exp()) + eps
    post = 2 / (1 + (-(mix[:, 4:8] * scale[1] + base[4:8])).exp())
    comb = (mix[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).exp()
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.einsum("ti,tih->th", pre, x), post, comb


def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post.unsqueeze(-1) * x.unsqueeze(1) + torch.einsum("tij,tih->tjh", comb, residual)


def expert_scores(gate: Tensor) -> Tensor:
    """sqrt(ln(1 + e^g))"""
    return torch.logaddexp(gate, torch.zeros_like(gate)).sqrt()


def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float) -> Tensor:
    """Every chosen expert of every token, one by one; the activation is stored in bf16 as every kernel does."""
    out = torch.zeros_like(x)
    half = w13.shape[1] // 2
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            hidden = w13[expert] @ x[token]
            gate, up = hidden[:half].clamp(max=limit), hidden[half:].clamp(-limit, limit)
            stored = (gate / (1 + (-gate).exp()) * up).bfloat16().double()
            out[token] += weight * (w2[expert] @ stored)
    return out


def pooled(value: Tensor, gate: Tensor) -> Tensor:
    """Softmax over the rows, for each column: value and gate [N, W, d] -> [N, d]."""
    weight = (gate - gate.amax(1, keepdim=True)).exp()
    return (weight * value).sum(1) / weight.sum(1)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [B, h, 128], weights [B, h], keys [N, 128] -> [B, N]."""
    return torch.einsum("bh,bhn->bn", weights, torch.einsum("bhd,nd->bhn", q, keys).clamp(min=0))


def attention(q: Tensor, rows: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [h, 512] over rows [K, 512], which are keys and values; each head's sink in the denominator only."""
    score = scale * q @ rows.T
    top = torch.maximum(score.amax(-1), sink).unsqueeze(-1)
    weight = (score - top).exp()
    return weight @ rows / (weight.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - top).exp())
