"""This bundle's kernels in vLLM: called where vLLM calls its own, with the results of what they replace, on a simulated
gfx942 (kernels_on_gfx942.py), for both releases; and the variable that chooses them.
"""

from __future__ import annotations

from typing import Any

import pytest

from rocm_patches.patches import switch
from rocm_patches.registry import PatchError
from tests.rocm_patches import gfx942

CASES = "tests.rocm_patches.patches.kernels_on_gfx942"
# Four roundings to bf16 between two decoder layers, each at most 2^-8 of a value.
BF16 = 2.0**-8
SEAM = ["seam_kernel", "finish_kernel"]


@pytest.fixture(scope="module", params=["0.32.0", "0.33.0"])
def done(request: pytest.FixtureRequest) -> Any:
    return gfx942.run(CASES, request.param, env={"DSV4_KERNELS": "all"})


@pytest.mark.vllm
def test_decoder_layers_take_the_path_with_one_operator(done: Any) -> None:
    """Two layers have four seams of two launches, norms inside, and a post at the end; results as vLLM's own path."""
    seams = done["seams"]
    assert seams["fused"] and seams["norms inside"]
    assert seams["launches"] == [*(4 * SEAM), "post_kernel"]
    assert 0 < seams["error"] < 4 * BF16


@pytest.mark.vllm
def test_head_is_one_launch_and_sees_new_weights(done: Any) -> None:
    head = done["head"]
    assert head["launches"] == ["head_kernel"] and head["hooked"]
    assert max(head["error"], head["reloaded"]) < BF16


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["CSA", "indexer", "HCA"])
def test_compressor_writes_the_same_bytes_in_one_launch(done: Any, kind: str) -> None:
    """After a prefill and a decode step, state and cache are those of vLLM's (patched) kernels."""
    made = done["compressors"][kind]
    assert made["state"] and made["written"] > 100
    assert made["same bytes"] > 0.999 and made["furthest byte"] <= 1
    assert made["launches"] == ["compress_kernel"] * 2


@pytest.mark.vllm
def test_output_projection_in_fp8_on_request(done: Any) -> None:
    """The activations are rounded to three bits behind the leading one, 2^-4 at most, and summed."""
    made = done["output_projection"]
    assert made["launches"] == ["product_kernel"] and 0 < made["error"] < 2.0**-4
    assert made["by default"] == [0.0, []]


@pytest.mark.vllm
def test_prologue_on_request(done: Any) -> None:
    made = done["prologue"]
    assert made["launches"] == ["prologue_kernel"] and made["error"] < BF16
    assert made["same bytes"] > 0.999 and made["written"] > 2000


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["biased", "hashed"])
def test_router_on_request(done: Any, kind: str) -> None:
    made = done["router"][kind]
    assert made["launches"] == ["router_kernel"] and made["experts"] and made["error"] < 1e-5


@pytest.mark.parametrize(
    ("value", "kernels"),
    [
        (None, {"mhc", "compressor"}),
        (" Auto ", {"mhc", "compressor"}),
        ("off", set()),
        ("all", {"mhc", "compressor", "prologue", "output", "router"}),
        ("mhc, output,", {"mhc", "output"}),
    ],
)
def test_switch(value: str | None, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv(switch.SWITCH, raising=False)
    else:
        monkeypatch.setenv(switch.SWITCH, value)
    assert {name for name in switch.ALL if switch.wanted(name)} == kernels


def test_switch_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.SWITCH, "mhc,attention")
    with pytest.raises(PatchError, match=r"attention.*compressor, mhc, output, prologue, router"):
        switch.wanted("mhc")
