"""make_plan: what is decided for the CPU and for AMD GPUs, and that the operator has the last word."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_deploy import catalog
from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint
from dsv4_deploy.plan.overrides import parse
from dsv4_deploy.plan.plan import Facts, Plan, make_plan
from dsv4_deploy.spec import ServingSpec
from tests import small_checkpoint
from tests.plan import cases

HERE = Facts(
    gpus=(),
    vllm_version="0.32.0",
    checkpoint=None,
    tiny_directory=pathlib.Path("/cache/tiny-v1"),
    environ={},
)
MI300X = dataclasses.replace(HERE, gpus=("gfx942",) * 8, vllm_version="0.33.0")


def plan(facts: Facts = HERE, *, chosen: tuple[str, ...] = (), **spec: Any) -> Plan:
    return make_plan(ServingSpec(overrides=parse(chosen), **spec), facts)


def flags(made: Plan) -> dict[str, str | bool]:
    return {flag.name: flag.value for flag in made.flags}


def refusal(facts: Facts = HERE, **spec: Any) -> DeployError:
    with pytest.raises(DeployError) as raised:
        plan(facts, **spec)
    assert raised.value.exit_code == 2
    return raised.value


def test_the_cpu_plan_in_full() -> None:
    made = plan()
    assert (made.device, made.served_name, made.tp) == ("cpu", "tiny", 1)
    assert "No AMD GPU here: serving on the CPU" in made.note
    assert made.environment == {
        "VLLM_PLUGINS": "rocm_patches",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    command = (
        "serve /cache/tiny-v1 --host 127.0.0.1 --port 8000 --served-model-name tiny --tensor-parallel-size 1 "
        "--max-model-len 4608 --tokenizer-mode deepseek_v4 --reasoning-parser deepseek_v4 "
        "--tool-call-parser deepseek_v4 --enable-auto-tool-choice "
        "--middleware rocm_patches.admission.Admission "
        "--disable-access-log-for-endpoints /health,/metrics --max-num-seqs 8 --enforce-eager --shutdown-timeout 30"
    )
    assert made.argv == command.split()


def test_every_value_has_its_reason() -> None:
    for made in (plan(), plan(MI300X), plan(MI300X, model="deepseek-v4-pro")):
        for setting in (*made.env, *made.flags):
            assert setting.reason, setting.name


def test_the_same_input_gives_the_same_plan() -> None:
    assert plan(tp=4) == plan(tp=4)
    assert plan(tp=4).digest(["vllm"]) == plan(tp=4).digest(["vllm"])
    assert plan(tp=4).digest(["vllm"]) != plan(tp=2).digest(["vllm"])
    assert plan(tp=4).digest(["vllm"]) != plan(tp=4).digest(["other"])
    assert plan().digest([]) == plan(tp=1, max_model_len=4608, device="cpu").digest([])


def test_several_ranks_on_the_cpu_are_processes() -> None:
    assert flags(plan(tp=4))["distributed-executor-backend"] == "mp"
    assert "distributed-executor-backend" not in flags(plan(tp=1))


def test_auto_takes_the_gpus() -> None:
    made = plan(MI300X)
    assert (made.device, made.model, made.tp) == ("rocm", "deepseek-ai/DeepSeek-V4-Flash", 4)
    assert "8 x gfx942" in made.note
    assert made.environment["VLLM_ROCM_USE_AITER"] == "1"
    assert "HF_HUB_OFFLINE" not in made.environment  # vLLM has to download it
    assert "enforce-eager" not in flags(made)
    assert json.loads(str(flags(made)["compilation-config"])) == {"cudagraph_mode": "FULL_DECODE_ONLY"}


def test_the_moe_backend_depends_on_version_and_model() -> None:
    assert flags(plan(MI300X))["moe-backend"] == "aiter"
    older = dataclasses.replace(MI300X, vllm_version="0.32.0")
    assert "moe-backend" not in flags(plan(older))
    assert flags(plan(MI300X, model="deepseek-v4-pro"))["moe-backend"] == "triton_unfused"


def test_pro_has_its_own_figures() -> None:
    made = plan(MI300X, model="deepseek-v4-pro-0813")
    assert made.tp == 8
    assert flags(made)["gpu-memory-utilization"] == "0.90"
    assert flags(made)["max-model-len"] == "131072"
    assert made.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "10800"
    assert made.ready_timeout_s == 10800


def test_the_default_tp_fits_the_gpus_that_are_there() -> None:
    three = dataclasses.replace(MI300X, gpus=("gfx942",) * 3)
    assert plan(three).tp == 2
    assert plan(dataclasses.replace(MI300X, gpus=None), device="rocm").tp == 4


def test_refusals_reach_the_operator() -> None:
    assert "cannot be split over 3 ranks" in refusal(tp=3).what
    assert "rule tp-divides" in refusal(tp=3).fix
    assert "too large for the no-GPU mode" in refusal(model="deepseek-v4-pro").what
    assert "no AMD GPU is visible" in refusal(device="rocm").what
    assert "no model called 'tinny'" in refusal(model="tinny").what


def test_a_checkpoint_directory(tmp_path: pathlib.Path) -> None:
    found = checkpoint.read(small_checkpoint.write(tmp_path / "my-v4"))
    made = plan(dataclasses.replace(HERE, checkpoint=found), model=str(tmp_path / "my-v4"))
    assert made.model == str(tmp_path / "my-v4")
    assert made.served_name == "my-v4"
    assert made.environment["HF_HUB_OFFLINE"] == "1"
    short = checkpoint.read(small_checkpoint.write(tmp_path / "short", max_position_embeddings=1024))
    assert flags(plan(dataclasses.replace(HERE, checkpoint=short), model="short"))["max-model-len"] == "1024"


def test_a_directory_with_the_sizes_of_pro_gets_its_defaults(tmp_path: pathlib.Path) -> None:
    sizes = dataclasses.asdict(catalog.models()["deepseek-v4-pro"].dims)
    found = checkpoint.read(small_checkpoint.write(tmp_path / "pro", **sizes))
    assert plan(dataclasses.replace(MI300X, checkpoint=found), model="pro").tp == 8


def test_set_wins_and_says_so() -> None:
    made = plan(chosen=("max-num-seqs=3", "enforce-eager=false", "no-enable-prefix-caching", "seed=-1"))
    assert flags(made)["max-num-seqs"] == "3"
    assert "--no-enforce-eager" in made.argv
    assert "--enforce-eager" not in made.argv
    assert "--no-enable-prefix-caching" in made.argv
    assert "--seed=-1" in made.argv
    reason = next(flag.reason for flag in made.flags if flag.name == "max-num-seqs")
    assert reason == "set by you (--set); the plan had 8"


def test_set_of_names_that_up_depends_on() -> None:
    assert plan(chosen=("served-model-name=mine",)).served_name == "mine"
    assert plan(chosen=("shutdown-timeout=5",)).shutdown_timeout_s == 5
    # It takes a value, so these are names and no switch.
    assert plan(chosen=("served-model-name=true",)).served_name == "true"
    for setting in ("shutdown-timeout=soon", "shutdown-timeout=true", "served-model-name="):
        refusal(chosen=(setting,))


def test_the_operators_environment_wins() -> None:
    theirs = dataclasses.replace(HERE, environ={"OMP_NUM_THREADS": "4", "DO_NOT_TRACK": "1"})
    made = plan(theirs)
    assert made.environment["OMP_NUM_THREADS"] == "4"
    assert [setting.name for setting in made.from_environment] == ["OMP_NUM_THREADS"]
    assert "the plan had 1" in made.from_environment[0].reason


def test_nothing_secret_is_ever_in_a_plan() -> None:
    made = plan(dataclasses.replace(HERE, environ={"VLLM_API_KEY": "sesame", "HF_TOKEN": "sesame"}))
    assert "sesame" not in repr(made)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([name for name in catalog.models() if name != "tiny"]),
    st.sampled_from(["mi300x", "mi308x", "mi325x"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "default", "latency", "throughput", "long-context", "pr41451"]),
    st.one_of(st.none(), st.just("auto"), st.integers(256, 1_048_576)),
    st.dictionaries(
        st.sampled_from(
            ["max-num-seqs", "max-num-batched-tokens", "data-parallel-size", "kv-cache-memory-bytes"]
        ),
        st.integers(1, 40_000_000_000),
    ),
    st.sampled_from([(), ("enforce-eager",), ("enable-expert-parallel",), ("gpu-memory-utilization=0.98",)]),
)
@example(
    "deepseek-v4-flash",
    "mi300x",
    1,
    None,
    None,
    {"max-num-batched-tokens": 1, "kv-cache-memory-bytes": 1},
    (),
)
def test_no_accepted_plan_exceeds_the_card(
    model: str,
    gpu: str,
    tp: int,
    profile: str | None,
    length: Any,
    numbers: dict[str, int],
    switches: tuple[str, ...],
) -> None:
    chosen = [f"{name}={number}" for name, number in numbers.items()]
    try:
        made = cases.plan(
            *chosen,
            *switches,
            model=model,
            gpu=gpu,
            gpu_count=None,
            tp=tp,
            profile=profile,
            max_model_len=length,
        )
    except DeployError as error:
        assert error.exit_code == 2
        assert error.fix
        return
    assert made.memory is not None
    assert made.memory.fits
    assert made.memory.used <= catalog.cards()[gpu].hbm_bytes
    assert int(str(flags(made).get("max-num-seqs", 1024))) <= made.memory.sequences or profile == "pr41451"


def test_the_plan_of_a_host_says_what_it_assumed() -> None:
    made = cases.plan(device="rocm", known={"gpus": None, "vllm_version": None})
    assert "Memory is that of mi300x (name another with --gpu)" in made.note


def test_a_named_variable_wins_and_is_told() -> None:
    made = cases.plan(env={"OMP_NUM_THREADS": "2", "MY_OWN": "x y"}, environ={"OMP_NUM_THREADS": "8"})
    assert made.environment["OMP_NUM_THREADS"] == "2"
    assert made.environment["MY_OWN"] == "x y"
    assert "--env" in next(setting.reason for setting in made.env if setting.name == "OMP_NUM_THREADS")


def test_a_share_of_memory_replaces_the_fixed_pool_of_a_single_card() -> None:
    made = cases.plan("gpu-memory-utilization=0.9", tp=1, gpu="mi325x", gpu_count=1)
    assert flags(made)["gpu-memory-utilization"] == "0.9"
    assert "kv-cache-memory-bytes" not in flags(made)


def test_a_checkpoint_without_its_draft_cannot_speculate(tmp_path: pathlib.Path) -> None:
    # config.json promises MTP, and no tensor of it is there.
    found = checkpoint.read(small_checkpoint.write(tmp_path / "cut", num_nextn_predict_layers=1))
    known = {"checkpoint": found, "gpus": ("gfx942",), "vllm_version": "0.33.0"}
    error = cases.refusal(
        'speculative-config={"method":"mtp","num_speculative_tokens":1}',
        model=str(found.directory),
        tp=1,
        known=known,
    )
    assert "has no draft layers" in error.what
