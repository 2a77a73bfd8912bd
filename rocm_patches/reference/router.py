"""Expert choice: scores sqrt(softplus(g)); top-k with a selection bias, or a fixed table by token id.

The bias (or the table) decides which experts, never their weights; weights are the chosen scores,
normalised and scaled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scores(gate: Tensor) -> Tensor:
    """sqrt(softplus(g)) in fp32, without underflow for large negative g: gate [T, E] -> [T, E]."""
    g = gate.float()
    return (F.relu(g) + torch.log1p(torch.exp(-g.abs()))).sqrt()


def _weights(score: Tensor, ids: Tensor, normalise: bool, scale: float) -> Tensor:
    chosen = score.gather(1, ids)
    if normalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scale


def biased_topk(
    gate: Tensor, bias: Tensor, k: int, normalise: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Top-k of score + bias. gate [T, E], bias fp32 [E] -> weights fp32 [T, k], ids int32 [T, k]."""
    score = scores(gate)
    ids = (score + bias.float()).topk(k, -1).indices
    return _weights(score, ids, normalise, scale), ids.int()


def hash_route(gate: Tensor, ids: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Weights for experts fixed by token id. gate [T, E], ids int [T, k] -> fp32 [T, k], int32 [T, k]."""
    return _weights(scores(gate), ids.long(), True, scale), ids.int().clone()
