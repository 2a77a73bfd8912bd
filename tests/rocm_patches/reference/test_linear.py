"""Linear layers: einsum in float64 with the weight decoded element by element from its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.reference.linear import block_scaled_linear, linear
from tests.rocm_patches import independent
from tests.rocm_patches.independent import randn

# (N, K): tiny and ragged, Flash's wkv, Pro's wkv.
SHAPES = pytest.mark.parametrize(
    ("n", "k"), [(4, 8), (130, 260), (512, 4096), (512, 7168)], ids=["tiny", "ragged", "flash", "pro"]
)


def encoded(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Random finite codes, uint8, and e8m0 bytes near 2^-8, where checkpoints have them."""
    codes = torch.randint(0, 256, (n, k), generator=independent.generator(1), dtype=torch.uint8)
    codes = codes.masked_fill((codes & 0x7F) == 0x7F, 0x80)
    shape = (math.ceil(n / 128), math.ceil(k / 128))
    return codes, torch.randint(115, 123, shape, generator=independent.generator(2), dtype=torch.uint8)


def decoded64(codes: Tensor, scale: Tensor) -> Tensor:
    weight = independent.e4m3_values("ocp")[codes.long()]
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= 2.0 ** (int(scale[i, j]) - 127)
    return weight


def assert_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """y = x weight^T + bias within fp32's rounding: 2^-24 for each of K terms, on their magnitudes."""
    expected = torch.einsum("mk,nk->mn", x.double(), weight.double())
    magnitude = torch.einsum("mk,nk->mn", x.double().abs(), weight.double().abs())
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    assert y.dtype == torch.float32
    assert bool(((y.double() - expected).abs() <= magnitude * math.sqrt(x.shape[1]) * 2.0**-23).all())


@SHAPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(n: int, k: int, with_bias: bool) -> None:
    x, weight = randn(3, k, seed=3, dtype=torch.bfloat16), randn(n, k, seed=4, dtype=torch.bfloat16)
    bias = randn(n, seed=5) if with_bias else None
    assert_product(linear(x, weight, bias), x, weight, bias)


@SHAPES
@pytest.mark.parametrize("kind", ["e8m0", "fp32"])
def test_block_scaled_linear(n: int, k: int, kind: str) -> None:
    codes, scale = encoded(n, k)
    x, bias = randn(3, k, seed=6, dtype=torch.bfloat16), randn(n, seed=7)
    given = scale if kind == "e8m0" else torch.exp2(scale.float() - 127)
    weight = codes.view(torch.float8_e4m3fn)
    assert_product(block_scaled_linear(x, weight, given), x, decoded64(codes, scale))
    assert_product(block_scaled_linear(x, weight, given, bias=bias), x, decoded64(codes, scale), bias)


@SHAPES
def test_an_fnuz_copy_of_the_weight_gives_the_same_product(n: int, k: int) -> None:
    codes, scale = encoded(n, k)
    x = randn(3, k, seed=8, dtype=torch.bfloat16)
    ocp = codes.view(torch.float8_e4m3fn)
    y = block_scaled_linear(x, *fp8.ocp_to_fnuz(ocp, scale), dialect=fp8.FNUZ)
    assert torch.equal(y, block_scaled_linear(x, ocp, scale))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    codes, scale = encoded(130, 260)
    x = randn(tokens, 260, seed=9, dtype=torch.bfloat16)
    y = block_scaled_linear(x, codes.view(torch.float8_e4m3fn), scale)
    assert y.shape == (tokens, 130)
    assert_product(y, x, decoded64(codes, scale))
