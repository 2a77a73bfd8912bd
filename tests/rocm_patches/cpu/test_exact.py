"""Cache rows in fp32: nothing is rounded, the paged cache stays as it is, and caches do not mix."""

from __future__ import annotations

import torch

from rocm_patches.cpu.exact import ExactRows
from rocm_patches.reference.kv_cache import read_table
from tests.rocm_patches.independent import randn


def test_rows_come_back_bit_for_bit_and_the_cache_is_untouched() -> None:
    rows, cache = ExactRows(512), torch.full((3, 4 * 584), 0xA5, dtype=torch.uint8)
    values, slots = randn(4, 512, seed=1), torch.tensor([0, 3, 4, 11])
    rows.write(cache, slots, values, 4)
    assert torch.equal(rows.read(cache, slots.flip(0), 4), values.flip(0))
    assert bool((cache == 0xA5).all())


def test_a_row_written_again_is_replaced() -> None:
    rows, cache = ExactRows(128), torch.zeros(1, 4 * 132, dtype=torch.uint8)
    for seed in (2, 3):
        rows.write(cache, torch.tensor([2]), randn(1, 128, seed=seed), 4)
    assert torch.equal(rows.read(cache, torch.tensor([2]), 4), randn(1, 128, seed=3))


def test_layers_of_one_allocation_have_their_own_rows() -> None:
    rows, allocation = ExactRows(512), torch.zeros(2, 2 * 4 * 584, dtype=torch.uint8)
    layers = allocation.chunk(2, 1)
    slot = torch.tensor([5])
    for seed, layer in enumerate(layers):
        rows.write(layer, slot, randn(1, 512, seed=seed), 4)
    for seed, layer in enumerate(allocation.chunk(2, 1)):  # new view objects, same places
        assert torch.equal(rows.read(layer, slot, 4), randn(1, 512, seed=seed))


def test_it_serves_read_table_as_the_quantised_rows_do() -> None:
    rows, cache = ExactRows(512), torch.zeros(2, 4 * 584, dtype=torch.uint8)
    values = randn(2, 512, seed=4, dtype=torch.bfloat16)
    rows.write(cache, torch.tensor([1, 6]), values, 4)
    table, index = read_table(rows, cache, torch.tensor([[6, -1, 1, 6]]), 4)
    assert torch.equal(table[index[0]], torch.stack([values[1], values[1] * 0, values[0], values[1]]).float())
