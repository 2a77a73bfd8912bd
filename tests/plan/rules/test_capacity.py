"""Rules about memory: what does not fit is refused with the sizes, and with what would fit."""

from __future__ import annotations

import pathlib

import pytest

from tests import hosts
from tests.plan.cases import flags, notice, on_host, plan, refusal, rules_of, text

PRO = "deepseek-v4-pro"


def test_w04_f06_data_parallelism_for_pro() -> None:
    alone = refusal("data-parallel-size=8", model=PRO, tp=1)
    assert "--data-parallel-size 8" in alone.what
    assert "794 GiB per GPU" in alone.what
    assert "192 GiB" in alone.what
    assert "Use --tp 8" in alone.fix
    assert "W04" in alone.fix
    spread = refusal(
        "data-parallel-size=8", "enable-expert-parallel", model=PRO, tp=1, allow=("expert-parallel-pro",)
    )
    assert "124 GiB of weights per GPU" in spread.what
    assert "Use --tp 8" in spread.fix
    assert "F06" in spread.fix


def test_f06_as_it_was_run_on_mi325x() -> None:
    """https://github.com/vllm-project/vllm/pull/40871: 8x MI325X, DP8 + EP, 1M, util 0.5."""
    error = refusal(
        "data-parallel-size=8", "enable-expert-parallel", "gpu-memory-utilization=0.5", "enforce-eager",
        model=PRO, tp=1, gpu="mi325x", gpu_count=8, max_model_len=1_048_576, allow=("expert-parallel-pro",),
    )  # fmt: skip
    assert "no memory is left for the cache" in error.what
    assert "F09" in error.fix


def test_pro_on_four_cards() -> None:
    assert "201 GiB per GPU" in refusal(model=PRO, tp=4).what
    made = plan(model=PRO, tp=4, gpu="mi325x", gpu_count=4)
    assert flags(made)["max-model-len"] == "32768"
    assert flags(made)["max-num-seqs"] == "16"


@pytest.mark.parametrize("strategy", [(), ("enable-expert-parallel",), ("data-parallel-size=2",)])
@pytest.mark.parametrize(
    ("model", "gpu", "value"), [("deepseek-v4-flash", "mi300x", "0.85"), (PRO, "mi325x", "0.90")]
)
def test_w16_f10_f60_one_memory_rule_for_every_strategy(
    strategy: tuple[str, ...], model: str, gpu: str, value: str
) -> None:
    tp = 4 if strategy == ("data-parallel-size=2",) else 8
    made = plan(
        "gpu-memory-utilization=0.98", *strategy, model=model, gpu=gpu, gpu_count=8, tp=tp,
        max_model_len=32_768, allow=("expert-parallel-pro", "weights-fit", "cache-fits"),
    )  # fmt: skip
    found = notice(made, "memory-utilization")
    assert f"0.98 -> {value}" in found.what
    assert {"F10", "F60", "W16"} == set(found.rows)
    assert flags(made)["gpu-memory-utilization"] == value


def test_f10_exactly_092_is_left_alone() -> None:
    assert flags(plan("gpu-memory-utilization=0.92"))["gpu-memory-utilization"] == "0.92"


def test_w15_a_million_tokens_in_a_small_pool() -> None:
    """A pool of 20 GB does hold 1M tokens of Flash with small batches (M = 5,786 blocks of 1.0 MB); vLLM's
    default batches make it fail for Pro."""
    settings = ("kv-cache-memory-bytes=20g", "max-num-batched-tokens=16384")
    error = refusal(*settings, model=PRO, max_model_len=1_048_576, allow=("batched-tokens-long-context",))
    assert "--max-model-len 1048576 needs 25.0 GB" in error.what
    assert "20.0 GB" in error.what
    assert "max-num-batched-tokens=8192 makes this length fit" in error.fix
    assert "the longest that fits as it is is --max-model-len" in error.fix
    assert "W15" in error.fix
    assert "F09" in error.fix
    longest = int(error.fix.split("--max-model-len ")[1].split(";")[0])
    assert plan(*settings, model=PRO, max_model_len=longest, allow=("batched-tokens-long-context",))
    assert plan("kv-cache-memory-bytes=20g", tp=1, max_model_len=1_048_576)


def test_w15_auto_is_the_longest_that_fits() -> None:
    settings = ("kv-cache-memory-bytes=10g", "max-num-batched-tokens=4096")
    made = plan(*settings, model=PRO, max_model_len="auto")
    length = int(str(flags(made)["max-model-len"]))
    assert 256 < length < 1_048_576
    assert made.memory is not None
    assert made.memory.fits
    assert "W15" in refusal(*settings, model=PRO, max_model_len=length + 256).fix


def test_a_pool_that_dies_in_graph_capture() -> None:
    error = refusal("kv-cache-memory-bytes=40g", tp=1)
    assert "HSA_STATUS_ERROR_OUT_OF_RESOURCES" in error.why
    fits = error.fix.split("kv-cache-memory-bytes=")[1].split(".")[0]
    assert plan(f"kv-cache-memory-bytes={fits}", tp=1)


def test_one_card_holds_flash_with_the_published_pool() -> None:
    """https://github.com/Vercantez/deepseek-v4-flash-mi300x"""
    made = plan(tp=1)
    assert flags(made)["kv-cache-memory-bytes"] == "26000000000"
    assert "gpu-memory-utilization" not in flags(made)
    assert flags(made)["max-num-batched-tokens"] == "2048"
    # Who sizes by share means it: the fixed pool would win over it in vLLM.
    own = refusal("gpu-memory-utilization=0.8", tp=1)
    assert "152 GiB of memory" in text(own) or "cache" in own.what


def test_w50_f46_more_sequences_than_the_cache_holds() -> None:
    made = plan("max-num-seqs=512", model=PRO)
    found = notice(made, "max-num-seqs")
    assert made.memory is not None
    assert found.what == f"--max-num-seqs 512 -> {made.memory.sequences}"
    assert flags(made)["max-num-seqs"] == str(made.memory.sequences)
    assert made.memory.sequences < 512
    assert flags(plan("max-num-seqs=64", model=PRO))["max-num-seqs"] == "64"


def test_f45_batches_at_a_million_tokens() -> None:
    made = plan("max-num-batched-tokens=16384", max_model_len=1_048_576)
    assert flags(made)["max-num-batched-tokens"] == "8192"
    assert "F45" in notice(made, "batched-tokens-long-context").rows
    assert made.memory is not None
    assert any("index" in row.name for row in made.memory.rows)
    assert flags(plan("max-num-batched-tokens=16384"))["max-num-batched-tokens"] == "16384"


def test_f24_padded_experts() -> None:
    made = plan("moe-backend=aiter", model=PRO)
    assert "384 wide and stored as 512" in notice(made, "expert-padding").what
    assert made.memory is not None
    assert made.memory.rows[0].bytes / 2**30 == pytest.approx(133.84, abs=0.01)
    assert "expert-padding" not in rules_of(plan(model=PRO))
    old = plan(model=PRO, vllm="0.26.0")
    assert "vLLM 0.26.0" in notice(old, "expert-padding").what


def test_f09_what_a_request_costs_is_printed() -> None:
    from dsv4_deploy.plan import show

    shown = "\n".join(show.text(plan(), ["vllm"], explain=True))
    assert "TP does not add KV tokens" in shown
    assert "a request reserves 6682 blocks" in shown
    assert "3915 per token" in shown
    assert "a derived figure, no capacity" in shown


def test_f29_reading_ahead_where_memory_holds_the_checkpoint(tmp_path: pathlib.Path) -> None:
    roomy = plan(model=PRO, known=on_host(tmp_path / "a", hosts.Host()))
    assert flags(roomy)["safetensors-load-strategy"] == "prefetch"
    small = on_host(tmp_path / "b", hosts.Host(ram_bytes=512 * 2**30))
    assert "safetensors-load-strategy" not in flags(plan(model=PRO, known=small))
    limited = on_host(tmp_path / "c", hosts.Host(memory_max=str(600 * 2**30)))
    assert "safetensors-load-strategy" not in flags(plan(model=PRO, known=limited))


def test_the_measured_memory_of_the_host_counts(tmp_path: pathlib.Path) -> None:
    made = plan(known=on_host(tmp_path, hosts.Host(card=hosts.MI325X)))
    assert made.card is not None
    assert made.card.name == "mi325x"
    assert made.card.hbm_bytes == hosts.MI325X.hbm_bytes
