"""make_plan: what was asked for and what is here become vLLM's environment and command line, with reasons.

In: a ServingSpec and Facts. Out: a Plan; the same input always gives the same Plan. Nothing is read or
started here. Values marked "recipe" are starting points for gfx942 from public runs; no AMD hardware was at
hand to confirm them. Flags and variables: vllm/engine/arg_utils.py and vllm/envs.py in
https://github.com/vllm-project/vllm/tree/v0.32.0; AMD settings:
https://github.com/vllm-project/recipes/pull/830, https://github.com/vllm-project/vllm/issues/57079
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from dsv4_deploy import catalog
from dsv4_deploy.errors import refused
from dsv4_deploy.facts.checkpoint import Checkpoint
from dsv4_deploy.facts.host import describe
from dsv4_deploy.plan import rules
from dsv4_deploy.spec import ServingSpec

TINY = "tiny"
ROCM_DEFAULT_MODEL = "deepseek-v4-flash"
ROCM_DEFAULT_VLLM = "0.33.0"

# Long enough for a short answer to be finished, short enough that nobody gives up on `down`.
CPU_SHUTDOWN_TIMEOUT_S = 30
ROCM_SHUTDOWN_TIMEOUT_S = 90
CPU_READY_TIMEOUT_S = 600
ROCM_READY_TIMEOUT_S = 3600
ROCM_READY_TIMEOUT_LARGE_S = 7200
# From here on the figures of the Pro recipes hold: over an hour of loading, smaller batches.
LARGE_WEIGHT_BYTES = 400 * 10**9


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about this machine and the model.

    `gpus`: architecture names, None when planning for another machine. `vllm_version`: public version of the
    vLLM that will run, None if there is none here. `checkpoint`: what `facts.checkpoint.read` found, None
    for a model that vLLM downloads by its repo id or that is still to be made in `tiny_directory`.
    `environ`: the operator's environment, whose values win over ours.
    """

    gpus: tuple[str, ...] | None
    vllm_version: str | None
    checkpoint: Checkpoint | None
    tiny_directory: pathlib.Path
    environ: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One environment variable or flag. `value` True is a flag without a value; `theirs` marks a variable
    that the operator had set otherwise, and which stays so."""

    name: str
    value: str | Literal[True]
    reason: str
    theirs: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that starting the server needs. `model` is what vLLM loads, `served_name` what clients call
    it.

    `ready_timeout_s` and `shutdown_timeout_s` are in seconds. `note` is one line for people: what was chosen
    and why.
    """

    device: Literal["cpu", "rocm"]
    model: str
    served_name: str
    tp: int
    host: str
    port: int
    env: tuple[Setting, ...]
    flags: tuple[Setting, ...]
    ready_timeout_s: int
    shutdown_timeout_s: int
    note: str

    @property
    def argv(self) -> list[str]:
        """The arguments after the launcher: `serve MODEL --flag value ...`."""
        argv = ["serve", self.model]
        for flag in self.flags:
            if flag.value is True:
                argv.append(f"--{flag.name}")
            elif flag.value.startswith("-"):
                argv.append(f"--{flag.name}={flag.value}")
            else:
                argv += [f"--{flag.name}", flag.value]
        return argv

    @property
    def from_environment(self) -> list[Setting]:
        """The variables where the operator's own value replaces ours."""
        return [setting for setting in self.env if setting.theirs]

    @property
    def environment(self) -> dict[str, str]:
        """The variables to add to the inherited environment."""
        return {setting.name: str(setting.value) for setting in self.env}

    def digest(self, launcher: Sequence[str]) -> str:
        """A fingerprint of what would run: two plans with the same digest start the same server."""
        content = json.dumps([list(launcher), self.argv, sorted(self.environment.items())])
        return hashlib.sha256(content.encode()).hexdigest()


def choose_device(spec: ServingSpec, gpus: Sequence[str]) -> tuple[Literal["cpu", "rocm"], str]:
    """The device to serve on, and the plain line that says why."""
    if spec.device == "cpu":
        return "cpu", "Serving on the CPU, as asked"
    if spec.device == "rocm":
        return "rocm", "Serving on AMD GPUs, as asked"
    if gpus:
        return "rocm", f"Serving on the AMD GPUs of this host ({describe(gpus)})"
    return "cpu", "No AMD GPU here: serving on the CPU"


def default_model(device: Literal["cpu", "rocm"]) -> str:
    """The model that is served when nobody names one."""
    return TINY if device == "cpu" else ROCM_DEFAULT_MODEL


def make_plan(spec: ServingSpec, facts: Facts) -> Plan:
    """Decide everything about one deployment.

    Raises DeployError (exit code 2) when the model is unknown or a rule refuses the combination.
    """
    device, note = choose_device(spec, facts.gpus or ())
    name = spec.model or default_model(device)
    if facts.checkpoint is not None:
        model, served_name = str(facts.checkpoint.directory), facts.checkpoint.directory.name
        dims, weight_bytes = facts.checkpoint.dims, facts.checkpoint.weight_bytes
        default_tp, default_len = _defaults_for(device, dims)
        local = True
    else:
        entry = catalog.find_model(name)
        local = entry.repo is None
        model = str(facts.tiny_directory) if entry.repo is None else entry.repo
        served_name = name
        dims, weight_bytes = entry.dims, entry.weight_bytes
        default_tp, default_len = entry.default_tp, entry.default_max_model_len
    tp = spec.tp or _default_tp(device, dims, default_tp, facts.gpus)
    max_model_len = spec.max_model_len or min(default_len, dims.max_position_embeddings)
    refusal = rules.first_refusal(
        rules.Case(device, name, dims, weight_bytes, tp, max_model_len, facts.gpus, facts.environ)
    )
    if refusal:
        raise refused(refusal.what, why=refusal.why, fix=f"{refusal.fix} (rule {refusal.rule})")

    large = weight_bytes > LARGE_WEIGHT_BYTES
    if device == "cpu":
        env = _cpu_env()
        flags = _cpu_flags(tp)
        ready = CPU_READY_TIMEOUT_S
    else:
        env = _rocm_env(large)
        flags = _rocm_flags(large, facts.vllm_version or ROCM_DEFAULT_VLLM)
        ready = ROCM_READY_TIMEOUT_LARGE_S if large else ROCM_READY_TIMEOUT_S
    if local:
        env += [
            Setting("HF_HUB_OFFLINE", "1", "the model is a local directory: nothing is to be downloaded"),
            Setting("TRANSFORMERS_OFFLINE", "1", "same, for the tokenizer and the configuration"),
        ]
    flags = [
        Setting("host", spec.host, "the address to listen on (--host)"),
        Setting("port", str(spec.port), "the port to listen on (--port)"),
        Setting("served-model-name", served_name, "the name that clients use"),
        Setting("tensor-parallel-size", str(tp), "--tp" if spec.tp else f"default for {name} on {device}"),
        Setting(
            "max-model-len",
            str(max_model_len),
            "--max-model-len" if spec.max_model_len else f"default for {name} on {device}",
        ),
        *_common_flags(),
        *flags,
    ]
    flags = _with_overrides(flags, spec.overrides)
    values = {flag.name: flag.value for flag in flags}
    return Plan(
        device=device,
        model=model,
        served_name=_text("served-model-name", values),
        tp=tp,
        host=spec.host,
        port=spec.port,
        env=tuple(_operator_wins(setting, facts.environ) for setting in env),
        flags=tuple(flags),
        ready_timeout_s=ready,
        shutdown_timeout_s=_seconds(_text("shutdown-timeout", values)),
        note=f"{note}, with {_called(name, facts)}, tensor-parallel size {tp}.",
    )


def _called(name: str, facts: Facts) -> str:
    if name == TINY:
        return "the tiny DeepSeek-V4 (random weights: its answers make no sense, everything else is real)"
    return f"the checkpoint in {facts.checkpoint.directory}" if facts.checkpoint else name


def _defaults_for(device: Literal["cpu", "rocm"], dims: catalog.Dims) -> tuple[int, int]:
    """Tensor-parallel size and length for a checkpoint directory: those of the catalog's model with its
    sizes, if any."""
    if device == "cpu":
        return 1, catalog.models()[TINY].default_max_model_len
    for model in catalog.models().values():
        if model.dims == dims:
            return model.default_tp, model.default_max_model_len
    return max(rules.legal_tp(dims), default=1), dims.max_position_embeddings


def _default_tp(
    device: Literal["cpu", "rocm"], dims: catalog.Dims, wanted: int, gpus: tuple[str, ...] | None
) -> int:
    if device == "cpu" or not gpus:
        return wanted
    return max((tp for tp in rules.legal_tp(dims) if tp <= min(wanted, len(gpus))), default=1)


def _cpu_env() -> list[Setting]:
    return [
        *_common_env(),
        Setting(
            "VLLM_CPU_KVCACHE_SPACE",
            "1",
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


def _cpu_flags(tp: int) -> list[Setting]:
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


def _rocm_env(large: bool) -> list[Setting]:
    ready = ROCM_READY_TIMEOUT_LARGE_S if large else ROCM_READY_TIMEOUT_S
    return [
        *_common_env(),
        Setting("VLLM_ROCM_USE_AITER", "1", "the sparse indexer refuses to start on gfx942 without AITER"),
        Setting(
            "VLLM_ROCM_USE_AITER_FP8BMM",
            "0",
            "its kernels exist for gfx950 only; older defaults crashed MI300X (vllm#34641)",
        ),
        Setting("VLLM_ROCM_USE_AITER_FP4BMM", "0", "same"),
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


def _rocm_flags(large: bool, vllm_version: str) -> list[Setting]:
    flags = [
        Setting(
            "distributed-executor-backend",
            "mp",
            "gives every step a deadline, so that a hung GPU ends the process",
        ),
        Setting(
            "gpu-memory-utilization",
            "0.90" if large else "0.85",
            "recipe: graphs need several GiB outside the pool",
        ),
        Setting("max-num-seqs", "32" if large else "256", "recipe: vLLM's default of 1024 overruns memory"),
        Setting(
            "max-num-batched-tokens",
            "8192",
            "recipe: the default of 16384 costs KV memory per request and large buffers",
        ),
        Setting(
            "compilation-config",
            '{"cudagraph_mode":"FULL_DECODE_ONLY"}',
            "what vLLM falls back to anyway for this model",
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
    if not large and _release(vllm_version) >= (0, 33):
        flags.append(
            Setting(
                "moe-backend",
                "aiter",
                "twice the decode speed; from vLLM 0.33 it accepts DeepSeek-V4 on gfx942",
            )
        )
    if large:
        flags.append(
            Setting(
                "moe-backend",
                "triton_unfused",
                "aiter would pad the experts of Pro to 512 and cost a third more memory",
            )
        )
    return flags


def _common_env() -> list[Setting]:
    return [
        Setting("VLLM_PLUGINS", rules.PLUGIN, "load this bundle's patches and no other plugin"),
        Setting("VLLM_NO_USAGE_STATS", "1", "nothing is reported to anybody"),
        Setting("DO_NOT_TRACK", "1", "same"),
    ]


def _common_flags() -> list[Setting]:
    return [
        Setting(
            "tokenizer-mode",
            "deepseek_v4",
            "the checkpoint has no chat template; vLLM's own encoder builds the prompt",
        ),
        Setting("reasoning-parser", "deepseek_v4", "separates the thinking from the answer"),
        Setting("tool-call-parser", "deepseek_v4", "reads the model's tool calls"),
        Setting("enable-auto-tool-choice", True, "lets requests use tools"),
    ]


def _with_overrides(flags: list[Setting], overrides: Mapping[str, str | bool]) -> list[Setting]:
    """Our flags with the operator's: theirs replace ours of the same name, in place, and new ones follow
    sorted by name."""
    planned = {flag.name: flag for flag in flags}
    for name in sorted(overrides):
        value = overrides[name]
        reason = "set by you (--set)"
        if name in planned:
            was = "on" if planned[name].value is True else planned[name].value
            reason += f"; the plan had {was}"
        planned[name] = (
            Setting(name, value, reason) if value is not False else Setting(f"no-{name}", True, reason)
        )
    return list(planned.values())


def _operator_wins(setting: Setting, environ: Mapping[str, str]) -> Setting:
    theirs = environ.get(setting.name)
    if theirs is None or theirs == setting.value:
        return setting
    reason = f"from your environment; the plan had {setting.value} ({setting.reason})"
    return Setting(setting.name, theirs, reason, theirs=True)


def _text(name: str, values: Mapping[str, str | Literal[True]]) -> str:
    value = values.get(name)
    if isinstance(value, str):
        return value
    raise refused(
        f"--set {name} needs a value that is neither true nor false",
        why="It is not a switch.",
        fix=f"Write --set {name}=VALUE, or leave it out.",
    )


def _seconds(value: str) -> int:
    if value.isascii() and value.isdigit():
        return int(value)
    raise refused(
        f"--set shutdown-timeout={value} is not a number of seconds",
        why="vLLM takes whole seconds, 0 for none.",
        fix="Write --set shutdown-timeout=30.",
    )


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
