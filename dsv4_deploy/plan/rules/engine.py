"""Rules about vLLM's flags: experts, cache format, parsers, graph mode, parallel strategies, speculation."""

from __future__ import annotations

import difflib
import json
from typing import Any

from dsv4_deploy.catalog import releases, vllm_flags
from dsv4_deploy.plan.rules.base import Case, Found, change_flag, count, either, json_value, rule
from dsv4_deploy.plan.rules.hardware import VLLM

KV_BLOCK = "256"
AITER_MOE = ("aiter", "aiter_triton_mxfp4_bf16")
LEGAL_MOE = ("auto", "triton_unfused", *AITER_MOE, "emulation")
# The same offloading under another flag: vllm/config/vllm.py of 0.32.0 makes the one of the other.
TRANSFER, OFFLOADING = "kv-transfer-config", "OffloadingConnector"
# What the plan and the rules look into.
CONFIGURATIONS = ("speculative-config", "attention-config", "compilation-config", TRANSFER)
PARSERS = ("deepseek_v4", "deepseek_v41")

# Fewer draft tokens than DSpark's block garble the output: https://github.com/vllm-project/vllm/pull/47429
DSPARK_MIN_TOKENS = 5


def parser_of(case: Case) -> str:
    """The tokenizer mode, reasoning parser and tool parser of the model: one name for all three."""
    return PARSERS[1] if case.v41 else PARSERS[0]


@rule("block-size", "set", "the cache has blocks of 256 tokens", rows="W05", link=f"{VLLM}/tree/v0.33.0")
def block_size(case: Case) -> Found | None:
    value = case.text("block-size")
    if value is None or value == KV_BLOCK:
        return None
    return Found(
        f"--block-size {value} -> {KV_BLOCK}",
        "The kernels of DeepSeek-V4's compressed cache know blocks of 256 tokens only.",
        "Leave it out; vLLM chooses 256 itself.",
        (change_flag("block-size", KV_BLOCK),),
    )


@rule(
    "kv-cache-dtype-auto",
    "set",
    "the cache is FP8, and the plan says so",
    rows="W06",
    link=f"{VLLM}/tree/v0.33.0",
)
def kv_cache_dtype_auto(case: Case) -> Found | None:
    if case.device != "rocm" or case.text("kv-cache-dtype") != "auto":
        return None
    return Found(
        "--kv-cache-dtype auto -> fp8",
        "It ends as fp8_ds_mla either way; written out, nobody takes it for bf16.",
        "Leave it out or use fp8.",
        (change_flag("kv-cache-dtype", "fp8"),),
    )


@rule("kv-cache-dtype", "refuse", "the cache can only be FP8", rows="W07", link=f"{VLLM}/tree/v0.33.0")
def kv_cache_dtype(case: Case) -> Found | None:
    value = case.text("kv-cache-dtype")
    if case.device != "rocm" or value is None or value == "auto" or value.startswith("fp8"):
        return None
    return Found(
        f"--kv-cache-dtype {value} is not possible on this platform",
        "DeepSeek-V4's fp8_ds_mla layout only supports fp8 kv-cache: 448 FP8 values, 64 in bf16 and their scales "
        "per entry.",
        "Leave it out or use fp8.",
    )


@rule(
    "moe-aiter-version",
    "refuse",
    "AITER's FP4 experts accept DeepSeek-V4 on gfx942 only in newer releases",
    rows="F07 W08",
    link="https://github.com/SemiAnalysisAI/InferenceX/blob/main/benchmarks/single_node/fixed_seq_len/dsv4_fp8_mi300x.sh",
)
def moe_aiter_version(case: Case) -> Found | None:
    backend = case.moe_backend
    if not case.gfx942 or backend not in AITER_MOE or case.has("a16w4_hash_routing"):
        return None
    if case.traits.expert_dtype != "fp4":
        return None
    since = releases().features["a16w4_hash_routing"].since
    return Found(
        f"--moe-backend {backend} does not start with vLLM {case.vllm} on gfx942",
        "The kernel with 16-bit activations refuses experts that are routed by hash (layers 0 to 2), and the alias "
        "then ends with `AITER_MXFP4_MXFP4 does not support the deployment configuration`, which needs gfx950.",
        f"Use auto or triton_unfused, or vLLM {since}.",
    )


@rule(
    "moe-aiter-parallel",
    "refuse",
    "AITER's FP4 experts work without data parallelism and expert balancing only",
    rows="F07 W08",
    link=f"{VLLM}/pull/57079",
)
def moe_aiter_parallel(case: Case) -> Found | None:
    backend = case.moe_backend
    if not case.gfx942 or backend not in AITER_MOE:
        return None
    reasons = [
        words
        for given, words in (
            (case.dp > 1, f"--data-parallel-size {case.dp}"),
            (case.on("enable-eplb"), "--enable-eplb"),
            (case.text("all2all-backend") is not None, f"--all2all-backend {case.text('all2all-backend')}"),
        )
        if given
    ]
    if not reasons:
        return None
    return Found(
        f"--moe-backend {backend} does not go with {' and '.join(reasons)}",
        "Its kernel takes unsharded tokens and a fixed expert map; vLLM's own message names another backend.",
        "Use --set moe-backend=triton_unfused.",
    )


@rule(
    "moe-backend",
    "refuse",
    "expert kernels that exist for FP4 on gfx942",
    rows="F07",
    link=f"{VLLM}/tree/v0.33.0",
)
def moe_backend(case: Case) -> Found | None:
    backend = case.moe_backend
    if not case.gfx942 or backend is None or backend in LEGAL_MOE or case.traits.expert_dtype != "fp4":
        return None
    return Found(
        f"--moe-backend {backend} has no FP4 experts for gfx942",
        f"There, vLLM has {either(LEGAL_MOE)}; the others are for NVIDIA, RDNA or gfx950.",
        "Leave it out.",
    )


@rule(
    "moe-aiter-used",
    "warn",
    "AITER's FP4 experts are used because they were asked for",
    rows="W08",
    link=f"{VLLM}/pull/57079",
)
def moe_aiter_used(case: Case) -> Found | None:
    backend = case.moe_backend
    if not case.gfx942 or backend not in AITER_MOE or "moe-backend" not in case.explicit:
        return None
    return Found(
        f"--moe-backend {backend} is accepted with vLLM {case.vllm}, one replica and no expert balancing",
        "It needs an AITER with routing_from_hash, and rounds a rank's experts up to 256.",
        "Compare with triton_unfused.",
    )


@rule(
    "quantization-fp8",
    "set",
    "the checkpoint says its quantisation itself",
    rows="W09",
    link=f"{VLLM}/tree/v0.33.0",
)
def quantization_fp8(case: Case) -> Found | None:
    if case.text("quantization") != "fp8":
        return None
    return Found(
        "--quantization fp8 -> left out",
        "config.json says it, and vLLM makes deepseek_v4_fp8 of it: FP8 matrices, experts as they are stored.",
        "Leave it out.",
        (change_flag("quantization", None),),
    )


@rule(
    "quantization-named",
    "warn",
    "naming the quantisation changes nothing",
    rows="W10",
    link="https://github.com/SemiAnalysisAI/InferenceX/pull/2194",
)
def quantization_named(case: Case) -> Found | None:
    if case.text("quantization") != "deepseek_v4_fp8" or case.traits.expert_dtype != "fp4":
        return None
    return Found(
        "--quantization deepseek_v4_fp8 is what vLLM detects by itself",
        "It does not turn FP4 experts into FP8; the memory table is for FP4 experts.",
        "Leave it out.",
    )


@rule(
    "nvfp4",
    "refuse",
    "NVFP4 checkpoints have no kernel on gfx942",
    link=f"{VLLM}/tree/v0.33.0",
)
def nvfp4(case: Case) -> Found | None:
    method = case.quantization or case.text("quantization") or ""
    if not case.gfx942 or ("nvfp4" not in method.lower() and method.lower() != "modelopt"):
        return None
    return Found(
        f"{case.model} is quantised with {method}",
        "NVFP4 is NVIDIA's format; no kernel for it is known on gfx942.",
        "Use DeepSeek's own checkpoint (FP4 experts in the OCP format).",
    )


@rule(
    "tokenizer-mode",
    "set",
    "the checkpoint has no chat template; vLLM's encoder builds the prompt",
    rows="F21 W11",
    link=f"{VLLM}/issues/29849",
)
def tokenizer_mode(case: Case) -> Found | None:
    value, wanted = case.text("tokenizer-mode"), parser_of(case)
    if value in PARSERS:
        return None
    return Found(
        f"--tokenizer-mode {value or '(missing)'} -> {wanted}",
        "Without it chat requests end in HTTP 400: `default chat template is no longer allowed`.",
        f"Use {wanted}.",
        (change_flag("tokenizer-mode", wanted),),
    )


@rule(
    "reasoning-parser", "set", "the parser of this model's thinking", rows="W12", link=f"{VLLM}/tree/v0.33.0"
)
def reasoning_parser(case: Case) -> Found | None:
    value, wanted = case.text("reasoning-parser"), parser_of(case)
    if value is None or value in PARSERS:
        return None
    return Found(
        f"--reasoning-parser {value} -> {wanted}",
        "Other parsers look for other marks, and thinking ends up in the answer.",
        f"Use {wanted}.",
        (change_flag("reasoning-parser", wanted),),
    )


@rule(
    "tool-call-parser",
    "set",
    "the parser of this model's tool calls",
    rows="W13",
    link=f"{VLLM}/issues/48931",
)
def tool_call_parser(case: Case) -> Found | None:
    value, wanted = case.text("tool-call-parser"), parser_of(case)
    if value is None or value in PARSERS:
        return None
    return Found(
        f"--tool-call-parser {value} -> {wanted}, with --enable-auto-tool-choice",
        "Other parsers do not know DeepSeek-V4's markup, and tool calls arrive as text.",
        f"Use {wanted}.",
        (change_flag("tool-call-parser", wanted), change_flag("enable-auto-tool-choice", True)),
    )


@rule(
    "parsers-match",
    "refuse",
    "V4 and V4.1 have parsers of their own",
    rows="W54",
    link="https://huggingface.co/deepseek-ai/DeepSeek-V4.1-Flash",
)
def parsers_match(case: Case) -> Found | None:
    wanted = parser_of(case)
    other = PARSERS[0] if case.v41 else PARSERS[1]
    wrong = [
        flag
        for flag in ("tokenizer-mode", "reasoning-parser", "tool-call-parser")
        if case.text(flag) == other
    ]
    if not wrong:
        return None
    return Found(
        f"--{wrong[0]} {other} does not go with model_type {case.traits.model_type}",
        "The two generations write prompts, thinking and tool calls differently.",
        f"Use {wanted} for {', '.join(f'--{flag}' for flag in wrong)}, or leave them out.",
    )


@rule(
    "indexer-dtype",
    "refuse",
    "an FP4 index cache needs gfx950",
    rows="W14",
    link=f"{VLLM}/tree/v0.33.0",
)
def indexer_dtype(case: Case) -> Found | None:
    if not case.gfx942:
        return None
    config = case.json("attention-config")
    asked = [
        f"{key}={_shown(config[key])}"
        for key, wrong in (("use_fp4_indexer_cache", "true"), ("indexer_kv_dtype", "mxfp4"))
        if str(config.get(key)).lower() == wrong
    ]
    if not asked:
        return None
    return Found(
        f"--attention-config {asked[0]} is for gfx950 only",
        "gfx942 has no FP4 matrix instructions; vLLM stops with `requires CDNA4`. The line comes from a recipe for "
        "Blackwell or MI355X.",
        "Remove it; FP8 is the default here.",
    )


@rule(
    "enforce-eager",
    "warn",
    "without graphs decoding is much slower",
    rows="W17",
    link=f"{VLLM}/issues/41820",
)
def enforce_eager(case: Case) -> Found | None:
    if case.device != "rocm" or not runs_eager(case):
        return None
    how = "--enforce-eager is on" if case.on("enforce-eager") else "the configuration captures no graphs"
    return Found(
        how,
        "Decode graphs are off: one step is some 2,000 kernel launches, each with its own overhead.",
        "Good for finding a fault; take it out for serving.",
    )


@rule(
    "graphs-v41",
    "set",
    "V4.1's piecewise capture crashes on gfx942",
    rows="F64",
    link="https://github.com/SemiAnalysisAI/InferenceX/pull/3246",
)
def graphs_v41(case: Case) -> Found | None:
    mode = case.json("compilation-config").get("cudagraph_mode")
    if not case.gfx942 or not case.v41 or case.on("enforce-eager") or mode in ("FULL_DECODE_ONLY", "NONE"):
        return None
    config = {**case.json("compilation-config"), "cudagraph_mode": "FULL_DECODE_ONLY"}
    return Found(
        f"cudagraph_mode {mode or '(default)'} -> FULL_DECODE_ONLY",
        "With PIECEWISE every worker ends with a segmentation fault while graphs are captured.",
        "Use FULL_DECODE_ONLY.",
        (change_flag("compilation-config", json.dumps(config, separators=(",", ":"))),),
    )


@rule(
    "monokernel",
    "refuse",
    "the persistent decode kernel is not for V4 on gfx942",
    link=f"{VLLM}/tree/v0.33.0",
)
def monokernel(case: Case) -> Found | None:
    if not case.gfx942 or not case.on("monokernel"):
        return None
    if case.v41 and case.card is not None and case.card.compute_units >= 256:
        return None
    return Found(
        "--monokernel is not possible here",
        "It exists for V4.1 at TP4 on cards with 256 compute units or more, and for V4-Pro on gfx950.",
        "Leave it out.",
    )


@rule(
    "expert-parallel-pro",
    "refuse",
    "Pro with expert parallelism answers with nothing",
    rows="F59 W48",
    link="https://github.com/SemiAnalysisAI/InferenceX/blob/main/benchmarks/single_node/agentic/dsv4_fp8_mi325x_mtp.sh",
)
def expert_parallel_pro(case: Case) -> Found | None:
    if not case.gfx942 or not case.on("enable-expert-parallel") or case.family != "pro":
        return None
    return Found(
        "--enable-expert-parallel with Pro on gfx942",
        "Answers came back empty and were counted as success.",
        "Use tensor parallelism alone.",
    )


@rule(
    "expert-parallel",
    "warn",
    "expert parallelism on gfx942 gave invalid answers for Pro",
    rows="F59 W48",
    link="https://github.com/SemiAnalysisAI/InferenceX/blob/main/benchmarks/single_node/agentic/dsv4_fp8_mi325x_mtp.sh",
)
def expert_parallel(case: Case) -> Found | None:
    if not case.gfx942 or not case.on("enable-expert-parallel") or case.family == "pro":
        return None
    return Found(
        "--enable-expert-parallel is on",
        "With Pro on MI325X it gave empty answers; for this model nobody has reported either way.",
        "Check answers before you trust it.",
    )


@rule(
    "kv-offloading",
    "set",
    "moving cache to the CPU corrupts answers",
    rows="F47 F72 W49",
    link=f"{VLLM}/issues/47282",
)
def kv_offloading(case: Case) -> Found | None:
    backend, size = case.text("kv-offloading-backend"), case.text("kv-offloading-size")
    native = backend == "native" or (size is not None and backend is None)
    connector = OFFLOADING in json.dumps(case.json(TRANSFER))  # alone, or one of a MultiConnector's
    if case.device != "rocm" or not (native or connector):
        return None
    return Found(
        "KV offloading (native) -> off",
        "A block may be used before it is restored (vllm#47282, open), and on ROCm the batched copy faults both ranks.",
        "Use a shorter --max-model-len or fewer sequences.",
        (
            change_flag("kv-offloading-backend", None),
            change_flag("kv-offloading-size", None),
            *((change_flag(TRANSFER, None),) if connector else ()),
        ),
    )


@rule(
    "served-model-name",
    "warn",
    "clients must ask for the name that is served",
    rows="W51",
    link="https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html",
)
def served_model_name(case: Case) -> Found | None:
    value = case.text("served-model-name")
    if "served-model-name" not in case.explicit or value is None or value == case.served_name:
        return None
    return Found(
        f"the server answers to {value!r}, and not to {case.served_name!r}",
        "A request with another model name gets 404.",
        f"Set the clients to {value!r}.",
    )


@rule(
    "fp8-experts",
    "warn",
    "checkpoints with FP8 experts go another way",
    rows="W53",
    link=f"{VLLM}/pull/41136",
)
def fp8_experts(case: Case) -> Found | None:
    if case.device != "rocm" or case.traits.expert_dtype != "fp8":
        return None
    return Found(
        f"{case.model} has FP8 experts",
        "vLLM loads them through its FP8 path, which nobody has validated for DeepSeek-V4 on gfx942, and which needs "
        "nearly twice the memory.",
        "Prefer the checkpoint with FP4 experts.",
    )


@rule(
    "dspark-in-checkpoint",
    "refuse",
    "dspark needs a checkpoint that has the draft",
    rows="F23 W19",
    link="https://github.com/eugr/spark-vllm-docker/issues/304",
)
def dspark_in_checkpoint(case: Case) -> Found | None:
    if _method(case) != "dspark" or case.traits.draft.kind == "dspark":
        return None
    return Found(
        f"{case.model} has no DSpark draft: no dspark_* fields in its config.json",
        "vLLM would fail late, with an attribute error about draft_id_to_target_id.",
        _other_draft(case),
    )


@rule("dspark-rocm", "refuse", "dspark on ROCm needs a newer vLLM", rows="F23", link=f"{VLLM}/pull/47429")
def dspark_rocm(case: Case) -> Found | None:
    if case.device != "rocm" or _method(case) != "dspark" or case.has("dspark_rocm"):
        return None
    return Found(
        f"dspark with vLLM {case.vllm}",
        f"On ROCm the draft class exists from vLLM {releases().features['dspark_rocm'].since} on; before, it is None.",
        f"Use vLLM {releases().default}, or no speculation.",
    )


@rule(
    "dspark-tokens",
    "refuse",
    "dspark with fewer draft tokens than its block garbles the text",
    link=f"{VLLM}/pull/47429",
)
def dspark_tokens(case: Case) -> Found | None:
    tokens = draft_tokens(case)
    least = case.traits.draft.block or DSPARK_MIN_TOKENS
    if _method(case) != "dspark" or tokens >= least:
        return None
    return Found(
        f"num_speculative_tokens {tokens} is fewer than DSpark's block of {least}",
        "The draft proposes whole blocks; with fewer tokens the output is garbled.",
        f"Use {least} or more.",
    )


@rule(
    "mtp-in-checkpoint",
    "refuse",
    "mtp needs a checkpoint that has an MTP layer",
    rows="W20",
    link="https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-0731",
)
def mtp_in_checkpoint(case: Case) -> Found | None:
    if _method(case) != "mtp" or case.traits.draft.kind == "mtp":
        return None
    ships = "ships DSpark layers under mtp.*" if case.traits.draft.kind == "dspark" else "has no draft layers"
    return Found(
        f"mtp does not work with {case.model}, which {ships}",
        "vLLM would read them as MTP layers and propose nonsense.",
        _other_draft(case),
    )


@rule(
    "mtp-reuses-layer",
    "warn",
    "more draft tokens than MTP layers",
    rows="W18",
    link=f"{VLLM}/tree/v0.33.0",
)
def mtp_reuses_layer(case: Case) -> Found | None:
    tokens = draft_tokens(case)
    if _method(case) != "mtp" or tokens <= case.traits.draft.layers:
        return None
    return Found(
        f"num_speculative_tokens {tokens} with {case.traits.draft.layers} MTP layer",
        "It is allowed: the layer is used again for each token, and fewer of them are accepted.",
        "1 or 2 is usual.",
    )


@rule(
    "speculation-gfx942",
    "warn",
    "speculation is off by default on gfx942",
    rows="F44 F81",
    link=f"{VLLM}/issues/47196",
)
def speculation_gfx942(case: Case) -> Found | None:
    method = _method(case)
    if not case.gfx942 or not method:
        return None
    return Found(
        f"speculation with {method} is on",
        "Another MLA model faulted with MTP, sparse decode and graphs on gfx942, and an older verification step saw "
        "the future; nobody has confirmed either way for DeepSeek-V4 on 0.32 and 0.33. Beyond some 32 streams it is "
        "slower.",
        "Compare answers with it on and off at temperature 0.",
    )


@rule(
    "quantization-other",
    "warn",
    "a quantisation that the checkpoint does not have",
    link=f"{VLLM}/tree/v0.33.0",
)
def quantization_other(case: Case) -> Found | None:
    value = case.text("quantization")
    if value is None or value in ("fp8", "deepseek_v4_fp8") or nvfp4.check(case) is not None:
        return None
    return Found(
        f"--quantization {value} is not what config.json says",
        "vLLM detects DeepSeek-V4's own (deepseek_v4_fp8) and stops when another name is given; the memory table is "
        "for the files as they are.",
        "Leave it out.",
    )


@rule(
    "unknown-flag",
    "warn",
    "a flag that vLLM 0.32 does not have",
    link=f"{VLLM}/blob/v0.32.0/vllm/engine/arg_utils.py",
)
def unknown_flag(case: Case) -> Found | None:
    known = vllm_flags()
    unknown = sorted(name for name in case.explicit if not known.knows(name))
    if not unknown:
        return None
    heads = known.valued | known.switches | known.switches_with_no_form
    near = difflib.get_close_matches(unknown[0], sorted(heads), n=1)
    return Found(
        f"vLLM 0.32 has no flag called --{unknown[0]}",
        "Nothing here can check it, and a vLLM that does not have it ends at start.",
        f"Did you mean {near[0]}?" if near else "Leave it out, unless your vLLM is newer and has it.",
    )


@rule(
    "configuration-object",
    "refuse",
    "configurations are JSON objects",
    link=f"{VLLM}/blob/v0.32.0/vllm/engine/arg_utils.py",
)
def configuration_object(case: Case) -> Found | None:
    for name in CONFIGURATIONS:
        text = case.text(name)
        if text is not None and not _is_object(text):
            return Found(
                f"--{name} {text[:60]} is no JSON object",
                "vLLM would refuse it, and the rules could not look into it.",
                f"Write --set '{name}={{\"key\": value}}', or --set {name}.key=value.",
            )
    return None


def runs_eager(case: Case) -> bool:
    """Whether no graph is captured: by switch, or by the graph mode."""
    mode = case.json("compilation-config").get("cudagraph_mode")
    return case.on("enforce-eager") or str(mode).upper() == "NONE"


def speculation(case: Case) -> dict[str, Any]:
    """The content of --speculative-config with its short forms; {} when speculation is off."""
    found = case.json("speculative-config")
    for flag, key in (
        ("spec-method", "method"),
        ("spec-model", "model"),
        ("spec-tokens", "num_speculative_tokens"),
    ):
        text = case.text(flag)
        if text is not None:
            found[key] = count(text) if key == "num_speculative_tokens" else text
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(json_value(text), dict)
    except ValueError:
        return False


def draft_tokens(case: Case) -> int:
    """Tokens that the draft proposes at a time; 0 when speculation is off."""
    if not _method(case):
        return 0
    tokens = speculation(case).get("num_speculative_tokens", case.traits.draft.block)
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else 0


def _method(case: Case) -> str:
    """ "mtp" or "dspark", "" when speculation is off; vLLM's older names for MTP mean the same."""
    method = speculation(case).get("method")
    if isinstance(method, str):
        return "mtp" if method.endswith("mtp") else method
    return ""


def _other_draft(case: Case) -> str:
    kind, block = case.traits.draft.kind, case.traits.draft.block
    if kind == "none":
        return "Serve it without speculation."
    config = {"method": kind, "num_speculative_tokens": block}
    return f"Use --set 'speculative-config={json.dumps(config)}', or no speculation."


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
