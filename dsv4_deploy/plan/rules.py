"""What is refused before anything is started. One function per rule, listed in RULES.

A rule takes the Case and returns a Refusal, or None when it has nothing against it. To add one: write the
function, list it, add its test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from dsv4_deploy.catalog import Dims
from dsv4_deploy.facts.host import describe

# The FP8 weights carry one scale per 128 x 128 block; a rank's share must be whole blocks. vLLM raises on it
# while building the model: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/fp8.py
FP8_BLOCK = 128

# The no-GPU mode computes with readable reference code. Beyond this a single token would take minutes.
CPU_MAX_WEIGHT_BYTES = 8 * 2**30

# vLLM's cache block for this model; the request that `up` checks with needs about half of it.
MIN_MODEL_LEN = 256

PLUGIN = "rocm_patches"


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a rule may look at. `gpus` is None where the GPUs are not known (a dry run on another
    machine)."""

    device: Literal["cpu", "rocm"]
    model: str
    dims: Dims
    weight_bytes: int
    tp: int
    max_model_len: int
    gpus: tuple[str, ...] | None
    environ: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A rule's verdict: `rule` is its id, the others are sentences for the operator."""

    rule: str
    what: str
    why: str
    fix: str


def legal_tp(dims: Dims) -> tuple[int, ...]:
    """The tensor-parallel sizes that this model can be split into, ascending.

    Heads, output groups and routed experts must divide, and every FP8 dimension that is split must stay
    whole blocks per rank.
    """
    split_fp8 = (
        dims.num_attention_heads * dims.head_dim,
        dims.o_groups * dims.o_lora_rank,
        dims.n_shared_experts * dims.moe_intermediate_size,
    )
    counts = (dims.num_attention_heads, dims.o_groups, dims.n_routed_experts)
    return tuple(
        tp
        for tp in range(1, dims.num_attention_heads + 1)
        if all(count % tp == 0 for count in counts)
        and all(size % (tp * FP8_BLOCK) == 0 for size in split_fp8)
    )


def cpu_is_for_small_models(case: Case) -> Refusal | None:
    if case.device != "cpu" or case.weight_bytes <= CPU_MAX_WEIGHT_BYTES:
        return None
    return Refusal(
        "cpu-small-models",
        f"{case.model} is too large for the no-GPU mode ({case.weight_bytes / 1e9:.0f} GB of weights)",
        "Without a GPU the bundle computes with readable reference operators that are meant for a tiny "
        "model; a real one would take minutes per token, if it fitted into memory.",
        "Leave --model out to serve the tiny model, or run on AMD GPUs.",
    )


def tp_divides_the_model(case: Case) -> Refusal | None:
    legal = legal_tp(case.dims)
    if case.tp in legal:
        return None
    return Refusal(
        "tp-divides",
        f"{case.model} cannot be split over {case.tp} ranks",
        f"The {case.dims.num_attention_heads} heads, {case.dims.o_groups} output groups and "
        f"{case.dims.n_routed_experts} experts must divide evenly, and each rank's share of an FP8 matrix "
        f"must be a multiple of {FP8_BLOCK}.",
        f"Use --tp {_either(legal)}."
        if legal
        else "No size works: use a checkpoint of the published layout.",
    )


def rocm_needs_gpus(case: Case) -> Refusal | None:
    if case.device != "rocm" or case.gpus is None or len(case.gpus) >= case.tp:
        return None
    if not case.gpus:
        return Refusal(
            "rocm-needs-gpus",
            "--device rocm, but no AMD GPU is visible here",
            "The kernel driver lists none under /sys/class/kfd/kfd/topology/nodes (no amdgpu driver, or a "
            "container without the devices /dev/kfd and /dev/dri).",
            "Give the devices to the container, or use --device cpu (the tiny model).",
        )
    fitting = [tp for tp in legal_tp(case.dims) if tp <= len(case.gpus)]
    return Refusal(
        "rocm-needs-gpus",
        f"--tp {case.tp} needs {case.tp} GPUs, and this host shows {describe(case.gpus)}",
        "vLLM runs one tensor-parallel rank per GPU.",
        f"Use --tp {_either(fitting)}.",
    )


def length_is_possible(case: Case) -> Refusal | None:
    longest = case.dims.max_position_embeddings
    if MIN_MODEL_LEN <= case.max_model_len <= longest:
        return None
    return Refusal(
        "max-model-len",
        f"--max-model-len {case.max_model_len} is not possible with {case.model}",
        f"The model was made for up to {longest} tokens, and below {MIN_MODEL_LEN} there is no room for the "
        "request that `up` checks.",
        f"Use a length from {MIN_MODEL_LEN} to {longest}.",
    )


def plugin_is_allowed(case: Case) -> Refusal | None:
    allowed = case.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return None
    return Refusal(
        "plugin-allowed",
        f"VLLM_PLUGINS in your environment is {allowed!r}, which leaves out {PLUGIN}",
        f"vLLM loads only the plugins listed there, and DeepSeek-V4 does not run without {PLUGIN}.",
        f"unset VLLM_PLUGINS, or add {PLUGIN} to the list.",
    )


RULES: tuple[Callable[[Case], Refusal | None], ...] = (
    cpu_is_for_small_models,
    tp_divides_the_model,
    rocm_needs_gpus,
    length_is_possible,
    plugin_is_allowed,
)


def first_refusal(case: Case) -> Refusal | None:
    """The first rule that refuses the case, in the order of RULES; None when all agree."""
    return next((refusal for rule in RULES if (refusal := rule(case))), None)


def _either(sizes: tuple[int, ...] | list[int]) -> str:
    texts = [str(size) for size in sizes]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
