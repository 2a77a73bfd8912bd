"""Rules about vLLM's flags: the flags that people copied, and what becomes of them."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from dsv4_deploy.facts import checkpoint
from tests import small_checkpoint
from tests.plan.cases import flags, notice, plan, refusal, rules_of, text

FLASH, PRO, V41 = "deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash"
F0731, P0813 = "deepseek-v4-flash-0731", "deepseek-v4-pro-0813"


def speculation(**config: object) -> str:
    return f"speculative-config={json.dumps(config)}"


def test_the_default_plan_gives_no_rule_about_flags_anything_to_do() -> None:
    assert rules_of(plan(gpu="mi308x", gpu_count=8)) == set()


def test_w05_block_size() -> None:
    made = plan("block-size=16")
    found = notice(made, "block-size")
    assert found.verdict == "set"
    assert found.what == "--block-size 16 -> 256"
    assert flags(made)["block-size"] == "256"
    assert "rule block-size" in next(flag.reason for flag in made.flags if flag.name == "block-size")
    kept = plan("block-size=16", allow=("block-size",))
    assert flags(kept)["block-size"] == "16"
    assert notice(kept, "block-size").verdict == "allowed"
    assert "block-size" not in rules_of(plan("block-size=256"))


def test_w06_kv_cache_dtype_auto() -> None:
    made = plan("kv-cache-dtype=auto")
    assert flags(made)["kv-cache-dtype"] == "fp8"
    assert "fp8_ds_mla" in notice(made, "kv-cache-dtype-auto").why


@pytest.mark.parametrize("value", ["bfloat16", "float16", "int8"])
def test_w07_other_cache_formats(value: str) -> None:
    error = refusal(f"kv-cache-dtype={value}")
    assert "fp8_ds_mla layout only supports fp8 kv-cache" in error.why
    assert "W07" in error.fix
    assert plan("kv-cache-dtype=fp8_e4m3")


def test_w08_f07_aiter_experts_by_version() -> None:
    old = refusal("moe-backend=aiter", vllm="0.32.0")
    assert "vLLM 0.32.0 on gfx942" in old.what
    assert "AITER_MXFP4_MXFP4" in old.why
    assert "auto or triton_unfused" in old.fix
    assert "F07" in old.fix
    made = plan("moe-backend=aiter", vllm="0.33.0")
    assert flags(made)["moe-backend"] == "aiter"
    assert notice(made, "moe-aiter-used").rows == ("W08",)  # never silent


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data-parallel-size=2", "--data-parallel-size 2"),
        ("enable-eplb", "--enable-eplb"),
        ("all2all-backend=mori", "--all2all-backend mori"),
    ],
)
def test_w08_aiter_experts_with_other_parallelism(setting: str, words: str) -> None:
    error = refusal("moe-backend=aiter", setting, tp=4)
    assert words in error.what
    assert "triton_unfused" in error.fix


def test_experts_without_a_kernel() -> None:
    assert "marlin has no FP4 experts for gfx942" in refusal("moe-backend=marlin").what
    assert "auto, triton_unfused" in refusal("moe-backend=aiter_mega_moe").why
    assert flags(plan("moe-backend=emulation"))["moe-backend"] == "emulation"


def test_the_plan_itself_chooses_by_version_size_and_parallelism() -> None:
    assert flags(plan())["moe-backend"] == "aiter"
    assert "moe-backend" not in flags(plan(vllm="0.32.0"))
    assert flags(plan(model=PRO))["moe-backend"] == "triton_unfused"
    assert flags(plan("data-parallel-size=2", tp=4))["moe-backend"] == "triton_unfused"
    assert flags(plan(model=PRO, tp=4, gpu="mi325x", gpu_count=4))["moe-backend"] == "aiter"
    assert "moe-backend" not in flags(plan(model="deepseek-v4-flash-base"))


def test_w09_quantization_fp8_is_dropped() -> None:
    made = plan("quantization=fp8")
    assert "quantization" not in flags(made)
    assert "deepseek_v4_fp8" in notice(made, "quantization-fp8").why


def test_w10_quantization_by_its_full_name() -> None:
    made = plan("quantization=deepseek_v4_fp8")
    assert flags(made)["quantization"] == "deepseek_v4_fp8"
    assert "FP4 experts" in notice(made, "quantization-named").why
    assert made.memory == plan().memory


def test_nvfp4(tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "nv", quantization_config={"quant_method": "modelopt"})
    known = {"checkpoint": checkpoint.read(directory), "gpus": ("gfx942",) * 4, "vllm_version": "0.33.0"}
    assert "modelopt" in refusal(model=str(directory), known=known).what


def test_w11_f21_tokenizer_mode_is_always_there() -> None:
    assert flags(plan())["tokenizer-mode"] == "deepseek_v4"
    assert flags(plan(model=V41))["tokenizer-mode"] == "deepseek_v41"
    made = plan("tokenizer-mode=auto")
    assert flags(made)["tokenizer-mode"] == "deepseek_v4"
    found = notice(made, "tokenizer-mode")
    assert "auto -> deepseek_v4" in found.what
    assert "default chat template is no longer allowed" in found.why


@pytest.mark.parametrize("value", ["deepseek_r1", "deepseek_v3"])
def test_w12_reasoning_parser(value: str) -> None:
    made = plan(f"reasoning-parser={value}")
    assert flags(made)["reasoning-parser"] == "deepseek_v4"
    assert f"{value} -> deepseek_v4" in notice(made, "reasoning-parser").what


@pytest.mark.parametrize("value", ["deepseek_v3", "deepseek_v31", "deepseek_v32"])
def test_w13_tool_call_parser(value: str) -> None:
    made = plan(f"tool-call-parser={value}", "enable-auto-tool-choice=false")
    assert flags(made)["tool-call-parser"] == "deepseek_v4"
    assert flags(made)["enable-auto-tool-choice"] is True
    assert "no-enable-auto-tool-choice" not in flags(made)
    assert f"{value} -> deepseek_v4" in notice(made, "tool-call-parser").what


@pytest.mark.parametrize(
    "setting",
    [
        'attention-config={"use_fp4_indexer_cache": true}',
        'attention-config={"indexer_kv_dtype": "mxfp4"}',
        "attention-config.indexer_kv_dtype=mxfp4",
        "ac.indexer_kv_dtype=mxfp4",
        "attention-config.use_fp4_indexer_cache=true",
    ],
)
def test_w14_fp4_index_cache(setting: str) -> None:
    error = refusal(setting)
    assert "gfx950 only" in error.what
    assert "Remove it" in error.fix
    assert plan('attention-config={"indexer_kv_dtype": "fp8"}')


def test_w17_eager() -> None:
    found = notice(plan("enforce-eager"), "enforce-eager")
    assert found.verdict == "warn"
    assert "graphs are off" in found.why
    assert "enforce-eager" not in rules_of(plan(device="cpu"))


def test_w18_more_draft_tokens_than_layers() -> None:
    made = plan(speculation(method="mtp", num_speculative_tokens=2))
    assert "num_speculative_tokens 2 with 1 MTP layer" in notice(made, "mtp-reuses-layer").what
    assert {"F44"} <= set(notice(made, "speculation-gfx942").rows)
    assert "mtp-reuses-layer" not in rules_of(plan(speculation(method="mtp", num_speculative_tokens=1)))


def test_f44_speculation_is_off_unless_asked() -> None:
    for model in (FLASH, F0731, PRO, P0813):
        assert "speculative-config" not in flags(plan(model=model))


@pytest.mark.parametrize("model", [FLASH, PRO])
def test_w19_f23_dspark_on_the_preview(model: str) -> None:
    error = refusal(speculation(method="dspark", num_speculative_tokens=5), model=model)
    assert "no dspark_* fields in its config.json" in error.what
    assert "F23" in error.fix
    assert '"method": "mtp"' in error.fix


def test_w19_by_the_config_json_of_a_directory(tmp_path: pathlib.Path) -> None:
    directory = small_checkpoint.write(tmp_path / "plain")
    known = {"checkpoint": checkpoint.read(directory), "gpus": ("gfx942",), "vllm_version": "0.33.0"}
    error = refusal(speculation(method="dspark"), model=str(directory), tp=1, known=known)
    assert "no dspark_* fields" in error.what
    assert "without speculation" in error.fix


def test_f23_dspark_on_an_old_rocm_build() -> None:
    error = refusal(speculation(method="dspark", num_speculative_tokens=5), model=F0731, vllm="0.25.1")
    assert "0.26.0" in error.why


@pytest.mark.parametrize("model", [F0731, P0813, V41])
def test_w20_mtp_on_dspark_weights(model: str) -> None:
    error = refusal(speculation(method="mtp", num_speculative_tokens=1), model=model)
    assert "ships DSpark" in error.what
    assert '"method": "dspark"' in error.fix
    assert plan(speculation(method="dspark", num_speculative_tokens=5), model=model)


def test_dspark_with_too_few_tokens() -> None:
    error = refusal(speculation(method="dspark", num_speculative_tokens=3), model=F0731)
    assert "block of 5" in error.what
    assert plan(speculation(method="dspark"), model=F0731)  # vLLM then takes the block


def test_f59_w48_expert_parallelism() -> None:
    assert notice(plan("enable-expert-parallel"), "expert-parallel").verdict == "warn"
    error = refusal("enable-expert-parallel", model=PRO)
    assert "F59" in error.fix
    assert "empty" in error.why


@pytest.mark.parametrize(
    "setting",
    [("kv-offloading-backend=native", "kv-offloading-size=64"), ("kv-offloading-size=64",)],
)
def test_w49_f72_f47_offloading(setting: tuple[str, ...]) -> None:
    made = plan(*setting)
    assert not {"kv-offloading-backend", "kv-offloading-size"} & flags(made).keys()
    assert {"F47", "F72", "W49"} == set(notice(made, "kv-offloading").rows)
    kept = plan(*setting, allow=("kv-offloading",))
    assert flags(kept)["kv-offloading-size"] == "64"


def test_w51_served_name() -> None:
    found = notice(plan("served-model-name=mine"), "served-model-name")
    assert "'mine'" in found.what
    assert "'deepseek-v4-flash'" in found.what


def test_w53_fp8_experts() -> None:
    found = notice(plan(model="deepseek-v4-flash-base"), "fp8-experts")
    assert found.verdict == "warn"
    assert "validated" in found.why


@pytest.mark.parametrize(("model", "parser"), [(V41, "deepseek_v4"), (FLASH, "deepseek_v41")])
@pytest.mark.parametrize("flag", ["tokenizer-mode", "reasoning-parser", "tool-call-parser"])
def test_w54_parsers_of_the_other_generation(model: str, parser: str, flag: str) -> None:
    error = refusal(f"{flag}={parser}", model=model)
    assert "model_type deepseek_v4" in error.what
    wanted = "deepseek_v41" if model == V41 else "deepseek_v4"
    assert f"Use {wanted}" in error.fix


def test_f64_v41_captures_decode_graphs_only() -> None:
    made = plan('compilation-config={"cudagraph_mode":"FULL_AND_PIECEWISE","mode":0}', model=V41)
    assert json.loads(str(flags(made)["compilation-config"])) == {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "mode": 0,
    }
    assert "F64" in notice(made, "graphs-v41").rows
    assert "graphs-v41" not in rules_of(plan(model=V41))
    assert "graphs-v41" not in rules_of(plan('compilation-config={"cudagraph_mode":"PIECEWISE"}'))
    dotted = plan("compilation-config.cudagraph_mode=PIECEWISE", model=V41)
    assert "compilation-config.cudagraph_mode" not in flags(dotted)


def test_monokernel() -> None:
    assert "not possible" in refusal("monokernel=true").what
    assert plan("monokernel=true", model=V41, tp=4)
    assert "not possible" in refusal("monokernel=true", model=V41, tp=4, gpu="mi308x", gpu_count=4).what


def test_f82_query_heads_of_v41_are_not_normalised() -> None:
    from dsv4_deploy import catalog

    assert not catalog.models()[V41].traits.q_head_norm
    assert catalog.models()[FLASH].traits.q_head_norm
    assert not catalog.traits_of({"model_type": "deepseek_v4", "q_head_norm": False}).q_head_norm


def test_a_rule_sees_what_the_rules_before_it_changed() -> None:
    made = plan("block-size=1", "reasoning-parser=deepseek_r1", "quantization=fp8", "kv-cache-dtype=auto")
    assert {"block-size", "reasoning-parser", "quantization-fp8", "kv-cache-dtype-auto"} <= rules_of(made)


@pytest.mark.parametrize(
    "setting",
    [
        "max-num-seqs=many",
        "max-num-batched-tokens=-5",
        "data-parallel-size=true",
        "gpu-memory-utilization=half",
    ],
)
def test_numbers_that_are_none(setting: str) -> None:
    assert "is not a" in refusal(setting).what


@pytest.mark.parametrize("value", ["0", "1.5", "nan", "-1"])
def test_shares_that_are_none(value: str) -> None:
    assert "share of memory" in text(refusal(f"gpu-memory-utilization={value}"))


def test_notices_are_one_line_with_reason_rows_and_override() -> None:
    for found in plan("enforce-eager", "block-size=1", allow=("block-size",)).notices:
        line = found.line()
        assert "\n" not in line
        assert found.rule in line
        assert dataclasses.asdict(found)["link"].startswith("https://")


FLASH_0731 = "deepseek-v4-flash-0731"


@pytest.mark.parametrize(
    ("settings", "model", "row"),
    [
        (("spec-method=dspark", "spec-tokens=5"), None, "W19"),
        (("spec-method=mtp", "spec-tokens=1"), FLASH_0731, "W20"),
        (("speculative-config.method=dspark",), None, "W19"),
    ],
)
def test_w19_w20_the_short_forms_of_speculation(
    settings: tuple[str, ...], model: str | None, row: str
) -> None:
    assert row in refusal(*settings, model=model).fix


def test_w18_f44_the_short_forms_count_as_well() -> None:
    made = plan("spec-method=mtp", "spec-tokens=3")
    assert "num_speculative_tokens 3" in notice(made, "mtp-reuses-layer").what
    assert notice(made, "speculation-gfx942")
    assert made.memory is not None
    assert made.memory.layout.draft.kind == "mtp"
    assert made.memory.layout.draft_tokens == 3


@pytest.mark.parametrize(
    "content",
    [
        '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}',
        '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":'
        '[{"kv_connector":"OffloadingConnector"}]}}',
    ],
)
def test_w49_offloading_under_its_other_name(content: str) -> None:
    made = plan(f"kv-transfer-config={content}")
    assert notice(made, "kv-offloading")
    assert "kv-transfer-config" not in flags(made)
    assert "kv-transfer-config" in flags(plan('kv-transfer-config={"kv_connector":"NixlConnector"}'))


def test_w17_graphs_that_are_off_by_their_mode() -> None:
    assert notice(plan('compilation-config={"cudagraph_mode":"NONE"}'), "enforce-eager")


@pytest.mark.parametrize("content", ['{"use_fp4_indexer_cache":"true"}', '{"indexer_kv_dtype":"MXFP4"}'])
def test_w14_however_it_is_written(content: str) -> None:
    assert "W14" in refusal(f"attention-config={content}").fix


def test_w08_is_about_fp4_experts_and_reads_names_as_vllm_does() -> None:
    assert "W08" in refusal("moe-backend=AITER", vllm="0.32.0").fix
    assert plan("moe-backend=Triton-Unfused")
    assert plan("moe-backend=aiter", model="deepseek-v4-flash-base", vllm="0.32.0")


@pytest.mark.parametrize("name", ["speculative-config", "attention-config", "compilation-config"])
@pytest.mark.parametrize("value", ["[1]", "5", "x"])
def test_a_configuration_that_is_no_object(name: str, value: str) -> None:
    assert f"--{name} {value} is no JSON object" in refusal(f"{name}={value}").what


def test_flags_and_formats_that_nobody_knows_are_warned_about() -> None:
    made = plan("max-num-sequences=5", "quantization=awq")
    assert notice(made, "unknown-flag").fix.startswith("Did you mean max-num-seqs?")
    assert "awq" in notice(made, "quantization-other").what
    assert not rules_of(plan("max-num-seqs=5", "attention-config.a=1", "seed=3")) & {"unknown-flag"}
