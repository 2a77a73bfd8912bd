"""RoPE: complex multiplication in float64, transformers' interleaved rotation, and the inverse."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from rocm_patches.reference.rope import rotate
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import randn

POSITIONS = torch.tensor([0, 1, 127, 4095])
TABLE = independent.rope_table(4096)
# x shapes: a key, Flash heads, Pro heads, indexer heads, and rotated dimensions only.
SHAPES = pytest.mark.parametrize("shape", [(512,), (64, 512), (128, 512), (64, 128), (3, 64)])


@SHAPES
@pytest.mark.parametrize("inverse", [False, True])
def test_a_pair_is_a_complex_number_that_turns(shape: tuple[int, ...], inverse: bool) -> None:
    x = randn(4, *shape, seed=1)
    out = rotate(x, POSITIONS, TABLE, inverse=inverse)
    for t, position in enumerate(POSITIONS.tolist()):
        expected = independent.rotate(x[t], TABLE[position], inverse)
        torch.testing.assert_close(out[t].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(out[..., :-64], x[..., :-64])
    assert out.dtype == torch.float32


@SHAPES
def test_inverse_undoes_forward(shape: tuple[int, ...]) -> None:
    x = randn(4, *shape, seed=2)
    back = rotate(rotate(x, POSITIONS, TABLE), POSITIONS, TABLE, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)


def test_position_zero_is_the_identity() -> None:
    x = randn(2, 8, 512, seed=3)
    assert torch.equal(rotate(x, torch.zeros(2, dtype=torch.long), TABLE), x)


@pytest.mark.parametrize("kind", ["main", "compress"])
def test_equals_transformers(kind: str) -> None:
    configuration = transformers_modules.config()
    table = transformers_modules.rope_table(configuration, 4096, kind)
    x = randn(4, 64, 512, seed=4)
    cos, sin = table[POSITIONS].chunk(2, -1)
    theirs = apply_rotary_pos_emb(x.transpose(0, 1).unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0))
    torch.testing.assert_close(rotate(x, POSITIONS, table), theirs[0].transpose(0, 1), rtol=0, atol=1e-6)


def test_the_tests_own_table_is_transformers_main_table() -> None:
    theirs = transformers_modules.rope_table(transformers_modules.config(), 4096, "main")
    # fp32 angles up to 4095 carry an error of 4095 * 2^-24.
    torch.testing.assert_close(TABLE, theirs, rtol=0, atol=5e-4)


def test_int32_positions_bf16_input_and_no_tokens() -> None:
    x = randn(4, 8, 512, seed=5, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, POSITIONS.int(), TABLE), rotate(x.float(), POSITIONS, TABLE))
    assert rotate(x[:0], POSITIONS[:0], TABLE).shape == (0, 8, 512)
