"""The pages byte by byte against pages that the tests build themselves, and what must stay untouched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rocm_patches import fp8
from rocm_patches.reference.kv_cache import AttentionRows, IndexerKeys, read_table
from tests.rocm_patches import independent
from tests.rocm_patches.independent import as_bytes, as_tensor, randn

DIALECTS = pytest.mark.parametrize("dialect", [fp8.OCP, fp8.FNUZ], ids=lambda d: d.name)
# Window and ratio-4 pages, ratio-128 pages, and an odd one.
PAGE_ROWS = pytest.mark.parametrize("page_rows", [64, 2, 5])
FILL = 0xA5


def wide_rows(n: int, width: int, seed: int) -> Tensor:
    """bf16 rows whose blocks have very different magnitudes, an all-zero block and a -0 among them."""
    rows = randn(n, width, seed=seed)
    rows *= torch.exp2(randn(n, width // 64, seed=seed + 1, scale=6)).repeat_interleave(64, 1)
    if n:
        rows[0, :64] = 0.0
        rows[-1, 3] = -0.0
    return rows.bfloat16()


def slots_across_pages(page_rows: int) -> Tensor:
    """First and last row of a page, the first of the next, and the very last row of three pages."""
    return torch.tensor([page_rows - 1, 0, page_rows, 3 * page_rows - 1])


@DIALECTS
@PAGE_ROWS
def test_attention_rows_write_exactly_the_expected_bytes(dialect: fp8.Dialect, page_rows: int) -> None:
    slots, rows = slots_across_pages(page_rows), wide_rows(4, 512, seed=1)
    cache = torch.full((3, page_rows * 584), FILL, dtype=torch.uint8)
    AttentionRows(dialect).write(cache, slots, rows, page_rows)
    pages = [bytearray([FILL]) * (page_rows * 584) for _ in range(3)]
    for slot, row in zip(slots.tolist(), rows.float(), strict=True):
        page, offset = divmod(slot, page_rows)
        independent.write_attention_row(pages[page], offset, page_rows, row, dialect.name)
    assert torch.equal(cache, as_tensor(pages))


@DIALECTS
@PAGE_ROWS
def test_indexer_keys_write_exactly_the_expected_bytes(dialect: fp8.Dialect, page_rows: int) -> None:
    slots, rows = slots_across_pages(page_rows), wide_rows(4, 128, seed=2)
    cache = torch.full((3, page_rows * 132), FILL, dtype=torch.uint8)
    IndexerKeys(dialect).write(cache, slots, rows, page_rows)
    pages = [bytearray([FILL]) * (page_rows * 132) for _ in range(3)]
    for slot, row in zip(slots.tolist(), rows.float(), strict=True):
        page, offset = divmod(slot, page_rows)
        independent.write_indexer_key(pages[page], offset, page_rows, row, dialect.name)
    assert torch.equal(cache, as_tensor(pages))


@DIALECTS
@PAGE_ROWS
def test_reading_equals_the_layout(dialect: fp8.Dialect, page_rows: int) -> None:
    """Pages of random bytes, NaN codes included. 0xFF is left out: no writer makes that scale byte."""
    source = independent.generator(3)
    slots = slots_across_pages(page_rows)
    for rows, width, read in (
        (AttentionRows(dialect), 584, independent.read_attention_row),
        (IndexerKeys(dialect), 132, independent.read_indexer_key),
    ):
        cache = torch.randint(0, 0xFF, (3, page_rows * width), generator=source, dtype=torch.uint8)
        got = rows.read(cache, slots, page_rows)
        for i, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, page_rows)
            expected = read(as_bytes(cache[page]), offset, page_rows, dialect.name)
            torch.testing.assert_close(got[i], expected.float(), rtol=0, atol=0, equal_nan=True)


@DIALECTS
def test_fp32_rows_are_rounded_to_bf16_before_anything_else(dialect: fp8.Dialect) -> None:
    slots = torch.arange(4)
    for rows, width in ((AttentionRows(dialect), 584), (IndexerKeys(dialect), 132)):
        values = randn(4, rows.width, seed=4)
        caches = [torch.zeros(1, 4 * width, dtype=torch.uint8) for _ in range(2)]
        rows.write(caches[0], slots, values, 4)
        rows.write(caches[1], slots, values.bfloat16(), 4)
        assert torch.equal(*caches)


@pytest.mark.parametrize("rows", [AttentionRows(), IndexerKeys()], ids=["attention", "indexer"])
def test_a_strided_view_is_written_in_place_and_its_neighbours_are_not(
    rows: AttentionRows | IndexerKeys,
) -> None:
    """Three layers share an allocation, and a layer's page may be wider than its rows."""
    page_rows, row_bytes = 4, 584 if rows.width == 512 else 132
    width = page_rows * row_bytes + 12
    everything = torch.randint(0, 256, (3, 3 * width), generator=independent.generator(5), dtype=torch.uint8)
    before = everything.clone()
    view = everything[:, width : 2 * width]
    assert view.stride(0) == 3 * width
    slots, values = torch.tensor([0, 3, 4, 11]), wide_rows(4, rows.width, seed=6)
    rows.write(view, slots, values, page_rows)

    expected = before.clone()
    dense = before[:, width : 2 * width].clone()
    rows.write(dense, slots, values, page_rows)
    expected[:, width : 2 * width] = dense
    assert torch.equal(everything, expected)
    assert not torch.equal(everything, before)
    assert torch.equal(everything[:, 2 * width - 12 : 2 * width], before[:, 2 * width - 12 : 2 * width])
    assert torch.equal(rows.read(view, slots, page_rows), rows.read(dense, slots, page_rows))


@DIALECTS
def test_round_trip_keeps_rope_and_is_within_half_an_e4m3_step(dialect: fp8.Dialect) -> None:
    rows = randn(8, 512, seed=7, dtype=torch.bfloat16)
    cache = torch.zeros(1, 8 * 584, dtype=torch.uint8)
    AttentionRows(dialect).write(cache, torch.arange(8), rows, 8)
    back = AttentionRows(dialect).read(cache, torch.arange(8), 8)
    assert torch.equal(back[:, 448:], rows[:, 448:].float())
    # Half a step is 2^-4 of the value, or of the smallest normal value of its block.
    smallest = rows[:, :448].float().unflatten(1, (7, 64)).abs().amax(-1).repeat_interleave(64, 1) * 2.0**-14
    assert bool(
        (
            (back - rows.float())[:, :448].abs() <= rows[:, :448].float().abs().maximum(smallest) * 2.0**-4
        ).all()
    )


def test_nothing_to_write_or_read() -> None:
    cache = torch.full((1, 4 * 584), FILL, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.long)
    AttentionRows().write(cache, none, torch.empty(0, 512), 4)
    assert bool((cache == FILL).all())
    assert AttentionRows().read(cache, none, 4).shape == (0, 512)
    assert IndexerKeys().read(cache, none, 4).shape == (0, 128)


# --- read_table -------------------------------------------------------------------------------------


def filled_cache() -> tuple[Tensor, Tensor]:
    """A cache of 3 pages of 4 rows whose rows 1, 4 and 11 hold values; every other byte is a NaN code."""
    cache = torch.full((3, 4 * 584), 0xFF, dtype=torch.uint8)
    rows = randn(3, 512, seed=8, dtype=torch.bfloat16)
    AttentionRows().write(cache, torch.tensor([1, 4, 11]), rows, 4)
    return cache, rows


@pytest.mark.parametrize(
    "slots",
    [
        [[1, 4, -1], [11, 1, 1]],
        [[4, 4, 4]],
        [[-1, -1], [-1, -1]],
        [[-7, 11], [-1, 4]],
        [[11]],
    ],
)
def test_a_table_holds_each_named_row_once_and_a_zero_row_last(slots: list[list[int]]) -> None:
    cache, _ = filled_cache()
    table, index = read_table(AttentionRows(), cache, torch.tensor(slots), 4)
    named = sorted({s for row in slots for s in row if s >= 0})
    assert table.shape == (len(named) + 1, 512)
    assert not table[-1].any()
    assert table.isfinite().all()  # neither unnamed rows nor page bytes leaked in
    for row, entries in zip(slots, index.tolist(), strict=True):
        for slot, entry in zip(row, entries, strict=True):
            assert entry == (named.index(slot) if slot >= 0 else len(named))
            if slot >= 0:
                assert torch.equal(table[entry], AttentionRows().read(cache, torch.tensor([slot]), 4)[0])


@pytest.mark.parametrize("shape", [(0, 128), (3, 0)])
def test_an_empty_table(shape: tuple[int, int]) -> None:
    cache, _ = filled_cache()
    table, index = read_table(AttentionRows(), cache, torch.empty(shape, dtype=torch.long), 4)
    assert table.shape == (1, 512) and not table.any()
    assert index.shape == shape
