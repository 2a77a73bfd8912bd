"""Query and key preparation in the interpreter: values, bytes, and what must not be touched."""

from __future__ import annotations

import pytest
import torch

from rocm_patches import fp8
from rocm_patches.kernels import prologue, selftest
from rocm_patches.kernels.launch import recording
from rocm_patches.reference import kv_cache
from tests.rocm_patches.kernels.findings import CPU, check

DIALECT = pytest.mark.parametrize("dialect", [fp8.FNUZ, fp8.OCP], ids=lambda d: d.name)


@DIALECT
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "page_rows"), [(1, 8, 64), (5, 3, 2), (9, 1, 16)])
def test_prologue(dialect: fp8.Dialect, normed: bool, tokens: int, heads: int, page_rows: int) -> None:
    check(
        selftest.qkv(
            CPU, tokens, tokens=tokens, heads=heads, normed=normed, dialect=dialect, page_rows=page_rows
        )
    )


@DIALECT
@pytest.mark.parametrize("amplitude", [1e-6, 1e4])
def test_amplitudes(dialect: fp8.Dialect, amplitude: float) -> None:
    """Under the smallest scale, and far over one."""
    check(selftest.qkv(CPU, 3, tokens=4, heads=2, normed=True, dialect=dialect, amplitude=amplitude))


def test_one_launch_and_none_for_no_tokens() -> None:
    with recording() as launches:
        check(selftest.qkv(CPU, 4, tokens=3, heads=5))
        assert len(launches) == 1
        check(selftest.qkv(CPU, 4, tokens=0, heads=5))
    assert len(launches) == 1


@DIALECT
def test_a_nan_key_leaves_no_nan_code(dialect: fp8.Dialect) -> None:
    """A NaN in the projected key must not poison the cache: the codes of its block are zero."""
    kv = torch.randn(1, 512).bfloat16()
    kv[0, 70] = float("nan")
    cache = torch.full((1, 584), 0x55, dtype=torch.uint8)
    q, table = torch.randn(1, 1, 512).bfloat16(), selftest.rope_table(CPU, 2)
    zero = torch.zeros(1, dtype=torch.int64)
    prologue.prologue(q, kv, None, zero, table, cache, zero, 1, dialect=dialect)
    codes, _, scales = selftest.attention_bytes(cache, zero, 1)
    assert not bool((codes == 0x80).any()) and not bool((scales == 0xFF).any())
    assert bool(codes[0, 64:70].any()), "its neighbours are kept"
    row = kv_cache.AttentionRows(dialect).read(cache, zero, 1)
    assert bool(row[0, :448].isfinite().all()) and float(row[0, 70]) == 0


def test_fewer_slots_than_tokens() -> None:
    """In a captured graph the slot mapping may be shorter than the batch: the rest has no row."""
    q, kv = torch.randn(3, 1, 512).bfloat16(), torch.randn(3, 512).bfloat16()
    cache = torch.full((4, 584), 0x55, dtype=torch.uint8)
    table, positions = selftest.rope_table(CPU, 4), torch.arange(3)
    out = prologue.prologue(q, kv, None, positions, table, cache, torch.tensor([2]), 1)
    assert bool((cache[[0, 1, 3]] == 0x55).all()) and not bool((cache[2] == 0x55).all())
    assert bool(out.isfinite().all())


def test_refusals() -> None:
    q, kv = torch.randn(1, 1, 512).bfloat16(), torch.randn(1, 512).bfloat16()
    table, zero = selftest.rope_table(CPU, 1), torch.zeros(1, dtype=torch.int64)
    cache = torch.zeros(1, 584, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[T, h, 512\]"):
        prologue.prologue(q[..., :448], kv, None, zero, table, cache, zero, 1)
    with pytest.raises(ValueError, match="at least 2 x 584"):
        prologue.prologue(q, kv, None, zero, table, cache, zero, 2)
    with pytest.raises(ValueError, match="uint8"):
        prologue.prologue(q, kv, None, zero, table, cache.float(), zero, 1)
