"""Rules about memory: whether weights and cache fit, and the limits that follow from the cache."""

from __future__ import annotations

import dataclasses

from dsv4_deploy.plan import memory as memory_plan
from dsv4_deploy.plan.memory import GIB, Layout, Memory
from dsv4_deploy.plan.rules.base import Case, Found, change_flag, either, rule
from dsv4_deploy.plan.rules.hardware import VLLM, legal_tp

# Above this, loading ran out of memory: https://github.com/SemiAnalysisAI/InferenceX/pull/1461
MAX_UTILIZATION = 0.92
SMALL_CARD_BYTES = 230 * 10**9
LONG_CONTEXT = 524_288
LONG_CONTEXT_BATCH = 8192


@rule(
    "memory-utilization",
    "set",
    "a share of memory that leaves no room for graphs and loading",
    rows="F10 F60 W16",
    link="https://github.com/SemiAnalysisAI/InferenceX/pull/1461",
)
def memory_utilization(case: Case) -> Found | None:
    wanted = _utilization(case)
    if case.device != "rocm" or wanted is None or wanted <= MAX_UTILIZATION:
        return None
    small = case.card is None or case.card.hbm_bytes < SMALL_CARD_BYTES
    value = "0.85" if case.family == "flash" and small else "0.90"
    return Found(
        f"--gpu-memory-utilization {case.text('gpu-memory-utilization')} -> {value}",
        "Loading needs more than it keeps and graphs need several GiB outside the pool; above 0.92 starts ran out "
        "of memory, with tensor, expert and data parallelism alike.",
        f"Use {value}.",
        (change_flag("gpu-memory-utilization", value),),
    )


@rule(
    "batched-tokens-long-context",
    "set",
    "large batches at a very long context cost gigabytes of buffers",
    rows="F45",
    link=f"{VLLM}/issues/45663",
)
def batched_tokens_long_context(case: Case) -> Found | None:
    batch = case.number("max-num-batched-tokens", memory_plan.DEFAULT_MAX_NUM_BATCHED_TOKENS)
    if case.device != "rocm" or case.max_model_len < LONG_CONTEXT or batch <= LONG_CONTEXT_BATCH:
        return None
    return Found(
        f"--max-num-batched-tokens {batch} -> {LONG_CONTEXT_BATCH} at --max-model-len {case.max_model_len}",
        "Index buffers grow with batched tokens times length, and each request reserves cache for two batches.",
        f"Use {LONG_CONTEXT_BATCH} or less.",
        (change_flag("max-num-batched-tokens", str(LONG_CONTEXT_BATCH)),),
    )


@rule(
    "weights-fit",
    "refuse",
    "the weights of one rank must fit the card",
    rows="F06 F60 W04",
    link=f"{VLLM}/pull/40871",
    after_memory=True,
)
def weights_fit(case: Case) -> Found | None:
    found = case.memory
    if found is None or found.layout.card is None:
        return None
    layout, card = found.layout, found.layout.card
    room = layout.hbm_bytes if layout.kv_bytes else layout.hbm_bytes * layout.utilization
    if found.load < room:
        return None
    how = f"--data-parallel-size {layout.dp}, --tp {layout.tp}" if layout.dp > 1 else f"--tp {layout.tp}"
    repeats = (
        "Data parallelism repeats the dense weights on every GPU"
        + (
            ", also with expert parallelism. "
            if layout.ep
            else ", and without --enable-expert-parallel all of them. "
        )
        if layout.dp > 1
        else ""
    )
    return Found(
        f"{case.model} with {how} needs {found.load / GIB:.0f} GiB per GPU for weights alone, and "
        f"{card.name} has {card.hbm_bytes / GIB:.0f} GiB",
        f"{repeats}At most {room / GIB:.0f} GiB of a card may be planned (--gpu-memory-utilization).",
        _sizes_that_fit(case, layout),
    )


@rule(
    "data-parallel-pro",
    "refuse",
    "Pro with data parallelism on cards of the 192 GB class",
    rows="F06 W04",
    link=f"{VLLM}/pull/40871",
    after_memory=True,
)
def data_parallel_pro(case: Case) -> Found | None:
    found = case.memory
    if found is None or found.layout.card is None or case.family != "pro" or found.layout.dp < 2:
        return None
    layout, card = found.layout, found.layout.card
    if card.hbm_bytes >= SMALL_CARD_BYTES or weights_fit.check(case) is not None:
        return None
    return Found(
        f"{case.model} with --data-parallel-size {layout.dp} holds {found.load / GIB:.0f} GiB of weights per GPU, "
        f"{card.name} has {card.hbm_bytes / GIB:.0f} GiB",
        "Data parallelism repeats the dense weights on every GPU, and no such start of Pro has been reported to work "
        "on gfx942.",
        _sizes_that_fit(case, layout),
    )


@rule(
    "cache-fits",
    "refuse",
    "the cache must hold one request of the full length",
    rows="F09 W15",
    link="https://github.com/Vercantez/deepseek-v4-flash-mi300x",
    after_memory=True,
)
def cache_fits(case: Case) -> Found | None:
    found = case.memory
    if found is None or found.layout.card is None or found.fits or weights_fit.check(case) is not None:
        return None
    layout, card = found.layout, found.layout.card
    if layout.kv_bytes is not None and found.free < 0:
        spare = (found.pool + found.free) / 1e9
        return Found(
            f"--kv-cache-memory-bytes {layout.kv_bytes} leaves {(card.hbm_bytes - found.load - found.pool) / 1e9:.1f} "
            f"GB of {card.name} for everything else, which needs {(found.used - found.load - found.pool) / 1e9:.1f}",
            "It would load and then die while it captures graphs (HSA_STATUS_ERROR_OUT_OF_RESOURCES).",
            f"Use at most {int(spare)} GB: --set kv-cache-memory-bytes={int(spare) * 10**9}."
            if spare >= 1
            else "Use more ranks (--tp).",
        )
    if found.request_blocks is None or found.block_bytes is None or found.pool <= 0:
        return Found(
            f"no memory is left for the cache: {found.pool / GIB:.2f} GiB of {card.name} at --max-model-len "
            f"{layout.max_model_len} and --max-num-batched-tokens {layout.max_num_batched_tokens}",
            "Weights and buffers of a rank take the whole share that vLLM may use.",
            _sizes_that_fit(case, layout),
        )
    needed = (found.request_blocks + 1) * found.block_bytes
    advice = []
    batch = memory_plan.smaller_batches(layout)
    if batch:
        advice.append(f"--set max-num-batched-tokens={batch} makes this length fit")
    if found.longest:
        advice.append(f"the longest that fits as it is is --max-model-len {found.longest}")
    advice.append(
        f"for {layout.max_model_len} as it is the pool must be {needed / 1e9:.1f} GB "
        "(more memory utilisation or another card)"
    )
    return Found(
        f"--max-model-len {layout.max_model_len} needs {needed / 1e9:.1f} GB of cache for one request, and the pool "
        f"has {found.pool / 1e9:.1f} GB",
        f"A request reserves {found.request_blocks} blocks of {found.block_bytes / 1e6:.2f} MB: {found.fixed_blocks} "
        f"for --max-num-batched-tokens {layout.max_num_batched_tokens} in flight, the others for its length. More "
        "tensor-parallel ranks add no tokens: each holds the whole cache.",
        f"{'; '.join(advice).capitalize()}.",
    )


@rule(
    "max-num-seqs",
    "set",
    "more sequences than the cache holds",
    rows="F46 W50",
    link="https://github.com/SemiAnalysisAI/InferenceX/pull/2194",
    after_memory=True,
)
def max_num_seqs(case: Case) -> Found | None:
    wanted = case.number("max-num-seqs", memory_plan.DEFAULT_MAX_NUM_SEQS)
    if case.memory is None or case.device != "rocm" or wanted <= case.memory.sequences:
        return None
    mean = case.memory.layout.max_model_len // memory_plan.MEAN_LENGTH_SHARE
    return Found(
        f"--max-num-seqs {wanted} -> {case.memory.sequences}",
        f"The cache holds {case.memory.sequences} sequences of {mean} tokens (a quarter of max-model-len); more are "
        "preempted and computed again, and servers were killed under such loads.",
        "A shorter --max-model-len allows more.",
        (change_flag("max-num-seqs", str(case.memory.sequences)),),
    )


@rule(
    "expert-padding",
    "warn",
    "experts are stored wider than they are",
    rows="F24",
    link=f"{VLLM}/pull/51473",
    after_memory=True,
)
def expert_padding(case: Case) -> Found | None:
    found = case.memory
    if found is None or case.device != "rocm" or found.layout.measured or found.layout.padding <= 1.0:
        return None
    width = case.dims.moe_intermediate_size // case.tp
    padded = round(width * found.layout.padding)
    return Found(
        f"each rank's experts are {width} wide and stored as {padded} (--moe-backend "
        f"{case.text('moe-backend') or 'auto'}, vLLM {case.vllm})",
        f"That is {found.layout.padding - 1:.0%} more expert memory and idle work; the memory table counts it.",
        "Use --set moe-backend=triton_unfused with vLLM 0.32 or newer, or another --tp.",
    )


def _utilization(case: Case) -> float | None:
    try:
        return float(case.text("gpu-memory-utilization") or "")
    except ValueError:
        return None


def _sizes_that_fit(case: Case, layout: Layout) -> str:
    """The tensor-parallel sizes with which the model fits that card, in words."""
    fitting = [tp for tp in legal_tp(case.dims, case.traits.fp8_block) if _with_tp(layout, tp).fits]
    if not fitting:
        return "No tensor-parallel size fits this card; use cards with more memory or a smaller model."
    return f"Use --tp {either(fitting)} without data parallelism on this card."


def _with_tp(layout: Layout, tp: int) -> Memory:
    shorter = dataclasses.replace(
        layout,
        tp=tp,
        dp=1,
        ep=False,
        max_model_len=min(layout.max_model_len, 32_768),
        max_num_batched_tokens=2048,
    )
    return memory_plan.plan(shorter)
