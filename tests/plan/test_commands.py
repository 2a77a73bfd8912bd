"""`dsv4-deploy plan` and `rules` as programs: what they print, how they end, and that they need no torch."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from dsv4_deploy import cli
from tests import small_checkpoint
from tests.plan import cases

# A laptop that has none of these: importing one fails.
WITHOUT_TORCH = """
import sys
for name in ("torch", "vllm", "transformers", "triton", "numpy", "rocm_patches"):
    sys.modules[name] = None
from dsv4_deploy.cli import main
main(sys.argv[1:])
"""


def run(tmp_path: pathlib.Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSV4_", "VLLM_"))}
    env = {
        **clean,
        "DSV4_STATE_DIR": str(tmp_path / "state"),
        "DSV4_CACHE_DIR": str(tmp_path / "cache"),
        **environ,
    }
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], env=env, capture_output=True, text=True, timeout=60
    )


def test_a_plan_for_other_hardware(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path, "plan", "--gpu", "mi300x:8", "--model", "deepseek-v4-pro", "--explain")
    assert result.returncode == 0, result.stderr
    assert "Planned for 8 x mi300x, with deepseek-v4-pro, tensor-parallel size 8." in result.stdout
    assert "experts 822.05 x 1 / TP 8 + split 25.14 / TP 8 + replicated 3.56 GB" in result.stdout
    assert "https://github.com/vllm-project/vllm/tree/v0.33.0" in result.stdout
    assert "TP does not add KV tokens" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("vllm serve deepseek-ai/DeepSeek-V4-Pro ")
    assert not list(tmp_path.iterdir())


def test_a_plan_for_programs(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path, "plan", "--gpu", "mi325x:4", "--json", "--set", "block-size=16")
    content = json.loads(result.stdout)
    assert content["gpu"] == "mi325x"
    assert content["argv"][0] == "serve"
    assert content["memory"]["request_blocks"] > content["memory"]["fixed_blocks"]
    assert sum(row["bytes"] for row in content["memory"]["rows"]) == content["memory"]["used_bytes"]
    assert "block-size" in {notice["rule"] for notice in content["notices"]}
    assert content["deployment"]["gpu_resource"] == "amd.com/gpu"
    assert all(item["reason"] for item in (*content["flags"], *content["variables"]))


def test_the_plan_of_this_host(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path, "plan", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "KV cache size 60,156 tokens, maximum concurrency 13.05x" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_plan_of_a_directory(tmp_path: pathlib.Path) -> None:
    model = small_checkpoint.write(tmp_path / "model")
    result = run(tmp_path, "plan", "--gpu", "mi300x", "--model", str(model), "--tp", "2")
    assert result.returncode == 0, result.stderr
    assert "HF_HUB_OFFLINE=1" in result.stdout
    (model / small_checkpoint.SHARDS[1]).unlink()
    broken = run(tmp_path, "plan", "--model", str(model))
    assert broken.returncode == 2
    assert f"{small_checkpoint.SHARDS[1]} is missing" in broken.stderr
    assert "W33" in broken.stderr
    (model / "model.safetensors.index.json").unlink()
    for shard in small_checkpoint.SHARDS[:1]:
        (model / shard).unlink()
    gone = run(tmp_path, "plan", "--model", str(model))
    assert gone.returncode == 2
    assert "model.safetensors.index.json" in gone.stderr
    assert str(model) in gone.stderr
    assert "W32" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--gpu", "mi300x:8", "--tp", "3"], "rule tp-divides, F18 W01 W02"),
        (["plan", "--gpu", "mi300x:4", "--model", "deepseek-v4-pro"], "rule weights-fit, F06 F60 W04"),
        (["plan", "--gpu", "h100"], "there is no GPU called 'h100'"),
        (["plan", "--gpu", "mi300x", "--profile", "fast"], "there is no profile called 'fast'"),
        (["plan", "--gpu", "mi300x", "--allow", "everything"], "no rule and no check"),
        (["plan", "--gpu", "mi300x", "--deploy", "pods=2"], "--deploy"),
        (["plan", "--gpu", "mi300x", "--env", "HF_TOKEN=x"], "secret"),
        (["plan", "--gpu", "mi300x", "--vllm", "newest"], "not a version"),
        (["plan", "--max-model-len", "long"], "--max-model-len"),
        (["rules", "tp-divide"], "Did you mean tp-divides?"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_reason(
    tmp_path: pathlib.Path, arguments: list[str], words: str
) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2, result.stdout
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_an_override_is_printed(tmp_path: pathlib.Path) -> None:
    refused = run(tmp_path, "plan", "--gpu", "mi300x:8", "--set", "kv-cache-dtype=bfloat16")
    assert refused.returncode == 2
    assert "--allow kv-cache-dtype overrides" in refused.stderr
    allowed = run(
        tmp_path, "plan", "--gpu", "mi300x:8", "--set", "kv-cache-dtype=bfloat16", "--allow", "kv-cache-dtype"
    )
    assert allowed.returncode == 0
    assert "allowed: --kv-cache-dtype bfloat16" in allowed.stdout
    assert "because you said --allow kv-cache-dtype" in allowed.stdout


def test_rules_are_listed_shown_and_given_to_programs(tmp_path: pathlib.Path) -> None:
    from dsv4_deploy.plan.rules import RULES

    listed = run(tmp_path, "rules").stdout.splitlines()
    assert [line.split()[1] for line in listed] == [rule.id for rule in RULES]
    one = run(tmp_path, "rules", "tp-divides").stdout
    assert "refuse (stops before anything is started)" in one
    assert "--allow tp-divides" in one
    content = json.loads(run(tmp_path, "rules", "--json").stdout)
    assert {entry["id"] for entry in content} == {rule.id for rule in RULES}


def test_up_uses_the_same_plan(tmp_path: pathlib.Path) -> None:
    options = [
        "--device",
        "rocm",
        "--model",
        "deepseek-v4-pro",
        "--profile",
        "latency",
        "--set",
        "block-size=16",
    ]
    dry = run(tmp_path, "up", "--dry-run", *options)
    planned = run(tmp_path, "plan", *options)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines()[-1] == planned.stdout.splitlines()[-1]
    assert "rule block-size" in dry.stdout


HUGE = "9" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ["--tp", "9" * 400],
        ["--gpu", f"mi300x:{HUGE}"],
        ["--gpu", "mi300x:\u00b2"],
        ["--vllm", HUGE],
        ["--model", HUGE],
        ["--model", "~nobody-has-this-name/model"],
        ["--set", f"max-num-seqs={HUGE}"],
        ["--set", "max-num-batched-tokens=" + "9" * 400 + ".5g"],
        ["--set", "kv-cache-memory-bytes=" + "9" * 400],
        ["--set", f"shutdown-timeout={HUGE}"],
        ["--set", "speculative-config=" + "[" * 100_000],
        ["--set", 'attention-config={"a":' + '{"a":' * 100_000],
        ["--deploy", f"shm={HUGE}"],
        ["--deploy", f"replicas={HUGE}"],
        *(
            ["--set", f"{name}=0"]
            for name in (
                "max-num-seqs",
                "max-num-batched-tokens",
                "data-parallel-size",
                "pipeline-parallel-size",
                "block-size",
            )
        ),
    ],
    ids=lambda words: words[1][:28],
)
def test_a_value_that_nothing_can_be_planned_with_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = [] if "--gpu" in words else ["--gpu", "mi300x:8"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *gpu, *words])
    assert stopped.value.code == 2
    assert "rror: " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["\u00b2", HUGE, "-1", "1e99"])
def test_a_time_that_is_none_is_replaced(value: str) -> None:
    made = cases.plan(env={"VLLM_ENGINE_READY_TIMEOUT_S": value})
    assert made.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
