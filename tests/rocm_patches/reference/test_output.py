"""Attention's way out: rotation back at the query's position, and one product per group."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4GroupedLinear,
    apply_rotary_pos_emb,
)

from rocm_patches.reference import output, rope
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import randn

TABLE = independent.rope_table(4096)
POSITIONS = torch.tensor([0, 130, 4095])
HEADS = pytest.mark.parametrize("heads", [4, 64, 128], ids=["tiny", "flash", "pro"])


@HEADS
def test_inverse_rotate_equals_the_conjugate_product(heads: int) -> None:
    o = randn(3, heads, 512, seed=1, dtype=torch.bfloat16)
    out = output.inverse_rotate(o, POSITIONS, TABLE)
    assert out.dtype == torch.float32
    for t, position in enumerate(POSITIONS.tolist()):
        expected = independent.rotate(o[t], TABLE[position], inverse=True)
        torch.testing.assert_close(out[t].double(), expected, rtol=0, atol=2e-6)


@HEADS
def test_inverse_rotate_equals_transformers(heads: int) -> None:
    table = transformers_modules.rope_table(transformers_modules.config(), 4096, "compress")
    o = randn(3, heads, 512, seed=2)
    cos, sin = table[POSITIONS].chunk(2, -1)
    theirs = apply_rotary_pos_emb(o.transpose(0, 1).unsqueeze(0), cos.unsqueeze(0), -sin.unsqueeze(0))
    out = output.inverse_rotate(o, POSITIONS, table)
    torch.testing.assert_close(out, theirs[0].transpose(0, 1), rtol=0, atol=1e-6)


@HEADS
def test_inverse_rotate_undoes_the_querys_rotation(heads: int) -> None:
    o = randn(3, heads, 512, seed=3)
    back = output.inverse_rotate(rope.rotate(o, POSITIONS, TABLE), POSITIONS, TABLE)
    torch.testing.assert_close(back, o, rtol=0, atol=2e-6)


# (groups, K, R): tiny; and Flash's and Pro's wo_a, which are both 4096 -> 1024, over 8 ranks.
GROUPS = pytest.mark.parametrize(
    ("groups", "k", "r"), [(4, 16, 6), (1, 4096, 1024), (2, 4096, 1024)], ids=["tiny", "flash", "pro"]
)


@GROUPS
def test_grouped_matmul_equals_the_formula(groups: int, k: int, r: int) -> None:
    x = randn(groups, 2, k, seed=4, dtype=torch.bfloat16)
    weight = randn(groups, r, k, seed=5, dtype=torch.bfloat16)
    out = output.grouped_matmul(x, weight)
    assert out.dtype == torch.float32
    for g in range(groups):
        expected = torch.einsum("tk,rk->tr", x[g].double(), weight[g].double())
        # fp32 sum of k products of order 1.
        torch.testing.assert_close(out[g].double(), expected, rtol=0, atol=math.sqrt(k) * k * 2.0**-24)


@GROUPS
def test_grouped_matmul_equals_transformers(groups: int, k: int, r: int) -> None:
    module = transformers_modules.randomised(
        DeepseekV4GroupedLinear(k, groups * r, groups), seed=6, scale=k**-0.5
    )
    x = randn(2, groups, k, seed=7)
    out = output.grouped_matmul(x.transpose(0, 1), module.weight.view(groups, r, k))
    torch.testing.assert_close(out.transpose(0, 1), module(x), rtol=1e-4, atol=1e-5)


def test_no_tokens() -> None:
    none = torch.empty(0, dtype=torch.long)
    assert output.inverse_rotate(torch.empty(0, 4, 512), none, TABLE).shape == (0, 4, 512)
    assert output.grouped_matmul(torch.empty(2, 0, 16), randn(2, 6, 16, seed=8)).shape == (2, 0, 6)
