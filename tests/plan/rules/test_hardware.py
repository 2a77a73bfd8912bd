"""Rules about GPUs and parallel sizes: each with the input that people had, and with one that is fine."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.facts import host
from dsv4_deploy.plan.rules import legal_tp
from tests import hosts, small_checkpoint
from tests.plan.cases import flags, notice, on_host, plan, refusal, rules_of, text


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny", (1, 2, 4)),
        ("deepseek-v4-flash", (1, 2, 4, 8)),
        ("deepseek-v4-flash-0731", (1, 2, 4, 8)),
        ("deepseek-v4-pro", (1, 2, 4, 8)),
        ("deepseek-v4-pro-0813", (1, 2, 4, 8)),
        ("deepseek-v4.1-flash", (1, 2, 4, 8)),
    ],
)
def test_legal_tp(model: str, sizes: tuple[int, ...]) -> None:
    entry = catalog.models()[model]
    assert legal_tp(entry.dims, entry.traits.fp8_block) == sizes


def test_pro_at_16_fails_only_for_its_shared_expert() -> None:
    pro = catalog.models()["deepseek-v4-pro"].dims
    wider = dataclasses.replace(pro, moe_intermediate_size=4096)
    assert 16 not in legal_tp(pro)
    assert 16 in legal_tp(wider)


@pytest.mark.parametrize("tp", [3, 5, 6])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_w01_sizes_that_divide_nothing(model: str, tp: int) -> None:
    found = text(refusal(model=model, tp=tp))
    assert f"cannot be split over {tp} ranks" in found
    assert f"attention heads do not divide by {tp}" in found
    assert "Use --tp 1, 2, 4 or 8." in found
    assert "F18" in found
    assert "W01" in found


def test_w02_sixteen() -> None:
    flash = text(refusal(model="deepseek-v4-flash", tp=16, gpu_count=16))
    assert "o_groups is 8" in flash
    pro = text(refusal(model="deepseek-v4-pro", tp=16, gpu_count=16))
    assert "shared experts 3072/16 = 192 is no multiple of the 128 block" in pro
    assert "o_groups" not in pro


def test_valid_sizes_are_those_of_the_node() -> None:
    assert "Use --tp 1, 2 or 4." in text(refusal(tp=3, gpu_count=4))
    assert "Use --tp 1, 2 or 4." in text(refusal(tp=3, device="cpu"))


def test_w01_by_the_config_json_of_a_directory(tmp_path: pathlib.Path) -> None:
    from dsv4_deploy.facts import checkpoint

    odd = checkpoint.read(small_checkpoint.write(tmp_path / "odd", moe_intermediate_size=100))
    found = refusal(model=str(odd.directory), device="cpu", known={"checkpoint": odd, "gpus": ()})
    assert "No size works" in found.fix


def test_w03_more_ranks_than_gpus(tmp_path: pathlib.Path) -> None:
    known = on_host(tmp_path, hosts.Host(card=hosts.MI308X, count=4))
    error = refusal(tp=8, known=known)
    assert "World size (8) is larger than the number of available GPUs (4)" in error.what
    assert "4 x gfx942" in error.what
    assert "74a2" in error.what
    assert "Use --tp 1, 2 or 4." in error.fix
    assert "W03" in error.fix
    assert plan(tp=4, known=known).tp == 4
    both = refusal("data-parallel-size=2", tp=4, known=known)
    assert "World size (8)" in both.what


def test_no_gpu_at_all() -> None:
    assert "no AMD GPU is visible" in refusal(device="rocm", known={"gpus": ()}).what


def test_a_big_model_on_the_cpu() -> None:
    error = refusal(model="deepseek-v4-flash", device="cpu")
    assert "too large for the no-GPU mode (160 GB of weights)" in error.what


@pytest.mark.parametrize("length", [1, 255, 8193])
def test_impossible_lengths(length: int) -> None:
    assert "Use a length from 256 to 8192" in refusal(device="cpu", max_model_len=length).fix
    assert plan(device="cpu", max_model_len=256)
    assert plan(device="cpu", max_model_len=8192)


def test_f38_other_architectures() -> None:
    error = refusal(known={"gpus": ("gfx1100",) * 4})
    assert "4 x gfx1100" in error.what
    assert "F38" in error.fix
    warned = plan(gpu="mi350x", gpu_count=8)
    assert "gfx950" in notice(warned, "gpu-not-target").what
    assert "gpu-not-target" not in rules_of(plan())


def test_f32_an_unknown_device_id_is_planned_as_measured(tmp_path: pathlib.Path) -> None:
    made = plan(known=on_host(tmp_path, hosts.Host(card=hosts.UNKNOWN)))
    found = notice(made, "unknown-card")
    assert "74ff" in found.what
    assert "304 compute units" in found.what
    assert made.card is not None
    assert made.card.hbm_bytes == hosts.UNKNOWN.hbm_bytes


def test_f05_virtual_functions_at_tp8(tmp_path: pathlib.Path) -> None:
    known = on_host(tmp_path, hosts.Host(card=hosts.MI325X_VF, hypervisor=("QEMU", "KVM")))
    found = notice(plan(tp=8, known=known), "virtual-function-tp8")
    assert "F05" in found.rows
    assert "dummy" in found.fix
    assert "virtual-function-tp8" not in rules_of(plan(tp=4, known=known))


@pytest.mark.parametrize("vllm", ["0.20.1", "0.21.0", "0.25.0"])
def test_f01_f02_f03_a_vllm_from_before_gfx942(vllm: str) -> None:
    error = refusal(vllm=vllm)
    assert vllm in error.what
    assert "https://github.com/vllm-project/vllm/pull/45681" in error.why
    for words in ("F01", "F02", "F03"):
        assert words in error.fix


def test_f03_on_gfx950_the_older_floor() -> None:
    assert "0.22.0" in refusal(gpu="mi355x", gpu_count=8, vllm="0.21.0").why
    assert plan(gpu="mi355x", gpu_count=8, vllm="0.23.0")


def test_f03_an_image_says_which_vllm_it_holds() -> None:
    error = refusal(image="vllm/vllm-openai-rocm:v0.21.0")
    assert "0.21.0" in error.what
    assert plan(image="vllm/vllm-openai-rocm:v0.32.0").vllm == "0.32.0"


def test_f71_f81_a_vllm_outside_the_window() -> None:
    found = notice(plan(vllm="0.27.1"), "vllm-outside-window")
    assert {"F41", "F65", "F71", "F81"} <= set(found.rows)
    assert "0.32.0 and 0.33.0" in found.what
    assert "vllm-outside-window" not in rules_of(plan(vllm="0.32.0"))


def test_f80_an_aiter_with_the_race() -> None:
    known = {"gpus": ("gfx942",) * 8, "vllm_version": "0.33.0"}
    error = refusal(known={**known, "aiter_version": "0.1.13"})
    assert "AITER 0.1.13" in error.what
    assert "F80" in error.fix
    assert plan(known={**known, "aiter_version": "0.1.24.post1"})
    assert plan(known={**known, "aiter_version": None})


def test_f53_no_tuned_table() -> None:
    assert "304 compute units" in notice(plan(), "no-tuned-table").what
    assert "no-tuned-table" not in rules_of(plan(gpu="mi308x", gpu_count=8))
    assert "no-tuned-table" not in rules_of(plan(allow=("no-tuned-table",)))


def test_an_allowed_refusal_is_told() -> None:
    made = plan("enable-expert-parallel", model="deepseek-v4-pro", allow=("expert-parallel-pro",))
    found = notice(made, "expert-parallel-pro")
    assert found.verdict == "allowed"
    assert "--allow expert-parallel-pro" in found.fix
    assert flags(made)["enable-expert-parallel"] is True


def test_several_refusals_are_told_at_once() -> None:
    error = refusal("kv-cache-dtype=bfloat16", "enable-expert-parallel", model="deepseek-v4-pro", tp=3)
    assert "cannot be split" in error.what
    assert "kv-cache-dtype" in error.detail
    assert "expert-parallel" in error.detail


@pytest.mark.parametrize(
    ("made_up", "words"),
    [
        (hosts.Host(compute_partition="CPX"), "64 of 64 devices are parts of a card"),
        (hosts.Host(compute_partition="QPX"), "QPX/NPS1"),
        (hosts.Host(memory_partition="NPS4"), "SPX/NPS4"),
        # A virtual function tells no mode.
        (
            hosts.Host(card=hosts.MI300X_VF, compute_partition="DPX", hypervisor=("QEMU", "KVM")),
            "152 of 304 compute units",
        ),
    ],
)
def test_w30_f17_f31_parts_of_cards_are_refused_by_the_plan_too(
    tmp_path: pathlib.Path, made_up: hosts.Host, words: str
) -> None:
    error = refusal(tp=8, known=on_host(tmp_path, made_up))
    assert words in error.what
    assert "amd-smi set --gpu all --compute-partition SPX" in error.fix
    assert "W30" in error.fix


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "4"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "3,4"}, 1),
        ({"HIP_VISIBLE_DEVICES": "1,-1,2"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2fd1a0c5d1e70112,GPU-9c7a0e5b77d31f00"}, 2),
    ],
)
def test_w03_gpus_that_a_variable_hides(
    tmp_path: pathlib.Path, variables: dict[str, str], found: int
) -> None:
    error = refusal(tp=4, environ=variables, known=on_host(tmp_path, hosts.Host()))
    assert f"World size (4) is larger than the number of available GPUs ({found})" in error.what
    assert all(f"{name}={value}" in error.what for name, value in variables.items())
    assert plan(environ=variables, known=on_host(tmp_path / "again", hosts.Host())).tp == found
    # They say nothing about the GPUs of another machine.
    assert plan(tp=8, environ=variables).tp == 8


def two_kinds(root: pathlib.Path, first: hosts.Card, second: hosts.Card) -> dict[str, Any]:
    """What is known on a host whose last four GPUs are of another kind."""
    hosts.write(root, hosts.Host(card=first))
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for number in range(6, 10):
        other = hosts.write(root / f"other{number}", hosts.Host(card=second))
        for name in ("properties", "mem_banks/0/properties"):
            text = (other / nodes.relative_to(root) / str(number) / name).read_text()
            (nodes / str(number) / name).write_text(text)
    here = host.read(root, hosts.statvfs(64 * 2**30))
    return {"gpus": here.gfx_names, "host": here, "vllm_version": "0.33.0"}


def test_f32_two_kinds_of_cards_are_planned_for_as_the_lesser(tmp_path: pathlib.Path) -> None:
    made = plan(tp=8, known=two_kinds(tmp_path / "a", hosts.MI300X, hosts.MI308X))
    assert made.card is not None
    assert made.card.name == "mi308x"
    assert "74a1, 74a2" in notice(made, "mixed-cards").what
    made = plan(tp=8, known=two_kinds(tmp_path / "b", hosts.MI325X, hosts.MI300X))
    assert made.card is not None
    assert made.card.hbm_bytes == hosts.MI300X.hbm_bytes
    made = plan(tp=8, known=two_kinds(tmp_path / "c", hosts.MI300X, hosts.UNKNOWN))
    assert "74ff" in notice(made, "unknown-card").what
    made = plan(tp=8, known=two_kinds(tmp_path / "d", hosts.MI300X, hosts.MI300X_VF))
    assert notice(made, "virtual-function-tp8")


def test_two_architectures_in_one_server_are_refused(tmp_path: pathlib.Path) -> None:
    both = two_kinds(tmp_path, hosts.MI300X, hosts.MI355X)
    error = refusal(tp=8, known=both)
    assert "4 x gfx942, 4 x gfx950" in error.what
    assert plan(tp=4, environ={"HIP_VISIBLE_DEVICES": "0,1,2,3"}, known=both).tp == 4


@pytest.mark.parametrize(
    "image",
    [
        "vllm/vllm-openai-rocm:v0.21.0",
        "vllm/vllm-openai-rocm:0.21.0",
        "registry.example:5000/amd/vllm-openai-rocm:v0.20.2rc1",
        f"vllm/vllm-openai-rocm:v0.21.0@sha256:{'a' * 64}",
    ],
)
@pytest.mark.parametrize("named", [None, "0.33.0"])
def test_f03_an_old_image_however_it_is_named(image: str, named: str | None) -> None:
    error = refusal(image=image, vllm=named)
    assert "0.2" in error.what
    assert "F03" in error.fix
