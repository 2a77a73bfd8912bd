"""Rules about environment variables: those that must be set, must not be, or contradict each other."""

from __future__ import annotations

from dsv4_deploy.plan.rules.base import Case, Change, Found, change_env, rule, seconds
from dsv4_deploy.plan.rules.hardware import VLLM

PLUGIN = "rocm_patches"

# Names that vLLM has given up; with --fail-on-environ-validation it stops on them. Value: what to use instead.
GONE = {
    "VLLM_TORCH_PROFILER_DIR": "--set 'profiler-config={...}'",
    "VLLM_RPC_TIMEOUT": "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "VLLM_DSV4_WO_A_FP8": "nothing; it never was in a release",
}


@rule("plugin-allowed", "refuse", "vLLM must load this bundle's plugin", link=f"{VLLM}/tree/v0.32.0")
def plugin_is_allowed(case: Case) -> Found | None:
    allowed = case.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return None
    return Found(
        f"VLLM_PLUGINS in your environment is {allowed!r}, which leaves out {PLUGIN}",
        f"vLLM loads only the plugins listed there, and DeepSeek-V4 does not run without {PLUGIN}.",
        f"unset VLLM_PLUGINS, or add {PLUGIN} to the list.",
    )


@rule(
    "aiter-on",
    "set",
    "the sparse indexer needs AITER on gfx942",
    rows="F69 W45",
    link=f"{VLLM}/issues/51530",
)
def aiter_on(case: Case) -> Found | None:
    value = case.variable("VLLM_ROCM_USE_AITER")
    if not case.gfx942 or _is_on(value):
        return None
    return Found(
        f"VLLM_ROCM_USE_AITER {value or '(unset)'} -> 1",
        "The sparse indexer raises an error on gfx942 without AITER.",
        "Leave it to the plan.",
        (change_env("VLLM_ROCM_USE_AITER", "1"),),
    )


@rule(
    "aiter-fp4bmm-off",
    "set",
    "FP4 batched products do not exist on gfx942",
    rows="F26 W46",
    link=f"{VLLM}/issues/34641",
)
def aiter_fp4bmm_off(case: Case) -> Found | None:
    return _force_off(
        case,
        "VLLM_ROCM_USE_AITER_FP4BMM",
        "vLLM stops with `MXFP4 quantization is not supported on gfx942`.",
    )


@rule(
    "aiter-fp8bmm-off",
    "set",
    "AITER's FP8 batched products crash with data parallelism and are gfx950's",
    rows="F63",
    link=f"{VLLM}/issues/51957",
)
def aiter_fp8bmm_off(case: Case) -> Found | None:
    return _force_off(
        case,
        "VLLM_ROCM_USE_AITER_FP8BMM",
        "Its FP8 output projection is for gfx950, and an empty batch on a data-parallel rank is a segmentation fault.",
    )


@rule(
    "scratch-reclaim",
    "set",
    "distributed start-up dies without it on gfx942",
    rows="F62",
    link="https://github.com/AMD-AGI/Infera/blob/main/infera/engine/dsv4_gfx942.py",
)
def scratch_reclaim(case: Case) -> Found | None:
    value = case.variable("HSA_NO_SCRATCH_RECLAIM")
    if not case.gfx942 or value == "1":
        return None
    return Found(
        f"HSA_NO_SCRATCH_RECLAIM {value or '(unset)'} -> 1",
        "With reclaiming on, the firmware of gfx942 aborts in distributed initialisation.",
        "Leave it to the plan.",
        (change_env("HSA_NO_SCRATCH_RECLAIM", "1"),),
    )


@rule(
    "breakable-graphs",
    "set",
    "breakable graphs switch compilation off or crash",
    rows="F25 F64",
    link=f"{VLLM}/issues/49370",
)
def breakable_graphs(case: Case) -> Found | None:
    value = case.variable("VLLM_USE_BREAKABLE_CUDAGRAPH")
    if not case.gfx942 or value == "0":
        return None
    return Found(
        f"VLLM_USE_BREAKABLE_CUDAGRAPH {value or '(unset)'} -> 0",
        "Where vLLM switched it on by itself Flash lost a third of its speed, and V4.1's workers crash in capture.",
        "Leave it to the plan.",
        (change_env("VLLM_USE_BREAKABLE_CUDAGRAPH", "0"),),
    )


@rule(
    "aiter-vskip",
    "set",
    "AITER's FP8 expert kernel faults under load",
    rows="F49",
    link="https://github.com/ROCm/aiter/issues/1143",
)
def aiter_vskip(case: Case) -> Found | None:
    value = case.variable("AITER_ENABLE_VSKIP")
    if not case.gfx942 or case.traits.expert_dtype != "fp8" or value == "0":
        return None
    return Found(
        f"AITER_ENABLE_VSKIP {value or '(unset)'} -> 0",
        "With FP8 experts it ends in HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION (fmoe_bf16_blockscaleFp8).",
        "Leave it to the plan.",
        (change_env("AITER_ENABLE_VSKIP", "0"),),
    )


@rule(
    "ready-timeout",
    "set",
    "loading takes longer than vLLM waits",
    rows="F15",
    link=f"{VLLM}/issues/48031",
)
def ready_timeout(case: Case) -> Found | None:
    planned, theirs = (
        case.env.get("VLLM_ENGINE_READY_TIMEOUT_S"),
        case.environ.get("VLLM_ENGINE_READY_TIMEOUT_S"),
    )
    if planned is None or theirs is None or (seconds(theirs) or 0) >= int(planned):
        return None
    return Found(
        f"VLLM_ENGINE_READY_TIMEOUT_S {theirs} -> {planned}",
        "A slow load or AITER's first compilation ends in `Timed out waiting for engine core processes to start`.",
        "Leave it to the plan.",
        (change_env("VLLM_ENGINE_READY_TIMEOUT_S", planned),),
    )


@rule(
    "aiter-jit-dir",
    "warn",
    "AITER's build hangs with a cache of its own",
    rows="F28 W47",
    link="https://github.com/ROCm/aiter/issues/3635",
)
def aiter_jit_dir(case: Case) -> Found | None:
    value = case.environ.get("AITER_JIT_DIR")
    if case.device != "rocm" or value is None:
        return None
    return Found(
        f"AITER_JIT_DIR is {value}",
        "With it on a data volume AITER's build was seen to hang at start; without it the same build took 225 s.",
        "Unset it and put ~/.aiter on a volume.",
    )


@rule(
    "visibility-conflict",
    "refuse",
    "two variables that name different GPUs",
    rows="W23",
    link="https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",
)
def visibility_conflict(case: Case) -> Found | None:
    cuda, hip = case.environ.get("CUDA_VISIBLE_DEVICES"), case.environ.get("HIP_VISIBLE_DEVICES")
    if case.device != "rocm" or cuda is None or hip is None or cuda == hip:
        return None
    return Found(
        f"CUDA_VISIBLE_DEVICES is {cuda!r} and HIP_VISIBLE_DEVICES is {hip!r}",
        "vLLM stops with `Inconsistent GPU visibility env vars`.",
        "unset CUDA_VISIBLE_DEVICES; in a pod unset both, the device plugin decides.",
    )


@rule(
    "visibility",
    "warn",
    "variables that hide GPUs",
    rows="W23",
    link="https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",
)
def visibility(case: Case) -> Found | None:
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    found = [f"{name}={case.environ[name]}" for name in names if name in case.environ]
    if case.device != "rocm" or not found:
        return None
    return Found(
        f"{', '.join(found)} in the environment",
        "Such filters compose, and in a pod devices are numbered from 0 again.",
        "Remove them in pods; on a host use HIP_VISIBLE_DEVICES alone.",
    )


@rule(
    "gfx-override",
    "warn",
    "an architecture that the GPU does not have",
    link="https://rocm.docs.amd.com/projects/ROCR-Runtime/en/latest/environment_variables.html",
)
def gfx_override(case: Case) -> Found | None:
    value = case.environ.get("HSA_OVERRIDE_GFX_VERSION")
    if case.device != "rocm" or value is None:
        return None
    return Found(
        f"HSA_OVERRIDE_GFX_VERSION is {value}",
        "It makes the runtime claim another architecture; kernels and the FP8 dialect then do not fit.",
        "Unset it.",
    )


@rule(
    "service-links",
    "refuse",
    "Kubernetes has put a Service's address into VLLM_PORT",
    rows="F35",
    link=f"{VLLM}/issues/34199",
)
def service_links(case: Case) -> Found | None:
    value = case.environ.get("VLLM_PORT", "")
    if "://" not in value:
        return None
    return Found(
        f"VLLM_PORT is {value!r}",
        "A Service named vllm makes Kubernetes inject it, and vLLM stops with `appears to be a URI`.",
        "Set enableServiceLinks: false in the pod, or name the Service differently.",
    )


@rule(
    "gone-variables",
    "refuse",
    "variables that vLLM no longer knows",
    link=f"{VLLM}/blob/v0.32.0/vllm/envs.py",
)
def gone_variables(case: Case) -> Found | None:
    found = [name for name in GONE if name in case.environ]
    if not found or not case.on("fail-on-environ-validation"):
        return None
    return Found(
        f"{', '.join(found)} in your environment",
        "vLLM has dropped the name, and with --fail-on-environ-validation it stops on names that it does not know.",
        f"unset {' '.join(found)}; use {GONE[found[0]]}.",
    )


@rule(
    "dev-mode",
    "warn",
    "endpoints that must not be open",
    link=f"{VLLM}/blob/v0.32.0/vllm/envs.py",
)
def dev_mode(case: Case) -> Found | None:
    if not _is_on(case.environ.get("VLLM_SERVER_DEV_MODE")):
        return None
    return Found(
        "VLLM_SERVER_DEV_MODE is on",
        "Anybody who reaches the port can put the server to sleep and run code in its workers (/collective_rpc).",
        "Unset it.",
    )


@rule(
    "caches-writable",
    "set",
    "caches on a volume that cannot be written",
    rows="W34",
    link="https://github.com/llm-d/llm-d/issues/1430",
)
def caches_writable(case: Case) -> Found | None:
    if not case.unwritable:
        return None
    found = [f"{name}={case.environ.get(name, '')} -> {path}" for name, path in case.unwritable.items()]
    changes: list[Change] = [change_env(name, path) for name, path in case.unwritable.items()]
    changes += [change_env(name, "1") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return Found(
        ", ".join(found),
        "The model volume is read-only, and downloads and compiled kernels have to be written somewhere.",
        "Give the caches a writable volume of their own.",
        tuple(changes),
    )


def _force_off(case: Case, name: str, why: str) -> Found | None:
    value = case.variable(name)
    if not case.gfx942 or value == "0":
        return None
    return Found(f"{name} {value or '(unset)'} -> 0", why, "Leave it to the plan.", (change_env(name, "0"),))


def _is_on(value: str | None) -> bool:
    """As vLLM reads its switches: 1 or true."""
    return (value or "0").strip().lower() in ("1", "true")
