"""Profiles: the original command flag by flag, and limits that do what their names say."""

from __future__ import annotations

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.plan.profiles import PROFILES, find
from tests.plan.cases import flags, notice, plan, rules_of

# The command line in the description of https://github.com/vllm-project/vllm/pull/41451.
PULL_REQUEST = [
    "serve", "deepseek-ai/DeepSeek-V4-Flash",
    "--host", "localhost",
    "--dtype", "auto",
    "--tensor-parallel-size", "4",
    "--max-num-seqs", "16",
    "--trust-remote-code",
    "--profiler-config",
    '{"profiler": "torch", "torch_profiler_dir": "./vllm_profile", "torch_profiler_with_stack": "False"}',
    "--gpu-memory-utilization", "0.35",
    "--moe-backend", "triton_unfused",
    "--tokenizer-mode", "deepseek_v4",
    "--async-scheduling",
    "--enforce-eager",
]  # fmt: skip


@pytest.mark.parametrize("gpu", ["mi300x", "mi308x", "mi325x"])
def test_the_pull_request_flag_by_flag(gpu: str) -> None:
    made = plan(profile="pr41451", gpu=gpu, gpu_count=8)
    assert made.argv == PULL_REQUEST
    assert made.environment["VLLM_ROCM_USE_AITER"] == "1"
    assert made.served_name == "deepseek-ai/DeepSeek-V4-Flash"
    assert made.port == 8000


def test_the_pull_request_with_another_size_or_port_changes_only_that() -> None:
    eight = plan(profile="pr41451", tp=8).argv
    assert [word for word in eight if word not in PULL_REQUEST] == ["8"]
    assert len(eight) == len(PULL_REQUEST)
    assert plan(profile="pr41451", port=8001).argv[-2:] == ["--port", "8001"]


def test_rules_only_warn_about_the_pull_request() -> None:
    made = plan(profile="pr41451")
    kept = notice(made, "batched-tokens-long-context")
    assert kept.verdict == "warn"
    assert "keeps the command as it was" in kept.fix
    assert notice(made, "enforce-eager").verdict == "warn"
    # Variables are not part of the command.
    assert (
        plan(profile="pr41451", environ={"VLLM_ROCM_USE_AITER": "0"}).environment["VLLM_ROCM_USE_AITER"]
        == "1"
    )


def test_the_batch_size_that_the_pull_request_meant() -> None:
    made = plan("max-num-batched-tokens=1024", profile="pr41451")
    assert made.argv == [*PULL_REQUEST, "--max-num-batched-tokens", "1024"]
    assert "batched-tokens-long-context" not in rules_of(made)


@pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_profiles_differ_as_their_names_say(model: str) -> None:
    def limit(profile: str, flag: str) -> int:
        return int(str(flags(plan(profile=profile, model=model))[flag]))

    assert (
        limit("latency", "max-num-seqs")
        < limit("default", "max-num-seqs")
        < limit("throughput", "max-num-seqs")
    )
    assert limit("latency", "max-num-batched-tokens") < limit("default", "max-num-batched-tokens")
    assert limit("long-context", "max-model-len") == 1_048_576
    assert limit("throughput", "max-model-len") < limit("default", "max-model-len")


def test_every_profile_fits_every_target_at_its_sizes() -> None:
    for profile in PROFILES:
        for gpu in ("mi300x", "mi308x", "mi325x"):
            for tp in (4, 8):
                made = plan(profile=profile, tp=tp, gpu=gpu, gpu_count=8)
                assert made.memory is not None
                assert made.memory.fits, (profile, gpu, tp)
            if profile != "pr41451":
                assert plan(profile=profile, model="deepseek-v4-pro", gpu=gpu, gpu_count=8).profile == profile


def test_an_unknown_profile_gets_the_nearest_name() -> None:
    with pytest.raises(DeployError) as raised:
        find("latencey")
    assert raised.value.exit_code == 2
    assert "Did you mean latency?" in raised.value.fix
    assert "pr41451" in raised.value.why
