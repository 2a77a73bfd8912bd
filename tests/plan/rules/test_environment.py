"""Rules about variables: what the operator has exported, and what the server gets."""

from __future__ import annotations

import pathlib

import pytest

from dsv4_deploy.plan.gather import unwritable_caches
from tests.plan.cases import notice, plan, refusal, rules_of


@pytest.mark.parametrize(
    ("name", "theirs", "wanted", "rule", "row"),
    [
        ("VLLM_ROCM_USE_AITER", "0", "1", "aiter-on", "W45"),
        ("VLLM_ROCM_USE_AITER", "false", "1", "aiter-on", "W45"),
        ("VLLM_ROCM_USE_AITER_FP4BMM", "1", "0", "aiter-fp4bmm-off", "W46"),
        ("VLLM_ROCM_USE_AITER_FP4BMM", "1", "0", "aiter-fp4bmm-off", "F26"),
        ("VLLM_ROCM_USE_AITER_FP8BMM", "1", "0", "aiter-fp8bmm-off", "F63"),
        ("HSA_NO_SCRATCH_RECLAIM", "0", "1", "scratch-reclaim", "F62"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "1", "0", "breakable-graphs", "F25"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "600", "3600", "ready-timeout", "F15"),
    ],
)
def test_values_that_are_changed(name: str, theirs: str, wanted: str, rule: str, row: str) -> None:
    made = plan(environ={name: theirs})
    found = notice(made, rule)
    assert found.verdict == "set"
    assert f"{theirs} -> {wanted}" in found.what
    assert row in found.rows
    assert made.environment[name] == wanted
    assert name not in {setting.name for setting in made.from_environment}
    kept = plan(environ={name: theirs}, allow=(rule,))
    assert kept.environment[name] == theirs
    assert notice(kept, rule).verdict == "allowed"
    named = plan(env={name: theirs})
    assert named.environment[name] == wanted


def test_w45_unset_variables_are_set_by_the_plan() -> None:
    made = plan()
    assert made.environment["VLLM_ROCM_USE_AITER"] == "1"
    assert made.environment["VLLM_ROCM_USE_AITER_FP4BMM"] == "0"
    assert made.environment["HSA_NO_SCRATCH_RECLAIM"] == "1"
    assert made.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
    assert plan(model="deepseek-v4-pro").environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "10800"
    assert "aiter-on" not in rules_of(plan(environ={"VLLM_ROCM_USE_AITER": "true"}))


def test_f15_a_longer_time_is_the_operators() -> None:
    made = plan(environ={"VLLM_ENGINE_READY_TIMEOUT_S": "7200"})
    assert made.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"
    assert "ready-timeout" not in rules_of(made)


def test_f49_the_fp8_expert_kernel() -> None:
    made = plan(model="deepseek-v4-flash-base", environ={"AITER_ENABLE_VSKIP": "1"})
    assert made.environment["AITER_ENABLE_VSKIP"] == "0"
    assert "F49" in notice(made, "aiter-vskip").rows
    assert plan(model="deepseek-v4-flash-base").environment["AITER_ENABLE_VSKIP"] == "0"
    assert "AITER_ENABLE_VSKIP" not in plan().environment


def test_f69_everything_is_set_by_the_plan_and_not_left_to_the_shell() -> None:
    made = plan()
    for name in ("VLLM_ROCM_USE_AITER", "VLLM_PLUGINS", "HSA_NO_SCRATCH_RECLAIM", "NCCL_MIN_NCHANNELS"):
        assert name in made.environment


def test_w47_f28_aiter_jit_dir() -> None:
    found = notice(plan(environ={"AITER_JIT_DIR": "/data/aiter"}), "aiter-jit-dir")
    assert found.verdict == "warn"
    assert "/data/aiter" in found.what
    assert "AITER_JIT_DIR" not in plan().environment


def test_w23_visibility() -> None:
    error = refusal(environ={"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1,2,3"})
    assert "Inconsistent GPU visibility env vars" in error.why
    assert "W23" in error.fix
    same = plan(environ={"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"})
    assert "Remove them in pods" in notice(same, "visibility").fix
    alone = plan(environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "CUDA_VISIBLE_DEVICES=0,1" in notice(alone, "visibility").what


def test_f35_a_port_from_service_links() -> None:
    error = refusal(environ={"VLLM_PORT": "tcp://10.0.0.10:6785"})
    assert "tcp://10.0.0.10:6785" in error.what
    assert "enableServiceLinks: false" in error.fix
    assert plan(environ={"VLLM_PORT": "29500"})


def test_variables_that_vllm_has_dropped() -> None:
    error = refusal(environ={"VLLM_TORCH_PROFILER_DIR": "/app/vllm_profile"})
    assert "VLLM_TORCH_PROFILER_DIR" in error.what
    assert "profiler-config" in error.fix
    # The pull request's own command sets it and does not validate names.
    assert plan(profile="pr41451", environ={"VLLM_TORCH_PROFILER_DIR": "/app/vllm_profile"})


def test_other_warnings() -> None:
    assert (
        "HSA_OVERRIDE_GFX_VERSION"
        in notice(plan(environ={"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}), "gfx-override").what
    )
    assert "collective_rpc" in notice(plan(environ={"VLLM_SERVER_DEV_MODE": "1"}), "dev-mode").why
    assert "dev-mode" not in rules_of(plan(environ={"VLLM_SERVER_DEV_MODE": "0"}))


@pytest.mark.parametrize("plugins", ["other", ""])
def test_plugins_that_leave_ours_out(plugins: str) -> None:
    assert "leaves out rocm_patches" in refusal(environ={"VLLM_PLUGINS": plugins}, device="cpu").what
    assert plan(environ={"VLLM_PLUGINS": "other,rocm_patches"}, device="cpu")


def test_w34_caches_on_a_read_only_volume(tmp_path: pathlib.Path) -> None:
    # A file in the way stands for a volume that cannot be written, also for root.
    (tmp_path / "models").write_text("")
    environ = {
        "HF_HOME": str(tmp_path / "models" / "hub"),
        "HOME": "/home/someone",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    moved = unwritable_caches({**environ, "XDG_CACHE_HOME": "/var/cache/dsv4"})
    assert moved == {"HF_HOME": "/var/cache/dsv4/huggingface"}
    made = plan(
        environ=environ, known={"gpus": ("gfx942",) * 8, "vllm_version": "0.33.0", "unwritable": moved}
    )
    found = notice(made, "caches-writable")
    assert "W34" in found.rows
    assert made.environment["HF_HOME"] == "/var/cache/dsv4/huggingface"
    assert made.environment["HF_HUB_OFFLINE"] == "1"
    assert "TRITON_CACHE_DIR" not in made.environment


def test_amd_variables_mean_nothing_on_the_cpu() -> None:
    made = plan(device="cpu", environ={"VLLM_ROCM_USE_AITER": "0", "CUDA_VISIBLE_DEVICES": "0"})
    assert rules_of(made) == set()
