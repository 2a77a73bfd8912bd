"""Sparse attention: loops over tokens and heads in float64 on rows that the tests decode themselves.

Every cache here is full of NaN bytes outside the rows that a query names, is a strided view into a larger
allocation, and has its rows on shuffled pages.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

from rocm_patches import fp8
from rocm_patches.reference import attention
from rocm_patches.reference.kv_cache import AttentionRows
from tests.rocm_patches import independent
from tests.rocm_patches.independent import as_bytes, randn

SCALE = 512**-0.5
# fp32 against float64: 512-term dot products, then sums over at most 700 rows of order 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS = pytest.mark.parametrize("heads", [4, 64, 128], ids=["tiny", "flash", "pro"])


def attention64(q: Tensor, rows: list[Tensor], sink: Tensor, scale: float) -> Tensor:
    """Per token t and head: p_j = e^(s_j) / (sum e^(s_j) + e^(sink)), s_j = scale q . row_j; sum_j p_j row_j.

    q [T, h, d]; rows[t] float64 [K_t, d] the rows that token t sees.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            if len(rows[t]) == 0:
                continue
            logits = scale * (rows[t] @ q[t, head].double())
            top = max(float(logits.max()), float(sink[head]))
            e = [math.exp(float(s) - top) for s in logits]
            total = sum(e) + math.exp(float(sink[head]) - top)
            out[t, head] = torch.tensor([x / total for x in e], dtype=torch.float64) @ rows[t]
    return out


def poisoned_cache(
    pages: int, page_rows: int, slots: Tensor, seed: int, dialect: fp8.Dialect = fp8.OCP
) -> Tensor:
    """uint8 [pages, page_rows * 584], strided; rows at `slots` hold values, all else decodes to NaN."""
    width = page_rows * 584
    nan_code = 0xFF if dialect is fp8.OCP else 0x80
    allocation = torch.full((pages, 2 * width + 8), nan_code, dtype=torch.uint8)
    cache = allocation[:, 8 : 8 + width]
    used = slots.unique()
    rows = randn(int(used.numel()), 512, seed=seed, dtype=torch.bfloat16)
    AttentionRows(dialect).write(cache, used, rows, page_rows)
    return cache


def decoded(cache: Tensor, slots: list[int], page_rows: int, dialect: str = "ocp") -> Tensor:
    rows = [
        independent.read_attention_row(
            as_bytes(cache[slot // page_rows]), slot % page_rows, page_rows, dialect
        )
        for slot in slots
        if slot >= 0
    ]
    return torch.stack(rows) if rows else torch.empty(0, 512, dtype=torch.float64)


# --- attend -----------------------------------------------------------------------------------------


@HEADS
@pytest.mark.parametrize("tokens", [1, 3])
def test_attend_equals_the_loops(heads: int, tokens: int) -> None:
    q, keys, sink = randn(tokens, heads, 512, seed=1), randn(20, 512, seed=2), randn(heads, seed=3)
    index = torch.randint(0, 20, (tokens, 9), generator=independent.generator(4))
    valid = torch.rand(tokens, 9, generator=independent.generator(5)) < 0.7
    rows = [keys[index[t][valid[t]]].double() for t in range(tokens)]
    out = attention.attend(q, keys, index, valid, sink, SCALE)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), attention64(q, rows, sink, SCALE), **CLOSE)


def test_attend_equals_transformers() -> None:
    """Every query over the same keys under a causal mask."""
    heads, tokens = 8, 6
    q, keys, sink = randn(tokens, heads, 512, seed=6), randn(tokens, 512, seed=7), randn(heads, seed=8)
    module = SimpleNamespace(num_key_value_groups=heads, sinks=sink, training=False)
    shared = keys.view(1, 1, tokens, 512)
    mask = torch.full((tokens, tokens), -math.inf).triu(1).view(1, 1, tokens, tokens)
    theirs, _ = eager_attention_forward(module, q.transpose(0, 1).unsqueeze(0), shared, shared, mask, SCALE)
    index = torch.arange(tokens).repeat(tokens, 1)
    out = attention.attend(q, keys, index, index <= torch.arange(tokens).unsqueeze(1), sink, SCALE)
    torch.testing.assert_close(out, theirs[0], **CLOSE)


def test_attend_in_slices_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, sink = randn(7, 2, 512, seed=9), randn(5, 512, seed=10), randn(2, seed=11)
    index = torch.randint(0, 5, (7, 3), generator=independent.generator(12))
    valid = torch.ones(7, 3, dtype=torch.bool)
    whole = attention.attend(q, keys, index, valid, sink, SCALE)
    for slice_of in (1, 2, 3):  # 7 tokens leave a short last slice
        monkeypatch.setattr(attention, "_SLICE_ELEMENTS", slice_of * 3 * 512)
        torch.testing.assert_close(
            attention.attend(q, keys, index, valid, sink, SCALE), whole, rtol=1e-6, atol=1e-7
        )


def test_attend_of_a_row_that_sees_nothing_is_exactly_zero() -> None:
    q, keys = randn(2, 3, 512, seed=13), randn(4, 512, seed=14)
    index = torch.zeros(2, 4, dtype=torch.long)
    valid = torch.tensor([[False] * 4, [True] * 4])
    sink = torch.tensor([-math.inf, 0.0, 50.0])
    out = attention.attend(q, keys, index, valid, sink, SCALE)
    assert not out[0].any() and out[1, 0].any()
    assert bool(out.isfinite().all())


def test_a_sink_of_minus_infinity_is_plain_softmax() -> None:
    q, keys = randn(2, 2, 512, seed=15), randn(4, 512, seed=16)
    index, valid = torch.arange(4).repeat(2, 1), torch.ones(2, 4, dtype=torch.bool)
    out = attention.attend(q, keys, index, valid, torch.full((2,), -math.inf), SCALE)
    weight = torch.softmax(SCALE * torch.einsum("thd,kd->thk", q.double(), keys.double()), -1)
    torch.testing.assert_close(out.double(), torch.einsum("thk,kd->thd", weight, keys.double()), **CLOSE)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits_and_sinks_do_not_overflow(size: float) -> None:
    keys = randn(3, 512, seed=17)
    index, valid = torch.arange(3).view(1, 3), torch.ones(1, 3, dtype=torch.bool)
    q = keys[1].view(1, 1, 512) * size
    out = attention.attend(q.expand(1, 2, 512), keys, index, valid, torch.tensor([0.0, 2 * abs(size)]), 1.0)
    rows = [keys.double()]
    expected = attention64(q.expand(1, 2, 512), rows, torch.tensor([0.0, 2 * abs(size)]), 1.0)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


# --- sparse_attention -------------------------------------------------------------------------------


def lists_with_gaps(tokens: int, width: int, pool: Tensor, seed: int) -> Tensor:
    """Slot lists [tokens, width]: picks from the pool, repeats included, and -1 wherever it falls."""
    source = independent.generator(seed)
    picks = pool[torch.randint(0, len(pool), (tokens, width), generator=source)]
    return picks.masked_fill(torch.rand(tokens, width, generator=source) < 0.3, -1)


# (rows of a compressed page, entries in a list): window only, ratio 4, ratio 128.
SEGMENTS = pytest.mark.parametrize(
    ("page_rows", "entries"), [(1, 0), (64, 24), (2, 5)], ids=["swa", "c4", "c128"]
)


@HEADS
@SEGMENTS
def test_sparse_attention_equals_the_loops(heads: int, page_rows: int, entries: int) -> None:
    tokens = 2
    window_pool = torch.tensor([0, 63, 64, 127, 70, 128, 191])  # both edges of three pages
    window_slots = lists_with_gaps(tokens, 16, window_pool, seed=18)
    window = poisoned_cache(3, 64, window_pool, seed=19)
    pool = torch.tensor([0, page_rows - 1, page_rows, 2 * page_rows - 1, 3 * page_rows])
    slots = lists_with_gaps(tokens, entries, pool, seed=20)
    compressed = poisoned_cache(4, page_rows, pool, seed=21)
    q = randn(tokens, heads, 512, seed=22, dtype=torch.bfloat16)
    sink = randn(heads, seed=23)

    out = attention.sparse_attention(
        q, (window, window_slots, 64), (compressed, slots, page_rows), sink, SCALE, AttentionRows()
    )
    rows = [
        torch.cat(
            (decoded(window, window_slots[t].tolist(), 64), decoded(compressed, slots[t].tolist(), page_rows))
        )
        for t in range(tokens)
    ]
    assert out.shape == (tokens, heads, 512) and out.dtype == torch.float32
    torch.testing.assert_close(out.double(), attention64(q, rows, sink, SCALE), **CLOSE)


def test_fnuz_rows() -> None:
    pool = torch.tensor([1, 5])
    cache = poisoned_cache(2, 4, pool, seed=24, dialect=fp8.FNUZ)
    slots = torch.tensor([[5, -1, 1]])
    q, sink = randn(1, 4, 512, seed=25), randn(4, seed=26)
    rows = AttentionRows(fp8.FNUZ)
    out = attention.sparse_attention(q, (cache, slots, 4), (cache, slots[:, :0], 4), sink, SCALE, rows)
    expected = attention64(q, [decoded(cache, [5, 1], 4, "fnuz")], sink, SCALE)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_a_slot_named_twice_counts_twice_and_order_does_not_matter() -> None:
    pool = torch.tensor([0, 2, 3])
    cache = poisoned_cache(1, 4, pool, seed=27)
    q, sink = randn(1, 4, 512, seed=28), randn(4, seed=29)

    def run(slots: list[int]) -> Tensor:
        lists = torch.tensor([slots])
        none = lists[:, :0]
        return attention.sparse_attention(
            q, (cache, lists, 4), (cache, none, 4), sink, SCALE, AttentionRows()
        )

    expected = attention64(q, [decoded(cache, [0, 2, 2, 3], 4)], sink, SCALE)
    torch.testing.assert_close(run([0, 2, 2, 3]).double(), expected, **CLOSE)
    torch.testing.assert_close(run([2, -1, 3, 0, -1, 2]), run([0, 2, 2, 3]), **CLOSE)
    assert not torch.allclose(run([0, 2, 3]), run([0, 2, 2, 3]), **CLOSE)


def test_the_same_slot_number_in_both_segments_names_two_rows() -> None:
    one = poisoned_cache(1, 4, torch.tensor([2]), seed=30)
    other = poisoned_cache(1, 4, torch.tensor([2]), seed=31)
    slots = torch.tensor([[2]])
    q, sink = randn(1, 2, 512, seed=32), torch.full((2,), -math.inf)
    out = attention.sparse_attention(q, (one, slots, 4), (other, slots, 4), sink, SCALE, AttentionRows())
    rows = torch.cat((decoded(one, [2], 4), decoded(other, [2], 4)))
    torch.testing.assert_close(out.double(), attention64(q, [rows], sink, SCALE), **CLOSE)


@pytest.mark.parametrize("sink", [-math.inf, 1.5])
def test_nothing_but_empty_slots_gives_zero(sink: float) -> None:
    cache = poisoned_cache(1, 4, torch.tensor([1]), seed=33)
    slots = torch.tensor([[-1, -1], [1, -1]])
    out = attention.sparse_attention(
        randn(2, 3, 512, seed=34),
        (cache, slots, 4),
        (cache, torch.full((2, 5), -1), 4),
        torch.full((3,), sink),
        SCALE,
        AttentionRows(),
    )
    assert not out[0].any()
    assert bool(out[1].isfinite().all()) and bool(out[1].any())


def test_no_tokens() -> None:
    cache = poisoned_cache(1, 64, torch.tensor([1]), seed=35)
    none = torch.empty(0, 128, dtype=torch.long)
    out = attention.sparse_attention(
        torch.empty(0, 4, 512),
        (cache, none, 64),
        (cache, none, 64),
        randn(4, seed=36),
        SCALE,
        AttentionRows(),
    )
    assert out.shape == (0, 4, 512)


def test_reading_leaves_every_byte_as_it_was() -> None:
    cache = poisoned_cache(2, 4, torch.tensor([1, 6]), seed=37)
    before = cache.clone()
    slots = torch.tensor([[1, 6, -1]])
    attention.sparse_attention(
        randn(1, 2, 512, seed=38),
        (cache, slots, 4),
        (cache, slots, 4),
        torch.zeros(2),
        SCALE,
        AttentionRows(),
    )
    assert torch.equal(cache, before)
