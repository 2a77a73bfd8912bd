"""Weights: the inventory adds up to what DeepSeek published, and ranks share it as published loads say."""

from __future__ import annotations

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.plan import weights

# Payload of all tensors, from the safetensors headers that Hugging Face shows per repository
# (https://huggingface.co/deepseek-ai); 0731 was compared tensor by tensor.
PUBLISHED = {
    "deepseek-v4-flash": 159_609_485_896,
    "deepseek-v4-flash-0731": 166_878_536_440,
    "deepseek-v4-pro": 864_704_792_696,
    "deepseek-v4-pro-0813": 892_595_197_672,
}


def parts(name: str) -> tuple[weights.Weights, weights.Weights]:
    model = catalog.models()[name]
    dtype = model.traits.expert_dtype
    return weights.backbone(model.dims, dtype), weights.draft(model.dims, model.traits.draft, dtype)


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items())
def test_the_payload_is_the_published_one_to_the_byte(name: str, size: int) -> None:
    backbone, draft = parts(name)
    assert (backbone + draft).total == size == catalog.models()[name].weight_bytes


def test_fp8_experts_come_within_a_percent_of_the_published_size() -> None:
    backbone, draft = parts("deepseek-v4-flash-base")
    assert (backbone + draft).total == pytest.approx(293e9, rel=0.01)


def test_tiny_is_what_its_writer_writes(tiny_checkpoint: object) -> None:
    import json
    import pathlib
    import struct

    payload = 0
    for shard in pathlib.Path(str(tiny_checkpoint)).glob("*.safetensors"):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        payload += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        )
    assert parts("tiny")[0].total == payload


@pytest.mark.parametrize(
    ("name", "with_draft", "tp", "gib"),
    # GiB per rank: https://recipes.vllm.ai/deepseek-ai/DeepSeek-V4-Flash (TP1), the others by the same shapes
    [
        ("deepseek-v4-flash", False, 1, 145.30),
        ("deepseek-v4-flash", True, 1, 148.65),
        ("deepseek-v4-flash-0731", True, 1, 155.42),
        ("deepseek-v4-flash", False, 2, 73.26),
        ("deepseek-v4-flash", False, 4, 37.25),
        ("deepseek-v4-flash-0731", True, 4, 39.93),
        ("deepseek-v4-flash", False, 8, 19.24),
        ("deepseek-v4-pro", False, 4, 200.57),
        ("deepseek-v4-pro", False, 8, 101.94),
        ("deepseek-v4-pro-0813", True, 8, 107.11),
    ],
)
def test_what_one_rank_holds(name: str, with_draft: bool, tp: int, gib: float) -> None:
    backbone, draft = parts(name)
    whole = backbone + draft if with_draft else backbone
    assert weights.per_rank(whole, tp=tp) / 2**30 == pytest.approx(gib, abs=0.006)


def test_padded_experts_of_pro() -> None:
    # https://github.com/SemiAnalysisAI/InferenceX/pull/2194: about 131 GB per GPU at TP8, experts 384 -> 512
    dims = catalog.models()["deepseek-v4-pro"].dims
    padding = weights.expert_padding(dims, 8, 256)
    assert padding == pytest.approx(4 / 3)
    assert weights.expert_padding(dims, 8, 128) == 1.0
    assert weights.per_rank(weights.backbone(dims), tp=8, padding=padding) / 2**30 == pytest.approx(
        133.84, abs=0.01
    )


def test_data_parallelism_repeats_the_dense_weights() -> None:
    backbone, _ = parts("deepseek-v4-pro")
    spread = weights.per_rank(backbone, tp=1, dp=8, ep=True)
    repeated = weights.per_rank(backbone, tp=1, dp=8)
    assert spread == pytest.approx(backbone.experts / 8 + backbone.split + backbone.replicated)
    assert repeated == backbone.total
    assert weights.per_rank(backbone, tp=8, ep=True) == weights.per_rank(backbone, tp=8)
