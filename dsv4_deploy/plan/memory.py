"""What fits: a deployment's memory on one rank, row by row, and the KV cache that is left.

In: a `Layout` (model, card, parallelism, limits). Out: a `Memory` with one `Row` per use, the pool in blocks
and tokens, the longest possible length and how many sequences make sense. Where a formula or constant was
fitted to a published run, its row says so; tests/plan/test_memory.py holds every published measurement that
it is checked against. No AMD hardware was at hand: nothing here was measured by us on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from dsv4_deploy.catalog import Card, Dims, Draft, Traits, releases
from dsv4_deploy.catalog.model import MeasuredWeights
from dsv4_deploy.plan import kv_cache, weights

GIB = 2**30

# Graphs of Flash at TP1 with DSpark, captured to 3,712 rows: the one published figure, taken for every layout.
# https://github.com/arrogance231/deepseek-v4-flash-ablit-mi300x
GRAPH_BYTES = int(6.47 * GIB)
GRAPH_SOURCE = "https://github.com/arrogance231/deepseek-v4-flash-ablit-mi300x"

# What the runtime takes beside all that is listed: one published start had 11.6 GB for everything but load
# and pool and ran, one had 7.6 GB and did not. https://github.com/Vercantez/deepseek-v4-flash-mi300x
RUNTIME_BYTES = 700 * 10**6
FIT_SOURCE = "https://github.com/Vercantez/deepseek-v4-flash-mi300x"

VLLM_SOURCE = "https://github.com/vllm-project/vllm/tree/v0.33.0/vllm/models/deepseek_v4"

# VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, default of 0.32 and 0.33.
INDEXER_LOGITS_BYTES = 512 * 2**20

# Rotary tables always reach this far, whatever max-model-len says.
DEFAULT_UTILIZATION = 0.92
DEFAULT_MAX_NUM_SEQS = 1024
DEFAULT_MAX_NUM_BATCHED_TOKENS = 16384

LENGTH_STEP = kv_cache.TOKENS_PER_BLOCK
# A deployment that serves lengths up to L mostly sees much shorter ones; it is sized for the mean below.
MEAN_LENGTH_SHARE = 4

Part = Literal["weights", "load", "work", "graphs", "runtime", "kv"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything that decides how much memory a rank uses. `card` is None on the CPU, where only weights and
    pool are counted.

    `draft` is the module that will be loaded (kind "none": speculation is off) and `draft_tokens` how many
    tokens it proposes. `kv_bytes` is --kv-cache-memory-bytes, which replaces utilisation. `experts_multiple`
    is what the MoE backend rounds a rank's expert width up to.
    """

    dims: Dims
    traits: Traits
    card: Card | None
    vllm: str
    tp: int
    max_model_len: int
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    dp: int = 1
    pp: int = 1
    ep: bool = False
    experts_multiple: int = 128
    draft: Draft = dataclasses.field(default_factory=Draft)
    draft_tokens: int = 0
    utilization: float = DEFAULT_UTILIZATION
    kv_bytes: int | None = None
    eager: bool = False
    asynchronous: bool = True
    measured: MeasuredWeights | None = None

    @property
    def ocp_weights(self) -> bool:
        """Whether FP8 weights stay as published: no padded rows, no bf16 copy of wo_a."""
        return self.card is None or self.card.fp8 == "ocp"

    @property
    def hbm_bytes(self) -> int:
        """The memory of one card, 0 on the CPU."""
        return self.card.hbm_bytes if self.card else 0

    @property
    def padding(self) -> float:
        """How much wider a rank's experts are stored than they are; 1.0 with expert parallelism."""
        return 1.0 if self.ep else weights.expert_padding(self.dims, self.tp, self.experts_multiple)

    @property
    def engine(self) -> kv_cache.Engine:
        batches = kv_cache.batches_in_flight(self.vllm, pp=self.pp, asynchronous=self.asynchronous)
        return kv_cache.Engine(self.max_model_len, self.max_num_batched_tokens, batches)


@dataclasses.dataclass(frozen=True)
class Row:
    """One use of a rank's memory in bytes. `formula` is for --explain: what was multiplied with what."""

    part: Part
    name: str
    bytes: int
    formula: str
    source: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one rank. All sizes are in bytes.

    `pool` is what the KV cache gets and `blocks` how many blocks that is; both are None where the cache's
    layout is not public (V4.1). `request_blocks` is what vLLM reserves for one request of the full length and
    `fixed_blocks` the part of it that does not depend on length. `longest` is the longest max-model-len that
    fits, `sequences` a sensible --max-num-seqs. `logged_tokens` is what vLLM will print as cache size.
    """

    layout: Layout
    rows: tuple[Row, ...]
    pool: int
    block_bytes: int | None
    blocks: int | None
    request_blocks: int | None
    fixed_blocks: int | None
    longest: int
    sequences: int

    @property
    def used(self) -> int:
        """Everything, the pool included."""
        return sum(row.bytes for row in self.rows)

    @property
    def load(self) -> int:
        """What is there after loading: weights and their tables."""
        return sum(row.bytes for row in self.rows if row.part in ("weights", "load"))

    @property
    def free(self) -> int:
        """What nothing uses; negative when the card is too small. 0 on the CPU."""
        return self.layout.hbm_bytes - self.used if self.layout.card else 0

    @property
    def concurrency(self) -> float:
        """Requests of the full length that fit at once; what vLLM prints as maximum concurrency."""
        if not self.blocks or not self.request_blocks:
            return 0.0
        return self.blocks / self.request_blocks

    @property
    def logged_tokens(self) -> int:
        if not self.blocks or not self.request_blocks:
            return 0
        return kv_cache.logged_tokens(self.blocks, self.request_blocks, self.layout.max_model_len)

    @property
    def token_bytes(self) -> float:
        """Bytes of cache per token of a long text."""
        return (self.block_bytes or 0) / kv_cache.TOKENS_PER_BLOCK

    @property
    def fits(self) -> bool:
        """Whether the server would start: the card holds everything and the pool one request of the full
        length. vLLM keeps one block for itself."""
        if self.free < 0 or self.pool <= 0:
            return False
        if self.blocks is None or self.request_blocks is None:
            return True
        return self.blocks - 1 >= self.request_blocks


def plan(layout: Layout) -> Memory:
    """The memory of one rank of that layout, whether or not it fits."""
    memory = _at(layout)
    return dataclasses.replace(memory, longest=longest(layout), sequences=_sequences(memory))


def longest(layout: Layout) -> int:
    """The longest max-model-len that fits (a multiple of 256 tokens, at most the model's own); 0 if none."""
    most = layout.dims.max_position_embeddings // LENGTH_STEP

    def fits(steps: int) -> bool:
        return _at(dataclasses.replace(layout, max_model_len=steps * LENGTH_STEP)).fits

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * LENGTH_STEP


def smaller_batches(layout: Layout) -> int | None:
    """A --max-num-batched-tokens with which the layout fits, the largest power of two below the present one;
    None if no such size helps."""
    size = 1 << (layout.max_num_batched_tokens - 1).bit_length() >> 1
    while size >= 1024:
        if _at(dataclasses.replace(layout, max_num_batched_tokens=size)).fits:
            return size
        size //= 2
    return None


@functools.lru_cache(maxsize=64)
def model_weights(dims: Dims, traits: Traits) -> tuple[weights.Weights, weights.Weights]:
    """The backbone's and the draft's weights in bytes."""
    return weights.backbone(dims, traits.expert_dtype), weights.draft(dims, traits.draft, traits.expert_dtype)


def _at(layout: Layout) -> Memory:
    """The memory at the layout's own length; `longest` and `sequences` are not worked out."""
    if layout.measured:
        return _measured(layout, layout.measured)
    before = _weight_rows(layout)
    if layout.card is None:
        return _with_pool(layout, before, layout.kv_bytes or 0)
    before += [*_load_rows(layout), *_work_rows(layout)]
    graphs = _graph_row(layout)
    runtime = Row(
        "runtime",
        "runtime and activations",
        RUNTIME_BYTES,
        "a constant; with the rows above it explains the published starts",
        FIT_SOURCE,
    )
    fixed = sum(row.bytes for row in (*before, runtime))
    estimated = releases().has("graph_estimate_rocm", layout.vllm)
    pool = _pool(layout, fixed + (graphs.bytes if estimated else 0))
    return _with_pool(layout, [*before, *([graphs] if graphs.bytes else []), runtime], pool)


def _with_pool(layout: Layout, rows: list[Row], pool: int) -> Memory:
    block = kv_cache.block_bytes(layout.dims, layout.vllm, layout.draft.layers)
    count = kv_cache.blocks(pool, block)
    request = kv_cache.blocks_per_request(layout.dims, layout.engine)
    return Memory(
        layout=layout,
        rows=(*rows, _pool_row(layout, pool)),
        pool=pool,
        block_bytes=block,
        blocks=count,
        request_blocks=request,
        fixed_blocks=request - -(-layout.max_model_len // kv_cache.TOKENS_PER_BLOCK),
        longest=0,
        sequences=0,
    )


def _measured(layout: Layout, fit: MeasuredWeights) -> Memory:
    rows = [
        Row(
            "weights",
            "weights",
            int((fit.split_gib / layout.tp + fit.replicated_gib) * GIB),
            f"{fit.split_gib:g} GiB / TP + {fit.replicated_gib:g} GiB, fitted to published loads",
            fit.source,
        ),
        Row(
            "work",
            "everything else at start-up",
            int(fit.other_gib * GIB),
            f"what one published start lacked ({fit.other_from}); taken for every layout",
            fit.source,
        ),
    ]
    pool = _pool(layout, sum(row.bytes for row in rows))
    return Memory(
        layout=layout,
        rows=(*rows, _pool_row(layout, pool)),
        pool=pool,
        block_bytes=None,
        blocks=None,
        request_blocks=None,
        fixed_blocks=None,
        longest=0,
        sequences=0,
    )


def _pool(layout: Layout, other: int) -> int:
    if layout.kv_bytes is not None:
        return layout.kv_bytes
    return int(layout.utilization * layout.hbm_bytes) - other


def _pool_row(layout: Layout, pool: int) -> Row:
    if layout.card is None:
        formula = "VLLM_CPU_KVCACHE_SPACE"
    elif layout.kv_bytes is not None:
        formula = "--kv-cache-memory-bytes, whatever else there is"
    else:
        formula = f"{layout.utilization:g} x {layout.hbm_bytes / 1e9:.1f} GB - the rows above"
        if not releases().has("graph_estimate_rocm", layout.vllm):
            formula += " without graphs, which this vLLM does not count"
    return Row("kv", "KV cache pool", max(pool, 0), formula, f"{VLLM_SOURCE.rsplit('/', 2)[0]}/v1/worker")


def _weight_rows(layout: Layout) -> list[Row]:
    backbone, module = model_weights(layout.dims, layout.traits)
    rows = []
    for name, part in (("weights", backbone), (f"draft weights ({layout.draft.kind})", module)):
        if part is module and layout.draft.kind == "none":
            continue
        size = weights.per_rank(part, tp=layout.tp, dp=layout.dp, ep=layout.ep, padding=layout.padding)
        experts = (
            f"{part.experts / 1e9:.2f} / {layout.tp * layout.dp} ranks"
            if layout.ep
            else f"{part.experts / 1e9:.2f} x {layout.padding:.3g} / TP {layout.tp}"
        )
        rows.append(
            Row(
                "weights",
                name,
                int(size),
                f"experts {experts} + split {part.split / 1e9:.2f} / TP {layout.tp} "
                f"+ replicated {part.replicated / 1e9:.2f} GB",
                VLLM_SOURCE,
            )
        )
    return rows


def _load_rows(layout: Layout) -> list[Row]:
    dims = layout.dims
    plain = dims.layers(0) > 0 or layout.draft.kind != "none"
    tables = int(plain) + int(any(dims.compress_ratios))
    rope = tables * dims.max_position_embeddings * 64 * 4
    rows = [
        Row(
            "load",
            "rotary tables",
            rope,
            f"{tables} x {dims.max_position_embeddings} positions x 64 x 4 B, whatever max-model-len is",
            VLLM_SOURCE,
        )
    ]
    if layout.ocp_weights:
        return rows
    layers = dims.num_hidden_layers + layout.draft.layers
    width = dims.num_attention_heads * dims.head_dim
    # Rows whose length is a multiple of 512 bytes get 256 more (VLLM_ROCM_FP8_PADDING).
    padded = {
        "wq_b": (layers * width // layout.tp, dims.q_lora_rank),
        "wo_a": (layers * dims.o_groups * dims.o_lora_rank // layout.tp, width // dims.o_groups),
        "indexer": (dims.layers(4) * dims.index_n_heads * dims.index_head_dim, dims.q_lora_rank),
        "shared w2": (
            layers * dims.hidden_size,
            dims.n_shared_experts * dims.moe_intermediate_size // layout.tp,
        ),
        "main_proj": (
            dims.hidden_size if layout.draft.kind == "dspark" else 0,
            3 * dims.hidden_size,
        ),
    }
    lines = sum(count for count, length in padded.values() if length % 512 == 0)
    groups = dims.o_groups / layout.tp
    copy = int(layers * groups * dims.o_lora_rank * (width // dims.o_groups) * 2)
    rows += [
        Row(
            "load",
            "padding of FP8 rows",
            256 * lines,
            f"256 B x {lines} rows whose length is a multiple of 512 B (VLLM_ROCM_FP8_PADDING)",
            VLLM_SOURCE,
        ),
        Row(
            "work",
            "bf16 copy of wo_a",
            copy,
            f"{layers} layers x {groups:g} groups x {dims.o_lora_rank} x {width // dims.o_groups} x 2 B, "
            "made at the first forward pass",
            VLLM_SOURCE,
        ),
    ]
    return rows


def _work_rows(layout: Layout) -> list[Row]:
    dims, length, batch = layout.dims, layout.max_model_len, layout.max_num_batched_tokens
    csa, hca = dims.layers(4), dims.layers(128)
    rows = []
    if hca:
        entries = (length + 128 * 128 - 1) // (128 * 128) * 128
        rows.append(
            Row(
                "work",
                "HCA index buffers",
                3 * batch * entries * 4,
                f"3 x {batch} batched tokens x {entries} entries x 4 B",
                VLLM_SOURCE,
            )
        )
        rows.append(
            Row(
                "work",
                "HCA scratch",
                hca * batch * 2048,
                f"{hca} layers x {batch} batched tokens x 2 KiB",
                VLLM_SOURCE,
            )
        )
    if csa:
        rows.append(_largest_workspace(layout))
    if layout.draft.kind != "none":
        rows.append(
            Row(
                "work",
                "draft's hidden states",
                batch * dims.hc_mult * dims.hidden_size * 2,
                f"{batch} batched tokens x {dims.hc_mult} x {dims.hidden_size} x 2 B",
                VLLM_SOURCE,
            )
        )
    return rows


def _largest_workspace(layout: Layout) -> Row:
    """Gathering keys and holding logits take turns in one workspace, so the largest of them counts."""
    dims, length, batch = layout.dims, layout.max_model_len, layout.max_num_batched_tokens
    factor = 5 if length <= 262_144 else 2
    rows = min(batch, layout.max_num_seqs * (1 + layout.draft_tokens))
    candidates = {
        f"prefill gather: 4 x ({-(-length // 4)} + 128 + {batch}) x {dims.head_dim} x 2 B": 4
        * (-(-length // 4) + 128 + batch)
        * dims.head_dim
        * 2,
        f"index keys: {length} x 8 x {factor} / 4 x 132 B": length * 8 * factor // 4 * 132,
        f"decode index logits: {rows} rows x {length // 4} x 4 B": rows * (length // 4) * 4,
        "prefill index logits: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": INDEXER_LOGITS_BYTES,
    }
    formula, size = max(candidates.items(), key=lambda item: item[1])
    return Row("work", "indexer workspace", size, formula, VLLM_SOURCE)


def _graph_row(layout: Layout) -> Row:
    size = 0 if layout.eager else GRAPH_BYTES
    return Row(
        "graphs",
        "CUDA graphs",
        size,
        "the one published figure (Flash, TP1, 3,712 rows), taken for every layout",
        GRAPH_SOURCE,
    )


def _sequences(memory: Memory) -> int:
    """Sequences that the pool holds while they decode at a quarter of max-model-len on average, at least one.

    Beyond that, vLLM preempts and computes again. Where the cache's layout is not public, the published 128
    for V4.1 (https://github.com/SemiAnalysisAI/InferenceX/pull/3246).
    """
    if memory.blocks is None:
        return 128
    mean = max(memory.layout.max_model_len // MEAN_LENGTH_SHARE, LENGTH_STEP)
    return max((memory.blocks - 1) // kv_cache.steady_blocks(memory.layout.dims, mean), 1)
