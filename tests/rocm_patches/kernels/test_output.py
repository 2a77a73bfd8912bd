"""The FP8 output projection in the interpreter: one launch and two, splits of K, both orders of the product."""

from __future__ import annotations

import pytest
import torch

from rocm_patches import fp8
from rocm_patches.kernels import output, selftest
from rocm_patches.kernels.launch import MI300X, assume, recording
from tests.rocm_patches.kernels.findings import CPU, check

FUSED = output.Tiling(16, 64, 4, 4, 1, True)
WHOLE = output.Tiling(16, 32, 1, 4, 1, True)
CODED = output.Tiling(32, 64, 3, 4, 1, False)  # 3 splits of 4 or 8 steps: the last is short
TALL = output.Tiling(64, 128, 2, 8, 1, False)
TILES = pytest.mark.parametrize("tile", [FUSED, WHOLE, CODED, TALL], ids=["fused", "whole", "coded", "tall"])


@TILES
@pytest.mark.parametrize(("tokens", "rotated"), [(1, False), (3, True), (17, False), (65, False)])
def test_projection(tile: output.Tiling, tokens: int, rotated: bool) -> None:
    check(
        selftest.projection(
            CPU, tokens, tokens=tokens, groups=2, heads_per_group=1, rank=128, rotated=rotated, tile=tile
        )
    )


@TILES
def test_wide_activations(tile: output.Tiling) -> None:
    """Rows that differ by orders of magnitude: each group of 128 has its own scale."""
    check(selftest.projection(CPU, 7, tokens=5, groups=1, heads_per_group=2, rank=256, spread=3.0, tile=tile))


def test_no_tokens() -> None:
    with recording() as launches:
        check(selftest.projection(CPU, 8, tokens=0, groups=1, heads_per_group=1, rank=128))
    assert launches == []


def test_the_launchers_own_tiling() -> None:
    for tokens in (2, 20):
        check(selftest.projection(CPU, 9, tokens=tokens, groups=1, heads_per_group=1, rank=128))


def test_zero_activations_give_zero() -> None:
    weight, scale = fp8.quantise_block_weight(torch.randn(128, 512))
    table = selftest.rope_table(CPU, 4)
    o = torch.zeros(2, 1, 512, dtype=torch.bfloat16)
    z = output.project(o, output.prepare(weight, scale, 1), torch.tensor([0, 3]), table)
    assert not bool(z.any())


def test_a_strided_attention_output() -> None:
    """A slice of a padded buffer, as vLLM hands it over."""
    weight, scale = fp8.quantise_block_weight(torch.randn(128, 512))
    prepared, table = output.prepare(weight, scale, 1), selftest.rope_table(CPU, 8)
    whole = torch.randn(3, 4, 512).bfloat16()
    positions = torch.tensor([1, 5, 7])
    sliced = output.project(whole[:, :1], prepared, positions, table)
    assert torch.equal(sliced, output.project(whole[:, :1].contiguous(), prepared, positions, table))


def test_launches() -> None:
    """One up to 16 tokens, two above."""
    projection = output.Projection(
        *(torch.empty(s, dtype=d, device="meta") for s, d in (
            ((2, 1024, 4096), torch.uint8), ((2, 8, 32), torch.float32), ((4096,), torch.int32)))
    )  # fmt: skip
    for tokens in (1, 16, 17, 128, 4096):
        o = torch.empty(tokens, 16, 512, dtype=torch.bfloat16, device="meta")
        with assume(MI300X), recording() as launches:
            output.project(
                o, projection, torch.empty(tokens, device="meta"), torch.empty(8, 64, device="meta")
            )
        assert len(launches) == (1 if tokens <= 16 else 2), tokens


def test_refusals() -> None:
    weight, scale = fp8.quantise_block_weight(torch.randn(128, 512))
    with pytest.raises(ValueError, match="each group needs a multiple of 128 rows"):
        output.prepare(weight, scale, 2)
    damaged = weight.view(torch.uint8).clone()
    damaged[5, 7] = 0x7F
    with pytest.raises(ValueError, match="NaN codes"):
        output.prepare(damaged.view(weight.dtype), scale, 1)
    prepared = output.prepare(weight, scale, 1)
    positions, table = torch.zeros(1, dtype=torch.int64), selftest.rope_table(CPU, 1)
    with pytest.raises(ValueError, match="does not fit"):
        output.project(torch.zeros(1, 2, 512).bfloat16(), prepared, positions, table)
    with pytest.raises(ValueError, match="does not fit"):
        output.project(torch.zeros(1, 1, 512), prepared, positions, table)
