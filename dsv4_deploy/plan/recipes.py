"""The plan's own choices: environment and flags for the CPU and for gfx942, each with its reason.

In: what is to be served on what. Out: `Setting`s. Values marked "recipe" are starting points for gfx942 from
public runs; no AMD hardware was at hand to confirm them. Flags and variables: vllm/engine/arg_utils.py and
vllm/envs.py in https://github.com/vllm-project/vllm/tree/v0.32.0; AMD settings:
https://github.com/vllm-project/recipes/pull/830, https://github.com/vllm-project/vllm/issues/57079
"""

from __future__ import annotations

from dsv4_deploy.catalog import Traits, releases
from dsv4_deploy.plan.profiles import Limits
from dsv4_deploy.plan.rules import PLUGIN
from dsv4_deploy.plan.settings import Setting

# Long enough for a short answer to be finished, short enough that nobody gives up on `down`.
CPU_SHUTDOWN_TIMEOUT_S = 30
ROCM_SHUTDOWN_TIMEOUT_S = 90
CPU_READY_TIMEOUT_S = 600
ROCM_READY_TIMEOUT_S = 3600
# Pro stood still for an hour on shared storage: https://github.com/vllm-project/vllm/issues/40988
ROCM_READY_TIMEOUT_LARGE_S = 10800
CPU_KV_GIB = 1
# A pool of 26 GB ran with Flash on one MI300X, one of 30 GB died in graph capture:
# https://github.com/Vercantez/deepseek-v4-flash-mi300x
SINGLE_CARD_KV_BYTES = 26_000_000_000


def parser_of(traits: Traits) -> str:
    """The name of tokenizer mode, reasoning parser and tool parser."""
    return "deepseek_v41" if traits.model_type == "deepseek_v41" else "deepseek_v4"


def common_env() -> list[Setting]:
    """Variables for every device."""
    return [
        Setting("VLLM_PLUGINS", PLUGIN, "load this bundle's patches and no other plugin"),
        Setting("VLLM_NO_USAGE_STATS", "1", "nothing is reported to anybody"),
        Setting("DO_NOT_TRACK", "1", "same"),
    ]


def offline_env() -> list[Setting]:
    """Variables for a model that is a local directory."""
    return [
        Setting("HF_HUB_OFFLINE", "1", "the model is a local directory: nothing is to be downloaded"),
        Setting("TRANSFORMERS_OFFLINE", "1", "same, for the tokenizer and the configuration"),
    ]


def supervision_flags() -> list[Setting]:
    """What the supervisor needs of vLLM."""
    return [
        # rocm_patches/admission.py
        Setting(
            "middleware",
            "rocm_patches.admission.Admission",
            "counts requests, and refuses new ones while the server drains; vLLM would answer them with HTTP 500",
        ),
        Setting(
            "disable-access-log-for-endpoints",
            "/health,/metrics",
            "the supervisor asks for them every two seconds: 86,400 lines of log a day",
        ),
    ]


def model_flags(traits: Traits) -> list[Setting]:
    """Flags that follow from the model's generation."""
    name = parser_of(traits)
    flags = [
        Setting(
            "tokenizer-mode",
            name,
            "the checkpoint has no chat template; vLLM's own encoder builds the prompt",
        ),
        Setting("reasoning-parser", name, "separates the thinking from the answer"),
        Setting("tool-call-parser", name, "reads the model's tool calls"),
        Setting("enable-auto-tool-choice", True, "lets requests use tools"),
    ]
    if traits.model_type == "deepseek_v41":
        flags.append(
            Setting("language-model-only", True, "recipe: V4.1 without its vision part (InferenceX#3246)")
        )
    return flags


def cpu_env() -> list[Setting]:
    """Variables of the no-GPU mode."""
    return [
        *common_env(),
        Setting(
            "VLLM_CPU_KVCACHE_SPACE",
            str(CPU_KV_GIB),
            "GiB of memory for the KV cache; holds tens of thousands of tokens of the tiny model",
        ),
        Setting(
            "VLLM_CPU_OMP_THREADS_BIND",
            "nobind",
            "pinning threads to cores collides with everything else on a shared machine",
        ),
        Setting("OMP_NUM_THREADS", "1", "more threads only spin against each other at this size"),
        Setting(
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
            "1",
            "vLLM 0.32's CPU workers never end by themselves; by default it waits 5 s before it ends them",
        ),
    ]


def cpu_flags(tp: int) -> list[Setting]:
    """Flags of the no-GPU mode."""
    flags = [
        Setting("max-num-seqs", "8", "a CPU gains nothing from larger batches"),
        Setting(
            "enforce-eager",
            True,
            "the reference operators are plain torch; there is nothing to capture or compile",
        ),
        Setting(
            "shutdown-timeout",
            str(CPU_SHUTDOWN_TIMEOUT_S),
            "seconds for running requests to finish when the server is stopped",
        ),
    ]
    if tp > 1:
        flags.append(Setting("distributed-executor-backend", "mp", "the ranks are processes on this host"))
    return flags


def rocm_env(large: bool, traits: Traits) -> list[Setting]:
    """Variables on gfx942. `large` is for checkpoints of several hundred gigabytes."""
    ready = ROCM_READY_TIMEOUT_LARGE_S if large else ROCM_READY_TIMEOUT_S
    env = [
        *common_env(),
        Setting("VLLM_ROCM_USE_AITER", "1", "the sparse indexer refuses to start on gfx942 without AITER"),
        Setting(
            "VLLM_ROCM_USE_AITER_FP8BMM",
            "0",
            "its kernels exist for gfx950 only; older defaults crashed MI300X (vllm#34641)",
        ),
        Setting("VLLM_ROCM_USE_AITER_FP4BMM", "0", "same"),
        Setting(
            "VLLM_USE_BREAKABLE_CUDAGRAPH",
            "0",
            "where it switched itself on it cost a third of the speed (vllm#49370)",
        ),
        Setting(
            "VLLM_ENGINE_READY_TIMEOUT_S",
            str(ready),
            "loading and AITER's first compilation take longer than vLLM's 600 s",
        ),
        Setting(
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
            "1800",
            "AITER compiles inside the first request while its cache is cold",
        ),
        Setting(
            "HSA_NO_SCRATCH_RECLAIM",
            "1",
            "as in AMD's base image: distributed start-up dies without it on gfx942",
        ),
        Setting(
            "HIP_FORCE_DEV_KERNARG",
            "1",
            "AMD's serving profile: kernel arguments in device memory, lower launch latency",
        ),
        Setting("NCCL_MIN_NCHANNELS", "112", "AMD's serving profile for xGMI-connected GPUs"),
        Setting("TORCH_BLAS_PREFER_HIPBLASLT", "1", "AMD's serving profile"),
        Setting("OMP_NUM_THREADS", "1", "one rank per GPU: CPU threads would only compete"),
        Setting("AITER_TRITON_LOG_LEVEL", "ERROR", "a warning per call would flood the log"),
    ]
    if traits.expert_dtype == "fp8":
        env.append(Setting("AITER_ENABLE_VSKIP", "0", "its FP8 expert kernel faults under load (aiter#1143)"))
    return env


def rocm_flags(
    limits: Limits, utilization: str, kv_bytes: int | None, moe: Setting | None, *, prefetch: bool
) -> list[Setting]:
    """Flags on gfx942. With `kv_bytes` the pool has that size whatever `utilization` says."""
    flags = [
        Setting(
            "distributed-executor-backend",
            "mp",
            "gives every step a deadline, so that a hung GPU ends the process",
        ),
        Setting("gpu-memory-utilization", utilization, "recipe: graphs need several GiB outside the pool")
        if kv_bytes is None
        else Setting(
            "kv-cache-memory-bytes",
            str(kv_bytes),
            "recipe: one card holds Flash and this much cache; a share of memory would leave none",
        ),
        Setting(
            "max-num-seqs",
            str(limits.max_num_seqs),
            "recipe: vLLM's default of 1024 overruns memory",
        ),
        Setting(
            "max-num-batched-tokens",
            str(limits.max_num_batched_tokens),
            "recipe: the default of 16384 costs KV memory per request and large buffers",
        ),
        Setting(
            "compilation-config",
            '{"cudagraph_mode":"FULL_DECODE_ONLY"}',
            "what vLLM falls back to anyway for this model",
        ),
        Setting(
            "default-chat-template-kwargs",
            '{"thinking":true}',
            "vLLM's default since 0.29, written out: benchmarks without thinking score far lower; requests may differ",
        ),
        Setting(
            "shutdown-timeout",
            str(ROCM_SHUTDOWN_TIMEOUT_S),
            "seconds for running requests and GPU teardown when stopped",
        ),
        Setting(
            "fail-on-environ-validation", True, "a mistyped VLLM_ variable is an error, not a silent no-op"
        ),
    ]
    if prefetch:
        flags.append(
            Setting(
                "safetensors-load-strategy",
                "prefetch",
                "memory holds the checkpoint: many ranks reading the same shards stood still for an hour (vllm#40988)",
            )
        )
    if moe:
        flags.append(moe)
    return flags


def moe_setting(family: str, traits: Traits, tp: int, dp: int, vllm: str) -> Setting | None:
    """The expert kernel, None where vLLM's own choice is right."""
    if traits.expert_dtype != "fp4":
        return None
    aiter = releases().has("a16w4_hash_routing", vllm) and dp == 1
    if family == "pro" and tp >= 8:
        return Setting(
            "moe-backend",
            "triton_unfused",
            "aiter would pad the experts of Pro to 512 and cost a third more memory",
        )
    if aiter:
        return Setting(
            "moe-backend",
            "aiter",
            "twice the decode speed; from vLLM 0.33 it accepts DeepSeek-V4 on gfx942",
        )
    if family == "pro" or dp > 1:
        return Setting("moe-backend", "triton_unfused", "what works on gfx942 in every layout")
    return None
