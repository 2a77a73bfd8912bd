"""Manifold-constrained hyper-connections (mHC): four residual streams mixed by a doubly stochastic matrix.

Per sub-layer: `pre` mixes the streams into the layer's input and yields the coefficients, `post` spreads the
layer's output back and mixes the streams. `head` folds the streams before the final norm. Formulas:
transformers' DeepseekV4HyperConnection (5.19) and https://arxiv.org/abs/2512.24880.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Make exp(logits) doubly stochastic. logits fp32 [..., n, n] -> fp32 [..., n, n].

    A softmax over each row (plus eps), a column normalisation, then `iterations` - 1 times rows and
    columns; every divisor gets eps. The loop is over the published, fixed number of steps.
    """
    c = logits.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def _mixes(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn (f / rms(f)) for f = the flattened streams; x [T, hc, H], fn [m, hc * H] -> fp32 [T, m]."""
    f = x.float().flatten(1)
    return (f @ fn.float().T) * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)


def _fold(x: Tensor, weight: Tensor) -> Tensor:
    """sum_i weight_i x_i in x's dtype: x [T, hc, H], weight [T, hc] -> [T, H]."""
    return (weight.unsqueeze(1) @ x.float()).squeeze(1).to(x.dtype)


def pre(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, rms_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer input and mixing coefficients.

    x [T, hc, H]; fn fp32 [(2 + hc) * hc, hc * H]; scale fp32 [3]; base fp32 [(2 + hc) * hc]. Returns y
    [T, H] in x's dtype, post fp32 [T, hc], comb fp32 [T, hc, hc].
    """
    hc = x.shape[1]
    to_pre, to_post, to_comb = _mixes(x, fn, rms_eps).split([hc, hc, hc * hc], -1)
    base_pre, base_post, base_comb = base.float().split([hc, hc, hc * hc])
    weight = torch.sigmoid(to_pre * scale[0] + base_pre) + hc_eps
    post = 2 * torch.sigmoid(to_post * scale[1] + base_post)
    comb = sinkhorn((to_comb * scale[2] + base_comb).unflatten(-1, (hc, hc)), iterations, hc_eps)
    return _fold(x, weight), post, comb


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb: Tensor) -> Tensor:
    """out_j = post_j x + sum_i comb[i, j] residual_i (the sum runs over comb's first index).

    x [T, H], residual [T, hc, H], post_mix [T, hc], comb [T, hc, hc] -> [T, hc, H] in residual's dtype.
    """
    mixed = comb.float().transpose(1, 2) @ residual.float()
    return (post_mix.float().unsqueeze(-1) * x.float().unsqueeze(1) + mixed).to(residual.dtype)


def head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
    """Fold the streams: x [T, hc, H], fn fp32 [hc, hc * H], scale fp32 [1], base fp32 [hc] -> [T, H]."""
    return _fold(x, torch.sigmoid(_mixes(x, fn, norm_eps) * scale + base) + hc_eps)
