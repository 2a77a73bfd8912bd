"""Query and key preparation: float64 norm and rotation, transformers' norms, and the bytes in the cache."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4RMSNorm,
    DeepseekV4UnweightedRMSNorm,
)

from rocm_patches.reference import prologue
from rocm_patches.reference.kv_cache import AttentionRows
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import BF16, as_bytes, randn

TABLE = independent.rope_table(300)
EPS = 1e-6


@pytest.mark.parametrize("width", [128, 512, 1024, 4096, 7168])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_equals_the_formula(width: int, eps: float) -> None:
    x, weight = randn(3, width, seed=1), randn(width, seed=2)
    for gain in (None, weight):
        expected = independent.rms_norm(x, eps, gain)
        torch.testing.assert_close(prologue.rms_norm(x, eps, gain).double(), expected, rtol=2e-6, atol=1e-7)


def test_rms_norm_equals_transformers() -> None:
    x = randn(3, 1024, seed=3)
    module = transformers_modules.randomised(DeepseekV4RMSNorm(1024, EPS), seed=4)
    torch.testing.assert_close(prologue.rms_norm(x, EPS, module.weight), module(x))
    torch.testing.assert_close(prologue.rms_norm(x, EPS), DeepseekV4UnweightedRMSNorm(EPS)(x))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not prologue.rms_norm(torch.zeros(2, 512), EPS).any()


# Flash has 64 heads and Pro 128, whole and over 8 ranks.
@pytest.mark.parametrize(("heads", "padded"), [(4, 4), (8, 64), (16, 16), (64, 64), (128, 128), (5, 7)])
def test_query_is_normed_per_head_then_rotated(heads: int, padded: int) -> None:
    positions = torch.tensor([0, 3, 299])
    q = randn(3, heads, 512, seed=5, scale=4)
    out = prologue.query(q, positions, TABLE, padded, EPS)
    assert out.shape == (3, padded, 512) and not out[:, heads:].any()
    for t, position in enumerate(positions.tolist()):
        expected = independent.rotate(independent.rms_norm(q[t], EPS), TABLE[position])
        torch.testing.assert_close(out[t, :heads].double(), expected, rtol=1e-5, atol=2e-6)


def test_query_keeps_the_input_type_and_rounds_once() -> None:
    positions = torch.tensor([7, 8])
    q = randn(2, 4, 512, seed=6, dtype=torch.bfloat16)
    out = prologue.query(q, positions, TABLE, 4, EPS)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, prologue.query(q.float(), positions, TABLE, 4, EPS).bfloat16())


@pytest.mark.parametrize("tokens", [0, 1])
def test_query_of_few_tokens(tokens: int) -> None:
    q = randn(tokens, 4, 512, seed=7, dtype=torch.bfloat16)
    assert prologue.query(q, torch.zeros(tokens, dtype=torch.long), TABLE, 6, EPS).shape == (tokens, 6, 512)


def test_insert_key_at_position_zero_writes_exactly_the_expected_bytes() -> None:
    """No rotation there, so that the whole row can be compared byte by byte, at both edges of a page."""
    kv = randn(4, 512, seed=8, dtype=torch.bfloat16)
    cache = torch.full((2, 64 * 584), 0xA5, dtype=torch.uint8)
    slots = torch.tensor([63, -1, 64, 0])
    prologue.insert_key(kv, torch.zeros(4, dtype=torch.long), TABLE, cache, slots, 64, AttentionRows())
    pages = [bytearray([0xA5]) * (64 * 584) for _ in range(2)]
    for slot, row in zip(slots.tolist(), kv.float(), strict=True):
        if slot >= 0:
            independent.write_attention_row(pages[slot // 64], slot % 64, 64, row)
    assert torch.equal(cache, independent.as_tensor(pages))


def test_insert_key_rotates_before_it_stores() -> None:
    positions = torch.tensor([0, 1, 127, 299])
    kv = randn(4, 512, seed=9, dtype=torch.bfloat16)
    cache = torch.full((2, 64 * 584), 0xFF, dtype=torch.uint8)
    slots = torch.tensor([5, 64, 127, 6])
    prologue.insert_key(kv, positions, TABLE, cache, slots, 64, AttentionRows())
    for t, slot in enumerate(slots.tolist()):
        stored = independent.read_attention_row(as_bytes(cache[slot // 64]), slot % 64, 64)
        unrotated = bytearray(64 * 584)
        independent.write_attention_row(unrotated, 0, 64, kv[t].float())
        assert torch.equal(stored[:448], independent.read_attention_row(unrotated, 0, 64)[:448])
        expected = independent.rotate(kv[t], TABLE[int(positions[t])])[448:]
        torch.testing.assert_close(stored[448:], expected, rtol=BF16, atol=1e-6)


def test_insert_key_skips_padded_tokens_whatever_they_hold() -> None:
    kv = randn(6, 512, seed=10, dtype=torch.bfloat16)
    kv[1] = kv[4] = kv[5] = float("nan")
    positions = torch.tensor([0, 1, 2, 3, 10**6, 10**6])  # two tokens past the slots, out of the table
    cache = torch.full((1, 64 * 584), 0xA5, dtype=torch.uint8)
    prologue.insert_key(kv, positions, TABLE, cache, torch.tensor([0, -1, 1, -1]), 64, AttentionRows())
    untouched = cache.clone()
    for offset in (0, 1):
        row = independent.read_attention_row(as_bytes(cache[0]), offset, 64)
        assert bool(row.isfinite().all())
        untouched[0, offset * 576 : offset * 576 + 576] = 0xA5
        untouched[0, 64 * 576 + offset * 8 : 64 * 576 + offset * 8 + 8] = 0xA5
    assert bool((untouched == 0xA5).all())


def test_insert_key_of_no_token() -> None:
    cache = torch.full((1, 64 * 584), 0xA5, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.long)
    prologue.insert_key(torch.empty(0, 512), none, TABLE, cache, none, 64, AttentionRows())
    assert bool((cache == 0xA5).all())
