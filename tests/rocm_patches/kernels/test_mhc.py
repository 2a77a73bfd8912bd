"""Hyper-connection kernels in the interpreter: every tiling against float64, and what launchers refuse."""

from __future__ import annotations

import pytest
import torch

from rocm_patches.kernels import mhc, selftest
from rocm_patches.kernels.launch import MI300X, MI308X, Target, assume, recording
from tests.rocm_patches.kernels.findings import CPU, check

# One launch and two, one row per program and several, splits that end in the middle and splits left empty.
ONE = mhc.Tiling(16, 1, 64, 4, 4, 1, True)
ROWS = mhc.Tiling(16, 4, 64, 2, 4, 1, True)
TALL = mhc.Tiling(16, 16, 32, 1, 4, 1, True)
TWO = mhc.Tiling(16, 8, 64, 4, 4, 1, False)
TILES = pytest.mark.parametrize("tile", [ONE, ROWS, TALL, TWO], ids=["one", "rows", "tall", "two"])


@TILES
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 192), (9, 384)])
def test_seam(tile: mhc.Tiling, tokens: int, hidden: int) -> None:
    check(selftest.mhc_seam(CPU, tokens, tokens=tokens, hidden=hidden, quantise=hidden % 128 == 0, tile=tile))


@TILES
def test_pre_alone(tile: mhc.Tiling) -> None:
    check(selftest.mhc_seam(CPU, 1, tokens=5, hidden=128, after_layer=False, norm=False, tile=tile))


@TILES
def test_head(tile: mhc.Tiling) -> None:
    check(selftest.mhc_seam(CPU, 2, tokens=5, hidden=128, after_layer=False, head=True, tile=tile))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 192), (0, 64)])
def test_head_in_one_launch(tokens: int, hidden: int, norm: bool) -> None:
    with recording() as launches:
        check(
            selftest.mhc_seam(CPU, 7, tokens=tokens, hidden=hidden, after_layer=False, head=True, norm=norm)
        )
    assert len(launches) == min(tokens, 1)


@pytest.mark.parametrize("sharpness", [4.0, 20.0])
def test_sharp_sinkhorn(sharpness: float) -> None:
    check(selftest.mhc_seam(CPU, 3, tokens=8, hidden=64, sharpness=sharpness, tile=ROWS))


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_post_alone(tokens: int) -> None:
    check(selftest.mhc_post(CPU, 4, tokens=tokens, hidden=576))


def test_no_tokens() -> None:
    with recording() as launches:
        check(selftest.mhc_seam(CPU, 5, tokens=0, hidden=128))
    assert launches == []


def test_the_launchers_own_tiling() -> None:
    """As a chip with few units and one with many would cut it."""
    for target in (MI308X, Target("interpreter", 8)):
        with assume(Target("interpreter", target.compute_units)):
            check(selftest.mhc_seam(CPU, 6, tokens=2, hidden=1024))


def test_a_seam_is_one_launch_in_decode_and_at_most_two() -> None:
    for tokens in (1, 8, 16, 32, 64, 128, 1024, 4096):
        x = torch.empty(tokens, 4, 7168, dtype=torch.bfloat16, device="meta")
        mixing = mhc.prepare(*(torch.empty(s, device="meta") for s in ((24, 4 * 7168), (3,), (24,))))
        with assume(MI300X), recording() as launches:
            mhc.seam(x, mixing)
        assert len(launches) == (1 if tokens <= 4 else 2), tokens


def test_the_split_weight_is_the_weight() -> None:
    """Two bf16 parts hold an fp32 weight to 2^-17."""
    fn = torch.randn(24, 512)
    mixing = mhc.prepare(fn, torch.ones(3), torch.zeros(24))
    whole = mixing.parts.double().sum(0).transpose(1, 2).flatten(1)
    assert float(((whole - fn.double()) / fn.double()).abs().max()) < 2**-16


def test_refusals() -> None:
    good = mhc.prepare(torch.randn(24, 512), torch.ones(3), torch.zeros(24))
    x = torch.randn(2, 4, 128).bfloat16()
    with pytest.raises(ValueError, match="multiple of 64"):
        mhc.prepare(torch.randn(24, 4 * 96), torch.ones(3), torch.zeros(24))
    with pytest.raises(ValueError, match="do not fit"):
        mhc.seam(x.float(), good)
    with pytest.raises(ValueError, match="do not fit"):
        mhc.seam(torch.randn(2, 4, 192).bfloat16(), good)
    with pytest.raises(ValueError, match="this weight has 24 mixes"):
        mhc.head(x, good)
    with pytest.raises(ValueError, match="go together"):
        mhc.seam(x, good, layer_output=torch.randn(2, 128).bfloat16())
    narrow = mhc.prepare(torch.randn(24, 256), torch.ones(3), torch.zeros(24))
    with pytest.raises(ValueError, match="divisible by 128"):
        mhc.seam(x[:, :, :64], narrow, quantise=True)
