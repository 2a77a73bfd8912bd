"""Linear layers: plain, and with an FP8 weight in 128 x 128 blocks (W8A16: activations stay bf16)."""

from __future__ import annotations

from torch import Tensor

from rocm_patches import fp8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> fp32 [M, N]."""
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()


def block_scaled_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int] = (128, 128),
    bias: Tensor | None = None,
    dialect: fp8.Dialect = fp8.OCP,
) -> Tensor:
    """y = x (weight * scale of its block)^T.

    x [M, K], weight e4m3 [N, K], scale fp32 or e8m0 [ceil(N/block[0]), ceil(K/block[1])] -> fp32 [M, N].
    """
    return linear(x, fp8.dequantise_block_weight(weight, scale, block, dialect), bias)
