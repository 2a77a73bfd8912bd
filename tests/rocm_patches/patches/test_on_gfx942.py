"""Each patch for gfx942 on vLLM's own AMD code: wrong or broken stock, right patched, judged in float64. The
cases run in processes of their own (on_gfx942.py), for both releases; no AMD hardware is involved.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.rocm_patches import gfx942

pytestmark = pytest.mark.vllm

CASES = "tests.rocm_patches.patches.on_gfx942"
# bf16 results: eight significant bits. fp32 sums of 64 x 128 products.
BF16, FP32 = 2.0**-8, 1e-5


@pytest.fixture(scope="module", params=["0.32.0", "0.33.0"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def both(release: str) -> tuple[Any, Any]:
    """What the cases said in two processes side by side: (stock, patched)."""
    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(lambda state: gfx942.run(CASES, release, state), ("stock", "patched"))
    return stock, patched


@pytest.fixture(scope="module")
def stock(both: tuple[Any, Any]) -> Any:
    return both[0]


@pytest.fixture(scope="module")
def patched(both: tuple[Any, Any]) -> Any:
    return both[1]


def test_every_patch_is_in_effect_wherever_it_is_called(stock: Any, patched: Any) -> None:
    """Modules that imported a function by value hold the patched one; stock, all hold the original."""
    sites = patched["call_sites"]
    assert sites["unpatched"] == []
    assert set(sites["states"].values()) == {"active"} and len(sites["states"]) >= 8
    by_value = {place for places in sites["holders"].values() for place in places}
    assert "vllm.models.deepseek_v4.amd.rocm:rocm_sparse_attn_decode" in by_value
    assert "vllm.model_executor.layers.quantization.fp8:normalize_e4m3fn_to_e4m3fnuz" in by_value
    assert set(stock["call_sites"]["unpatched"]) == by_value and len(by_value) > 10


# --- indexer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_indexer_keys_are_scored_right(stock: Any, patched: Any, kind: str) -> None:
    """Keys with values that round to -0. Stock: byte 0x80 is NaN to the reader, and the wrong keys are kept."""
    before, after = (run["indexer_decode_and_prefill"] for run in (stock, patched))
    assert before["codes 0x80"] > 100 and after["codes 0x80"] == 0
    assert before[kind]["error"] > 0.4 and before[kind]["wrong"] > 8
    assert after[kind]["error"] < FP32 and after[kind]["wrong"] == after[kind]["nan"] == 0


def test_indexer_runs_without_aiter(stock: Any, patched: Any) -> None:
    assert "requires AITER" in stock["without_aiter"]["raised"]
    assert patched["without_aiter"]["error"] < FP32 and patched["without_aiter"]["wrong"] == 0


@pytest.mark.parametrize(
    ("installed", "kernel"),
    [("flydsl", ["flydsl"]), ("triton", ["triton"]), ("nothing", []), ("flydsl broken", [])],
)
def test_prefill_logits_use_what_is_there(
    stock: Any, patched: Any, installed: str, kernel: list[str]
) -> None:
    before, after = (run["prefill_logits"][installed] for run in (stock, patched))
    assert after["kernel"] == kernel and after["error"] < FP32 and after["outside"]
    if installed == "flydsl":
        assert before == after
    else:
        assert "Error" in before["raised"]


def test_prefill_logits_without_aiter_are_not_rounded(stock: Any, patched: Any) -> None:
    """Stock rounds every dot product to bf16 before it is weighted and summed."""
    before, after = (run["prefill_logits"]["switched off"]["error"] for run in (stock, patched))
    assert after < FP32 < before


# --- attention --------------------------------------------------------------------------------------


def test_no_nan_reaches_the_compressed_cache(stock: Any, patched: Any) -> None:
    assert stock["compressed_cache_nan"]["nan"] > 0
    assert patched["compressed_cache_nan"] == {"nan": 0, "nan_scales": 0}


@pytest.mark.parametrize("output", ["plain", "slice", "fp32"])
def test_decode_writes_in_place_where_it_can(stock: Any, patched: Any, output: str) -> None:
    """The same numbers; and the output is handed to the kernel unless its type is another."""
    before, after = stock["decode"][output], patched["decode"][output]
    assert before["error"] == after["error"] < BF16
    assert not before["in place"]
    assert after["in place"] == (output != "fp32")


# --- weights ----------------------------------------------------------------------------------------


def test_whole_weights_load_unchanged(stock: Any, patched: Any) -> None:
    for run in (stock, patched):
        loaded = run["damaged_checkpoint"]
        assert (loaded["whole"], loaded["minus zero"], loaded["whole, experts"]) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    "damage", ["NaN code", "NaN scale", "scale too large", "NaN code, fp32 scale", "NaN code, experts"]
)
def test_damaged_weights_are_refused(stock: Any, patched: Any, damage: str) -> None:
    """Stock turns a NaN into a number: +-240 times twice the scale, or 2^126."""
    assert isinstance(stock["damaged_checkpoint"][damage], float)
    refusal = patched["damaged_checkpoint"][damage]
    assert refusal.startswith("refused: ") and "damaged" in refusal and "download it again" in refusal


# --- rotation, mHC ----------------------------------------------------------------------------------


def test_v32_indexer_keeps_its_rotation(stock: Any, patched: Any) -> None:
    """YaRN returns new tensors on ROCm and stock drops them; embeddings that rotate in place were right."""
    assert stock["rope_results"]["yarn"]["key error"] > 0.5
    assert patched["rope_results"]["yarn"]["key error"] <= BF16
    for run in (stock, patched):
        assert run["rope_results"]["plain"] == {"in place": True, "key error": pytest.approx(0, abs=BF16)}


def test_mhc_falls_back_where_aiter_fails(stock: Any, patched: Any) -> None:
    before, after = stock["mhc"], patched["mhc"]
    assert "invalid configuration argument" in before["cannot run"]["raised"]
    assert before["wrong"]["error"] > 0.5
    for width, kernel in (("works", "aiter"), ("wrong", "ours"), ("cannot run", "ours")):
        assert after[width]["kernel"] == kernel and after[width]["error"] < BF16


# --- what turned out not to need a patch (docs/patches.md, "Not needed") ----------------------------


def test_not_needed_tilelang_is_off_for_mhc(stock: Any) -> None:
    """Although the package is installed."""
    assert stock["mhc"]["TileLang"] is False


def test_not_needed_caches_agree_on_their_dialects(stock: Any) -> None:
    """The compressed cache is OCP on both sides, the sliding window FNUZ; decode reads both right (above)."""
    errors = stock["dialects_of_caches"]
    # An e4m3 value has three bits after the leading one.
    assert errors["compressed writer"] < 2.0**-4
    assert errors["compressed gather"] == errors["window gather"] == 0


def test_not_needed_offsets_have_64_bits(stock: Any) -> None:
    """And the case would notice: the same gather with the conversion taken out reads something else."""
    same = dict(stock["far_pages"])
    assert same.pop("gather with 32 bits") is False
    assert len(same) == 7 and all(same.values())


def test_not_needed_the_prefill_budget_counts_compressed_rows(stock: Any) -> None:
    budget = stock["prefill_budget"]
    assert budget == {"workspace rows": 131072 * 8 * 5 // 4, "chunks": 1}
