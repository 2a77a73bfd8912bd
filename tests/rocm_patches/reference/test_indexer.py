"""The indexer: loops in float64 over queries, heads and entries, transformers' indexer, and Python's sort."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

from rocm_patches import fp8
from rocm_patches.cpu.exact import ExactRows
from rocm_patches.reference import indexer
from rocm_patches.reference.kv_cache import IndexerKeys
from rocm_patches.reference.rope import rotate
from tests.rocm_patches import independent, transformers_modules
from tests.rocm_patches.independent import BF16, as_bytes, randn

TABLE = independent.rope_table(2300, theta=160000.0)
DIALECTS = pytest.mark.parametrize("dialect", [fp8.OCP, fp8.FNUZ], ids=lambda d: d.name)
# Flash and Pro both have 64 indexer heads of 128.
HEADS = pytest.mark.parametrize("heads", [2, 64], ids=["tiny", "published"])
EDGES = [0, 1, 511, 512, 513]


# --- quantise_query ---------------------------------------------------------------------------------


@HEADS
@DIALECTS
def test_query_codes_and_folded_weights_equal_the_formula(heads: int, dialect: fp8.Dialect) -> None:
    """At position 0 nothing turns, so that every code can be compared."""
    q, weights = randn(2, heads, 128, seed=1, scale=5), randn(2, heads, seed=2)
    zero = torch.zeros(2, dtype=torch.long)
    codes, folded = indexer.quantise_query(q, zero, TABLE, weights, 128**-0.5, heads**-0.5, dialect)
    assert codes.dtype == torch.uint8 and folded.dtype == torch.float32
    for t in range(2):
        for head in range(heads):
            rounded = independent.bf16_values(independent.bf16_bytes(q[t, head]))
            expected, (n,) = independent.quantise(rounded, 128, dialect.name)
            assert torch.equal(codes[t, head], expected)
            weight = float(weights[t, head]) * 2.0**n * 128**-0.5 * heads**-0.5
            assert float(folded[t, head]) == pytest.approx(weight, rel=1e-6)


@HEADS
def test_query_is_rotated_before_it_is_quantised(heads: int) -> None:
    """code * scale is within half an e4m3 step and one bf16 rounding of the rotated query."""
    q, ones = randn(3, heads, 128, seed=3), torch.ones(3, heads)
    positions = torch.tensor([1, 2051, 2299])
    codes, scale = indexer.quantise_query(q, positions, TABLE, ones, 1.0, 1.0)
    values = independent.e4m3_values("ocp")[codes.long()] * scale.double().unsqueeze(-1)
    for t, position in enumerate(positions.tolist()):
        expected = independent.rotate(q[t], TABLE[position])
        smallest = expected.abs().amax(-1, keepdim=True) * 2.0**-14  # subnormal codes below that
        bound = expected.abs().maximum(smallest) * (2.0**-4 + 2 * BF16)
        assert bool(((values[t] - expected).abs() <= bound).all())


def test_no_queries() -> None:
    none = torch.empty(0, dtype=torch.long)
    codes, folded = indexer.quantise_query(torch.empty(0, 64, 128), none, TABLE, torch.empty(0, 64), 1.0, 1.0)
    assert codes.shape == (0, 64, 128) and folded.shape == (0, 64)


# --- paged_logits -----------------------------------------------------------------------------------


def paged_keys(lengths: list[int], page_rows: int, dialect: fp8.Dialect) -> tuple[Tensor, Tensor]:
    """(cache, page table) of one request per length. Pages are shuffled and strided, the rest is NaN."""
    pages = max(1, max(-(-n // page_rows) for n in lengths))
    order = torch.randperm(len(lengths) * pages, generator=independent.generator(4))
    page_table = order.view(len(lengths), pages).int()
    width = page_rows * 132
    nan_code = 0xFF if dialect is fp8.OCP else 0x80
    allocation = torch.full((len(order), width + 64), nan_code, dtype=torch.uint8)
    # A NaN scale too: 0xFF bytes are one, 0x80 bytes are not.
    allocation[:, 64 + page_rows * 128 :] = 0xFF
    cache = allocation[:, 64:]
    for b, n in enumerate(lengths):
        entry = torch.arange(n)
        slots = page_table[b, entry // page_rows].long() * page_rows + entry % page_rows
        IndexerKeys(dialect).write(cache, slots, randn(n, 128, seed=5 + b), page_rows)
        page_table[b, -(-n // page_rows) :] = 10**6  # no such page: nobody may look there
    return cache, page_table


@HEADS
@DIALECTS
def test_logits_equal_the_loops(heads: int, dialect: fp8.Dialect) -> None:
    page_rows, lengths = 4, [0, 1, 3, 4, 5, 9]
    cache, page_table = paged_keys(lengths, page_rows, dialect)
    q, weights = randn(6, heads, 128, seed=20), randn(6, heads, seed=21)
    logits = indexer.paged_logits(
        q, weights, torch.tensor(lengths).int(), page_table, cache, page_rows, 12, IndexerKeys(dialect)
    )
    assert logits.shape == (6, 12) and logits.dtype == torch.float32
    for b, n in enumerate(lengths):
        for t in range(n):
            page = as_bytes(cache[int(page_table[b, t // page_rows])])
            key = independent.read_indexer_key(page, t % page_rows, page_rows, dialect.name)
            score = sum(float(weights[b, h]) * max(float(q[b, h].double() @ key), 0.0) for h in range(heads))
            # fp32 sums of 64 x 128 products; a score is of order sqrt(64 * 128).
            assert float(logits[b, t]) == pytest.approx(score, rel=1e-4, abs=1e-3)
        assert bool((logits[b, n:] == -math.inf).all())


def test_logits_at_the_lengths_around_512() -> None:
    cache, page_table = paged_keys(EDGES, 64, fp8.OCP)
    q, weights = randn(5, 64, 128, seed=22), randn(5, 64, seed=23)
    # In decode vLLM passes the uncompressed maximum, far more than there are entries.
    for longest in (513, 2052):
        logits = indexer.paged_logits(
            q, weights, torch.tensor(EDGES), page_table, cache, 64, longest, IndexerKeys()
        )
        assert logits.shape == (5, longest)
        for b, n in enumerate(EDGES):
            assert bool((logits[b, n:] == -math.inf).all())
            if n == 0:
                continue
            slots = page_table[b].long().repeat_interleave(64)[:n] * 64 + torch.arange(n) % 64
            keys = IndexerKeys().read(cache, slots, 64).double()  # its own layout test is in test_kv_cache.py
            dots = torch.einsum("hd,td->ht", q[b].double(), keys).clamp(min=0)
            expected = torch.einsum("h,ht->t", weights[b].double(), dots)
            torch.testing.assert_close(logits[b, :n].double(), expected, rtol=1e-4, atol=1e-3)


def test_logits_in_slices_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, page_table = paged_keys([7, 0, 5, 7, 2], 4, fp8.OCP)
    q, weights = randn(5, 4, 128, seed=24), randn(5, 4, seed=25)
    arguments = (q, weights, torch.tensor([7, 0, 5, 7, 2]), page_table, cache, 4, 8, IndexerKeys())
    whole = indexer.paged_logits(*arguments)
    for slice_of in (1, 2, 3):
        monkeypatch.setattr(indexer, "_SLICE_ELEMENTS", slice_of * 7 * 128)
        torch.testing.assert_close(indexer.paged_logits(*arguments), whole, rtol=1e-5, atol=1e-5)


def test_logits_of_nothing() -> None:
    cache, page_table = paged_keys([4], 4, fp8.OCP)
    none = indexer.paged_logits(
        torch.empty(0, 4, 128),
        torch.empty(0, 4),
        torch.empty(0).int(),
        page_table[:0],
        cache,
        4,
        8,
        IndexerKeys(),
    )
    assert none.shape == (0, 8)
    q, weights = randn(1, 4, 128, seed=26), randn(1, 4, seed=27)
    for length, longest in ((0, 8), (4, 0)):
        logits = indexer.paged_logits(
            q, weights, torch.tensor([length]), page_table, cache, 4, longest, IndexerKeys()
        )
        assert logits.shape == (1, longest) and bool((logits == -math.inf).all())


@HEADS
def test_scores_and_choice_equal_transformers(heads: int) -> None:
    """The whole indexer without quantisation: its queries, its scores, and its top-k of a causal prefill."""
    tokens, k = 200, 16
    configuration = transformers_modules.config(index_n_heads=heads, index_topk=k)
    module = transformers_modules.randomised(DeepseekV4Indexer(configuration), seed=28)
    seen: list[tuple[Tensor, ...]] = []
    module.scorer.register_forward_hook(lambda _, arguments, result: seen.append((*arguments, result)))
    hidden, residual = randn(1, tokens, 64, seed=29), randn(1, tokens, 32, seed=30)
    position = torch.arange(tokens)
    their_choice = module(hidden, residual, position.unsqueeze(0), None, 0)[0]
    their_q, their_keys, _, their_scores = (t[0] for t in seen[0])

    table = transformers_modules.rope_table(configuration, tokens, "compress")
    q = rotate(module.q_b_proj(residual[0]).view(tokens, heads, 128), position, table)
    torch.testing.assert_close(q, their_q, rtol=0, atol=1e-5)
    entries = tokens // 4
    cache, keys = torch.zeros(1, 1, dtype=torch.uint8), ExactRows(128)
    keys.write(cache, torch.arange(entries), their_keys, entries)
    weights = module.scorer.weights_proj(hidden[0]) * heads**-0.5 * 128**-0.5
    lengths = (position + 1) // 4
    page_table = torch.zeros(tokens, 1, dtype=torch.int32)
    logits = indexer.paged_logits(q, weights, lengths, page_table, cache, entries, entries, keys)
    seen_by = torch.arange(entries) < lengths.unsqueeze(1)
    torch.testing.assert_close(logits[seen_by], their_scores[seen_by], rtol=1e-4, atol=1e-4)

    # By score, not by index: two heads' relu leaves many scores at exactly 0, and ties are theirs to break.
    choice = indexer.topk(their_scores, lengths, k).long()
    assert torch.equal((choice < 0).sum(1), (their_choice < 0).sum(1))
    ours, theirs = (
        their_scores.gather(1, c.clamp(min=0)).masked_fill(c < 0, -math.inf).sort().values
        for c in (choice, their_choice)
    )
    assert torch.equal(ours, theirs)


# --- topk -------------------------------------------------------------------------------------------


def best(scores: list[float], length: int, k: int) -> list[int]:
    """Python's sort: larger score first, then lower index; -1 where there are fewer than k."""
    order = sorted(range(length), key=lambda i: (-scores[i], i))[:k]
    return order + [-1] * (k - len(order))


@pytest.mark.parametrize("columns", [513, 2052])
def test_topk_at_the_lengths_around_512(columns: int) -> None:
    scores = randn(5, columns, seed=31)
    chosen = indexer.topk(scores, torch.tensor(EDGES).int(), 512)
    assert chosen.shape == (5, 512) and chosen.dtype == torch.int32
    for b, n in enumerate(EDGES):
        assert chosen[b].tolist() == best(scores[b].tolist(), n, 512)


def test_topk_gives_ties_to_the_lower_index() -> None:
    scores = torch.randint(0, 3, (4, 700), generator=independent.generator(32)).float()
    scores[3] = 0.0
    chosen = indexer.topk(scores, torch.tensor([700, 600, 513, 700]), 512)
    for b, n in enumerate([700, 600, 513, 700]):
        assert chosen[b].tolist() == best(scores[b].tolist(), n, 512)
    assert chosen[3].tolist() == list(range(512))


def test_topk_never_looks_past_a_rows_length() -> None:
    scores = torch.full((2, 8), float("inf"))
    scores[:, :3] = torch.tensor([-1e30, -5.0, -1e30])
    assert indexer.topk(scores, torch.tensor([3, 1]), 4).tolist() == [[1, 0, 2, -1], [0, -1, -1, -1]]


def test_topk_of_fewer_columns_than_k_and_of_no_rows() -> None:
    assert indexer.topk(torch.tensor([[1.0, 3.0]]), torch.tensor([2]), 4).tolist() == [[1, 0, -1, -1]]
    assert indexer.topk(torch.empty(0, 600), torch.empty(0).int(), 512).shape == (0, 512)


# --- to_slots ---------------------------------------------------------------------------------------


def test_to_slots_goes_through_the_page_table() -> None:
    page_table = torch.tensor([[7, 3, 9], [0, 1, 2]], dtype=torch.int32)
    index = torch.tensor([[0, 63, 64, 127, 128, -1], [191, -1, -1, 5, 64, 0]], dtype=torch.int32)
    slots = indexer.to_slots(index, page_table, 64)
    for b in range(2):
        for i, entry in enumerate(index[b].tolist()):
            expected = int(page_table[b, entry // 64]) * 64 + entry % 64 if entry >= 0 else -1
            assert int(slots[b, i]) == expected
    assert slots.dtype == torch.int64
