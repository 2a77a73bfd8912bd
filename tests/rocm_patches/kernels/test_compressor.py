"""The compressor in the interpreter: decode, prefill, chunks that begin inside a window, and mixtures of them."""

from __future__ import annotations

import pytest
import torch

from rocm_patches import fp8
from rocm_patches.kernels import compressor, selftest
from rocm_patches.kernels.launch import recording
from rocm_patches.reference import compressor as reference
from rocm_patches.reference.kv_cache import AttentionRows
from tests.rocm_patches.kernels.findings import CPU, check

FOUR = [
    [(3, 1)],  # the first entry, in decode
    [(0, 9), (5, 1), (7, 1), (6, 1)],  # a prefill between decodes, with and without an entry
    [(2, 7), (4, 4), (1, 1)],  # chunks that begin inside a window
    [(8, 1), (11, 1), (15, 1)],
]


@pytest.mark.parametrize("dialect", [fp8.OCP, fp8.FNUZ], ids=lambda d: d.name)
@pytest.mark.parametrize("dim", [512, 128])
@pytest.mark.parametrize("lengths", FOUR, ids=str)
def test_ratio_4(lengths: list[tuple[int, int]], dim: int, dialect: fp8.Dialect) -> None:
    check(selftest.compression(CPU, 1, lengths=lengths, ratio=4, dim=dim, dialect=dialect, padding=2))


@pytest.mark.parametrize(
    "lengths", [[(127, 1)], [(255, 1), (126, 1)], [(100, 30)], [(0, 130)], [(250, 7)]], ids=str
)
def test_ratio_128(lengths: list[tuple[int, int]]) -> None:
    check(selftest.compression(CPU, 2, lengths=lengths, ratio=128, page_rows=2))


def test_it_is_one_launch() -> None:
    with recording() as launches:
        check(selftest.compression(CPU, 3, lengths=[(0, 5), (3, 1)], ratio=4))
    assert len(launches) == 1


def test_no_tokens() -> None:
    with recording() as launches:
        check(selftest.compression(CPU, 4, lengths=[], ratio=4))
    assert launches == []


def test_a_step_at_a_time_equals_the_reference() -> None:
    """Twelve decode steps of one sequence against rocm_patches.reference, state and cache byte by byte."""
    torch.manual_seed(5)
    ape, gain, table = torch.randn(4, 1024), torch.rand(512).bfloat16(), selftest.rope_table(CPU, 16)
    states = [torch.zeros(4, 4, 2048) for _ in range(2)]
    caches = [torch.zeros(1, 64 * 584, dtype=torch.uint8) for _ in range(2)]
    pages = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    rows = AttentionRows(fp8.OCP)
    for p in range(12):
        scores, position = torch.randn(1, 2048), torch.tensor([p])
        slot = torch.tensor([int(pages[0, p // 4]) * 4 + p % 4])
        entry = torch.tensor([p // 4 if p % 4 == 3 else -1])
        compressor.compress(
            scores, ape, position, torch.zeros(1, dtype=torch.int32), states[0], slot, pages, gain, table, caches[0],
            entry, 64, ratio=4,
        )  # fmt: skip
        kv, score = scores.chunk(2, -1)
        reference.save_state(kv, score, ape, position, states[1], slot)
        window = torch.arange(p - 7, p + 1)
        slots = torch.where(window >= 0, pages[0].long()[window.clamp(min=0) // 4] * 4 + window % 4, -1)
        reference.compress(
            states[1], slots[None], position, entry, gain, 1e-6, table, caches[1], 64, 4, rows
        )  # fmt: skip
        assert torch.equal(*states)
    entries = torch.arange(3)
    ours, theirs = (rows.read(c, entries, 64) for c in caches)
    torch.testing.assert_close(ours, theirs, rtol=0.07, atol=1e-3)  # a code may round the other way: one step
    assert float(((ours - theirs) != 0).float().mean()) < 0.01


def test_refusals() -> None:
    scores, state = torch.zeros(1, 2048), torch.zeros(1, 4, 2048)
    one, cache = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64 * 584, dtype=torch.uint8)
    rest = (one, one.int(), state, one, one.int()[None], torch.ones(512), torch.zeros(1, 64), cache, one, 64)
    with pytest.raises(ValueError, match="ratio 4 takes widths"):
        compressor.compress(scores[:, :1000], torch.zeros(4, 500), *rest, ratio=4)
    with pytest.raises(ValueError, match="ratio 4 takes widths"):
        compressor.compress(scores, torch.zeros(8, 1024), *rest, ratio=8)
    with pytest.raises(ValueError, match="at least 65 x 584"):
        compressor.compress(scores, torch.zeros(4, 1024), *rest[:-1], 65, ratio=4)
