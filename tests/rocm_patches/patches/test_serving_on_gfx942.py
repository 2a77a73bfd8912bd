"""Which kernels run the experts, side streams and KV offload, by vLLM's own code on a simulated gfx942, for both
releases (serving_on_gfx942.py). Proof of patches, and of what turned out not to need one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.rocm_patches import gfx942

pytestmark = pytest.mark.vllm

CASES = "tests.rocm_patches.patches.serving_on_gfx942"


@pytest.fixture(scope="module", params=["0.32.0", "0.33.0"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stock(release: str) -> Any:
    return gfx942.run(CASES, release, "stock")


@pytest.fixture(scope="module")
def patched(release: str) -> Any:
    return gfx942.run(CASES, release, "patched")


FASTER, USUAL = "AITER_TRITON_MXFP4_BF16", "TRITON_UNFUSED"


def test_experts_run_on_aiters_kernel_where_it_takes_them(stock: Any, patched: Any, release: str) -> None:
    before, after = stock["expert_backends"], patched["expert_backends"]
    assert set(before.values()) == {USUAL, "NotImplementedError"}
    newer = FASTER if release == "0.33.0" else USUAL  # which kinds of layers AITER's class takes
    assert after == before | {
        "flash tp4": FASTER,
        "pro tp4": FASTER,
        "hash routed": newer,
        "expert parallel": newer,
    }
    assert after["pro tp8"] == USUAL, "384 columns an expert would be padded to 512"


def test_aiter_is_asked_only_for_what_it_has(patched: Any, release: str) -> None:
    lacks = patched["what_aiter_lacks"]
    assert lacks["new"] is lacks["takes anything"] is None
    assert lacks["no kernel"] == "AITER has no moe_gemm_a16w4"
    assert lacks["old routing"].startswith("AITER's routing has no bias, renorm")
    if release == "0.33.0":
        assert lacks["August 2026"] == "AITER's moe_gemm_a16w4 has no expert_map, gate_valid"
        assert lacks["no hash routing"] == "AITER has no routing_from_hash"
    else:
        assert lacks["August 2026"] is lacks["no hash routing"] is None


def test_not_needed_the_clamp_reaches_every_expert(stock: Any) -> None:
    """Values over 10: routed and shared experts agree with float64, which an unclamped one does not by far."""
    result = stock["swiglu_limit"]
    assert result["TRITON_UNFUSED is told"] == result["AITER_TRITON_MXFP4_BF16 is told"] == 10.0
    assert result["AITER's first GEMM is asked for"] == 10.0
    assert max(result["routed error"], result["shared error"]) < 2**-8 < 1 < result["error without a clamp"]


def test_not_needed_the_expert_map_is_the_kernels_own(stock: Any) -> None:
    assert stock["expert_map"] == {
        "AITER's fused kernel": "mask",
        "another kernel": "map",
        "AiterW4A16ExpertsMonolithic": "map",
        "UnfusedOAITritonExperts": "map",
    }


def test_not_needed_padded_lanes_of_the_routing_do_no_harm(stock: Any) -> None:
    """Against a sort, with and without unrouted slots, below, at and above the kernel's 32 tokens a block."""
    assert set(stock["padded_lanes"].values()) == {0} and len(stock["padded_lanes"]) == 10


def test_side_streams(stock: Any, patched: Any) -> None:
    """vLLM forks where graphs are captured and in the profiling run, never in eager steps, never for MTP."""
    own_rule = ["captured", "profiling run"]
    expected = {
        "as started": own_rule,
        "MTP has none on ROCm": True,
        "off": [],
        "captured": ["captured"],
        "AUTO": own_rule,
    }
    assert stock["side_streams"] == patched["side_streams"] == expected


def test_kv_blocks_are_loaded_behind_what_computes(stock: Any, patched: Any) -> None:
    """vllm#47282: a load may not overtake the step that reads the block which it overwrites."""
    assert stock["kv_loads"] == {"load": None, "store": "compute"}
    assert patched["kv_loads"] == {"load": "compute", "store": "compute"}
