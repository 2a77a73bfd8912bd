"""Each rule refuses what it should, says what is possible, and lets the rest pass."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.plan import rules

FLASH = catalog.models()["deepseek-v4-flash"]
TINY = catalog.models()["tiny"]


def case(**changes: object) -> rules.Case:
    fine = rules.Case("cpu", "tiny", TINY.dims, TINY.weight_bytes, 1, 4096, (), {})
    return dataclasses.replace(fine, **changes)


def refused(**changes: object) -> rules.Refusal:
    refusal = rules.first_refusal(case(**changes))
    assert refusal is not None
    assert refusal.why
    assert refusal.fix
    return refusal


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny", (1, 2, 4)),
        ("deepseek-v4-flash", (1, 2, 4, 8)),
        ("deepseek-v4-flash-0731", (1, 2, 4, 8)),
        ("deepseek-v4-pro", (1, 2, 4, 8)),
        ("deepseek-v4-pro-0813", (1, 2, 4, 8)),
    ],
)
def test_legal_tp(model: str, sizes: tuple[int, ...]) -> None:
    assert rules.legal_tp(catalog.models()[model].dims) == sizes


def test_pro_at_16_fails_only_for_its_shared_expert() -> None:
    pro = catalog.models()["deepseek-v4-pro"].dims
    wider = dataclasses.replace(pro, moe_intermediate_size=4096)
    assert 16 not in rules.legal_tp(pro)
    assert 16 in rules.legal_tp(wider)


def test_a_fine_case_passes() -> None:
    assert rules.first_refusal(case()) is None


@pytest.mark.parametrize("tp", [3, 5, 8, 16])
def test_tp_that_does_not_divide(tp: int) -> None:
    refusal = refused(tp=tp)
    assert refusal.rule == "tp-divides"
    assert refusal.fix == "Use --tp 1, 2 or 4."


def test_a_model_that_no_size_fits() -> None:
    odd = dataclasses.replace(TINY.dims, moe_intermediate_size=100)
    assert "No size works" in refused(dims=odd).fix


def test_a_big_model_on_the_cpu() -> None:
    refusal = refused(model="deepseek-v4-flash", dims=FLASH.dims, weight_bytes=FLASH.weight_bytes)
    assert refusal.rule == "cpu-small-models"
    assert "160 GB" in refusal.what


def test_rocm_without_or_with_too_few_gpus() -> None:
    flash = {"device": "rocm", "model": "flash", "dims": FLASH.dims, "weight_bytes": FLASH.weight_bytes}
    assert "no AMD GPU is visible" in refused(**flash, tp=4, gpus=()).what
    few = refused(**flash, tp=8, gpus=("gfx942",) * 6)
    assert "6 x gfx942" in few.what
    assert few.fix == "Use --tp 1, 2 or 4."
    assert rules.first_refusal(case(**flash, tp=8, gpus=None)) is None
    assert rules.first_refusal(case(**flash, tp=4, gpus=("gfx942",) * 4)) is None


@pytest.mark.parametrize("length", [1, 255, 8193])
def test_lengths(length: int) -> None:
    assert refused(max_model_len=length).rule == "max-model-len"
    assert rules.first_refusal(case(max_model_len=256)) is None
    assert rules.first_refusal(case(max_model_len=8192)) is None


def test_vllm_plugins_that_leave_ours_out() -> None:
    assert refused(environ={"VLLM_PLUGINS": "other"}).rule == "plugin-allowed"
    assert refused(environ={"VLLM_PLUGINS": ""}).rule == "plugin-allowed"
    assert rules.first_refusal(case(environ={"VLLM_PLUGINS": "other,rocm_patches"})) is None
