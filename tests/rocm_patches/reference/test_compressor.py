"""The compressor: one entry at a time in float64, transformers' three compressors, and the bytes it stores.

State pages are shuffled and full of NaN where no token wrote, as uninitialised memory may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
)

from rocm_patches.cpu.exact import ExactRows
from rocm_patches.reference import compressor
from rocm_patches.reference.kv_cache import AttentionRows, IndexerKeys, Rows
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import as_tensor, randn

EPS = 1e-6
TABLE = independent.rope_table(600, theta=160000.0)
TOKENS = 300


@dataclass(frozen=True)
class Kind:
    """A compressor of the model: tokens per entry, entry width, rows of a state page and of a cache page."""

    name: str
    ratio: int
    d: int
    state_rows: int
    page_rows: int
    page_bytes: int

    @property
    def window(self) -> int:
        return 2 * self.ratio if self.ratio == 4 else self.ratio

    @property
    def width(self) -> int:
        return 2 * self.d if self.ratio == 4 else self.d

    def rows(self) -> Rows:
        return AttentionRows() if self.d == 512 else IndexerKeys()


C4 = Kind("c4", 4, 512, 4, 64, 64 * 584)
C128 = Kind("c128", 128, 512, 8, 2, 2 * 584)
INDEXER = Kind("indexer", 4, 128, 4, 64, 64 * 132)
KINDS = pytest.mark.parametrize("kind", [C4, C128, INDEXER], ids=lambda kind: kind.name)


@dataclass(frozen=True)
class Sequence:
    """One sequence's projections, its state cache, and where each token's state row is."""

    kv: Tensor
    score: Tensor
    ape: Tensor
    norm: Tensor
    state: Tensor
    slots: Tensor

    def windows(self, kind: Kind, positions: list[int]) -> Tensor:
        """int64 [n, window]: state slots of the window that ends at each position, -1 before the start."""
        rows = [
            [int(self.slots[p]) if p >= 0 else -1 for p in range(last - kind.window + 1, last + 1)]
            for last in positions
        ]
        return torch.tensor(rows, dtype=torch.long).view(-1, kind.window)


def sequence(kind: Kind, tokens: int = TOKENS) -> Sequence:
    both = randn(tokens, 2 * kind.width, seed=1)  # kv and score are strided halves of one tensor
    kv, score = both.chunk(2, 1)
    ape = randn(kind.ratio, kind.width, seed=2)
    pages = -(-tokens // kind.state_rows) + 1
    state = torch.full((pages, kind.state_rows, 2 * kind.width), float("nan"))
    # Page 0 is never used: a slot of -1 must not be mistaken for its rows.
    order = torch.randperm(pages - 1, generator=independent.generator(3)) + 1
    position = torch.arange(tokens)
    slots = order[position // kind.state_rows] * kind.state_rows + position % kind.state_rows
    compressor.save_state(kv, score, ape, position, state, slots)
    return Sequence(kv, score, ape, randn(kind.d, seed=4), state, slots)


def pooled64(kind: Kind, s: Sequence, position: int) -> Tensor:
    """Per channel: softmax over the window of (score + ape), times kv.

    The older half of a ratio-4 window uses the first d columns, the newer half the last d.
    """
    gates, values = [], []
    for i in range(kind.window):
        p = position - kind.window + 1 + i
        if p < 0:
            continue
        first = 0 if i < kind.window - kind.ratio or kind.width == kind.d else kind.d
        columns = slice(first, first + kind.d)
        gates.append(s.score[p, columns].double() + s.ape[p % kind.ratio, columns].double())
        values.append(s.kv[p, columns].double())
    weight = [gate.exp() for gate in gates]
    total = torch.stack(weight).sum(0)
    return sum(
        (w * v / total for w, v in zip(weight, values, strict=True)), torch.zeros(kind.d, dtype=torch.float64)
    )


def entry64(kind: Kind, s: Sequence, position: int) -> Tensor:
    """Pooled, RMS-normed with gain, rotated at the first position of the current block."""
    normed = independent.rms_norm(pooled64(kind, s, position), EPS, s.norm)
    return independent.rotate(normed, TABLE[position // kind.ratio * kind.ratio])


def compress(
    kind: Kind, s: Sequence, positions: list[int], slots: list[int], cache: Tensor, rows: Rows
) -> None:
    compressor.compress(
        s.state,
        s.windows(kind, positions),
        torch.tensor(positions, dtype=torch.long),
        torch.tensor(slots, dtype=torch.long),
        s.norm,
        EPS,
        TABLE,
        cache,
        kind.page_rows,
        kind.ratio,
        rows,
    )


# --- save_state -------------------------------------------------------------------------------------


@KINDS
def test_save_state_writes_values_then_biased_scores(kind: Kind) -> None:
    s = sequence(kind, tokens=20)
    state = torch.full_like(s.state, 7.0)
    slots = s.slots.clone()
    slots[[0, 5, 19]] = -1
    positions = torch.arange(20) + 1000  # the bias goes by absolute position
    compressor.save_state(s.kv, s.score, s.ape, positions, state, slots)
    expected = torch.full_like(s.state, 7.0)
    for t in range(20):
        if int(slots[t]) >= 0:
            page, offset = divmod(int(slots[t]), kind.state_rows)
            expected[page, offset, : kind.width] = s.kv[t]
            expected[page, offset, kind.width :] = s.score[t] + s.ape[(1000 + t) % kind.ratio]
    assert torch.equal(state, expected)


def test_save_state_ignores_tokens_past_the_slots() -> None:
    s = sequence(C4, tokens=8)
    state = torch.zeros_like(s.state)
    compressor.save_state(s.kv, s.score, s.ape, torch.arange(8), state, s.slots[:3])
    assert int(state.flatten(0, 1).any(-1).sum()) == 3
    compressor.save_state(s.kv[:0], s.score[:0], s.ape, torch.arange(0), state, s.slots[:0])
    assert int(state.flatten(0, 1).any(-1).sum()) == 3


# --- pool -------------------------------------------------------------------------------------------


@KINDS
def test_pool_equals_the_formula(kind: Kind) -> None:
    s = sequence(kind)
    positions = [kind.ratio - 1, 2 * kind.ratio - 1, 255, 299]
    pooled = compressor.pool(s.state, s.windows(kind, positions), kind.ratio)
    assert pooled.dtype == torch.float32
    for row, position in zip(pooled, positions, strict=True):
        torch.testing.assert_close(row.double(), pooled64(kind, s, position), rtol=1e-5, atol=1e-6)


def test_pool_of_one_known_row_is_its_value() -> None:
    s = sequence(C4)
    only = torch.full((2, 8), -1)
    only[0, 7] = s.slots[0]  # in the newer half: the last d columns
    only[1, 0] = s.slots[0]  # in the older half: the first d columns
    pooled = compressor.pool(s.state, only, 4)
    torch.testing.assert_close(pooled[0], s.kv[0, 512:])
    torch.testing.assert_close(pooled[1], s.kv[0, :512])


def test_pool_of_no_window() -> None:
    assert compressor.pool(sequence(C128).state, torch.empty(0, 128, dtype=torch.long), 128).shape == (0, 512)


# --- compress ---------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("position", [3, 4, 7, 8, 127, 128, 255])
def test_one_step_stores_an_entry_only_at_the_end_of_a_block(kind: Kind, position: int) -> None:
    s = sequence(kind)
    cache = torch.full((4, kind.page_bytes), 0xA5, dtype=torch.uint8)
    exact = ExactRows(kind.d)
    slot = kind.page_rows + 1
    compress(kind, s, [position], [slot], cache, exact)
    stored = exact.read(cache, torch.arange(4 * kind.page_rows), kind.page_rows)
    if (position + 1) % kind.ratio:
        assert not stored.any()
        return
    torch.testing.assert_close(stored[slot].double(), entry64(kind, s, position), rtol=1e-5, atol=1e-5)
    stored[slot] = 0
    assert not stored.any()


@KINDS
def test_the_bytes_are_those_of_the_entry_rounded_to_bf16(kind: Kind) -> None:
    """In the middle layer of a shared allocation, at the last row of one page and the first of the next."""
    s = sequence(kind)
    allocation = torch.randint(
        0, 256, (3, 3 * kind.page_bytes), generator=independent.generator(5), dtype=torch.uint8
    )
    before = allocation.clone()
    here = slice(kind.page_bytes, 2 * kind.page_bytes)
    positions, slots = [127, 255, 128], [kind.page_rows - 1, kind.page_rows, 0]
    compress(kind, s, positions, slots, allocation[:, here], kind.rows())

    exact, scratch = ExactRows(kind.d), torch.zeros(3, kind.page_bytes, dtype=torch.uint8)
    compress(kind, s, positions, slots, scratch, exact)
    entries = exact.read(scratch, torch.tensor(slots[:2]), kind.page_rows).bfloat16().float()
    pages = [bytearray(page.tolist()) for page in before[:, here]]
    write = independent.write_attention_row if kind.d == 512 else independent.write_indexer_key
    for entry, slot in zip(entries, slots[:2], strict=True):
        write(pages[slot // kind.page_rows], slot % kind.page_rows, kind.page_rows, entry)
    before[:, here] = as_tensor(pages)
    assert torch.equal(allocation, before)


@KINDS
def test_a_prefill_equals_its_steps_and_skips_padded_slots(kind: Kind) -> None:
    s = sequence(kind)
    slots = [p // kind.ratio if (p + 1) % kind.ratio == 0 else -1 for p in range(TOKENS)]
    skipped = 2 * kind.ratio - 1
    slots[skipped] = -1
    caches = [torch.full((3, kind.page_bytes), 0xA5, dtype=torch.uint8) for _ in range(2)]
    compress(kind, s, list(range(TOKENS)), slots, caches[0], kind.rows())
    for position in range(TOKENS):
        compress(kind, s, [position], [slots[position]], caches[1], kind.rows())
    assert torch.equal(*caches)
    assert bool((caches[0][0] != 0xA5).any())
    assert bool((caches[0][2] == 0xA5).all())  # slot -1 is not the last row of the last page


@KINDS
def test_tokens_past_the_slots_are_padding(kind: Kind) -> None:
    s = sequence(kind)
    cache = torch.full((2, kind.page_bytes), 0xA5, dtype=torch.uint8)
    compress(kind, s, [255, 255], [], cache, kind.rows())
    compress(kind, s, [], [], cache, kind.rows())
    assert bool((cache == 0xA5).all())


# --- transformers -----------------------------------------------------------------------------------


def all_entries(kind: Kind, module: torch.nn.Module, hidden: Tensor, table: Tensor) -> Tensor:
    """Every entry of a sequence from a transformers compressor's weights, fp32, through this operator."""
    tokens = hidden.shape[0]
    blank = sequence(kind, tokens)
    state = torch.full_like(blank.state, float("nan"))
    kv, gate = module.kv_proj(hidden), module.gate_proj(hidden)
    compressor.save_state(kv, gate, module.position_bias, torch.arange(tokens), state, blank.slots)
    exact, cache = ExactRows(kind.d), torch.zeros(1, 1, dtype=torch.uint8)
    compressor.compress(
        state,
        blank.windows(kind, list(range(tokens))),
        torch.arange(tokens),
        torch.arange(tokens) // kind.ratio,
        module.kv_norm.weight,
        EPS,
        table,
        cache,
        tokens,
        kind.ratio,
        exact,
    )
    return exact.read(cache, torch.arange(tokens // kind.ratio), tokens)


@pytest.mark.parametrize("kind", [C4, C128], ids=lambda kind: kind.name)
def test_equals_transformers(kind: Kind) -> None:
    configuration = transformers_modules.config()
    hidden = randn(1, TOKENS, 64, seed=6)
    table = transformers_modules.rope_table(configuration, TOKENS, "compress")
    of_kind = DeepseekV4CSACompressor if kind is C4 else DeepseekV4HCACompressor
    module = transformers_modules.randomised(of_kind(configuration), seed=7)
    theirs, _ = module(hidden, randn(1, TOKENS, 32, seed=8), torch.arange(TOKENS).unsqueeze(0), None, 0)
    ours = all_entries(kind, module, hidden[0], table)
    assert ours.shape == (TOKENS // kind.ratio, 512)
    torch.testing.assert_close(ours, theirs[0, 0], rtol=1e-4, atol=1e-5)


def test_the_indexers_keys_equal_transformers() -> None:
    configuration = transformers_modules.config()
    hidden = randn(1, TOKENS, 64, seed=9)
    module = transformers_modules.randomised(DeepseekV4CSACompressor(configuration), seed=10).indexer
    seen: list[Tensor] = []
    module.scorer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    module(hidden, randn(1, TOKENS, 32, seed=11), torch.arange(TOKENS).unsqueeze(0), None, 0)
    table = transformers_modules.rope_table(configuration, TOKENS, "compress")
    ours = all_entries(INDEXER, module, hidden[0], table)
    torch.testing.assert_close(ours, seen[0][0], rtol=1e-4, atol=1e-5)
