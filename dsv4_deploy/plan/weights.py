"""How many bytes of weights each rank holds, computed tensor by tensor from the model's sizes.

In: Dims, the format of the experts, the draft module, the parallel layout. Out: bytes. The inventory is that
of the published checkpoints (names as in their safetensors headers); its total equals the published payload
of DeepSeek-V4-Flash-0731 to the byte (72,317 tensors, https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-0731).
Which tensors vLLM splits and which every rank holds in full: vllm/models/deepseek_v4/amd/model.py in
https://github.com/vllm-project/vllm/tree/v0.33.0
"""

from __future__ import annotations

import dataclasses

from dsv4_deploy.catalog import Dims, Draft
from dsv4_deploy.catalog.model import ExpertDtype

FP8_BLOCK = 128
"""Rows and columns of an FP8 matrix that share one scale; a rank's share must be whole blocks."""

FP4_GROUP = 32
"""Consecutive FP4 values that share one byte of scale."""

MARKOV_RANK = 256
"""Width of DSpark's Markov head: markov_w1 and markov_w2 are [vocab_size, 256]."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes by how they are spread: `experts` over TP or EP ranks, `split` over TP ranks, `replicated` in
    full on every rank."""

    experts: int = 0
    split: int = 0
    replicated: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.experts + other.experts, self.split + other.split, self.replicated + other.replicated
        )

    @property
    def total(self) -> int:
        """The payload of the files."""
        return self.experts + self.split + self.replicated


def backbone(dims: Dims, expert_dtype: ExpertDtype = "fp4") -> Weights:
    """Everything but the draft module."""
    scale = _scale_bytes(expert_dtype)
    total = Weights(
        split=2 * 2 * dims.vocab_size * dims.hidden_size,  # embedding and head, bf16
        replicated=2 * dims.hidden_size + _exit(dims),
    )
    for layer, ratio in enumerate(dims.compress_ratios):
        hashed = layer < dims.num_hash_layers
        total += _block(dims, expert_dtype, scale, hashed) + Weights(
            replicated=_compressor(dims, scale, ratio)
        )
    return total


def draft(dims: Dims, module: Draft, expert_dtype: ExpertDtype = "fp4") -> Weights:
    """The draft module of the checkpoint. vLLM loads it only when speculation is on."""
    scale = _scale_bytes(expert_dtype)
    hidden = dims.hidden_size
    total = Weights()
    for stage in range(module.layers):
        total += _block(dims, expert_dtype, scale, hashed=False)
        if module.kind == "mtp":  # e_proj and h_proj, enorm, hnorm and norm, and an exit of its own
            total += Weights(replicated=2 * _fp8(hidden, hidden, scale) + 3 * 2 * hidden + _exit(dims))
            continue
        if stage == 0:  # main_proj over the residuals of three layers, main_norm
            total += Weights(replicated=_fp8(hidden, 3 * hidden, scale) + 2 * hidden)
        if stage == module.layers - 1:  # norm, exit, the Markov head and the confidence head
            markov = 2 * 2 * dims.vocab_size * MARKOV_RANK
            confidence = 2 * (hidden + MARKOV_RANK)
            total += Weights(replicated=2 * hidden + _exit(dims) + markov + confidence)
    return total


def per_rank(weights: Weights, *, tp: int, dp: int = 1, ep: bool = False, padding: float = 1.0) -> float:
    """Bytes on one rank. `padding` is how much wider the rank's experts are stored than they are.

    Tensor parallelism splits experts and matrices. Data parallelism repeats everything on each replica,
    except that expert parallelism spreads the experts over all ranks of all replicas, unpadded.
    """
    experts = weights.experts / (tp * dp) if ep else weights.experts * padding / tp
    return experts + weights.split / tp + weights.replicated


def expert_padding(dims: Dims, tp: int, multiple: int) -> float:
    """How much wider a rank's experts become when their width is rounded up to a multiple."""
    width = dims.moe_intermediate_size / tp
    return -(-width // multiple) * multiple / width


def _block(dims: Dims, expert_dtype: ExpertDtype, scale: int, hashed: bool) -> Weights:
    """One transformer block without its compressor."""
    hidden, heads = dims.hidden_size, dims.num_attention_heads
    width, groups = heads * dims.head_dim, dims.o_groups * dims.o_lora_rank
    shared = dims.moe_intermediate_size * dims.n_shared_experts
    attention_split = (
        _fp8(width, dims.q_lora_rank, scale)  # wq_b
        + _fp8(groups, width // dims.o_groups, scale)  # wo_a
        + _fp8(hidden, groups, scale)  # wo_b
        + 4 * heads  # attn_sink
    )
    attention_replicated = (
        _fp8(dims.q_lora_rank, hidden, scale)  # wq_a
        + _fp8(dims.head_dim, hidden, scale)  # wkv
        + 2 * (dims.q_lora_rank + dims.head_dim)  # q_norm, kv_norm
    )
    mixes = dims.hc_mult * (2 + dims.hc_mult)
    # hc_attn_* and hc_ffn_*: fn, base and three scales in float32
    hyper_connections = 2 * 4 * (mixes * dims.hc_mult * hidden + mixes + 3)
    gate = 2 * dims.n_routed_experts * hidden
    # The first layers look experts up by token (int64 in the file), the others have a bias per expert.
    routing = 8 * dims.vocab_size * dims.num_experts_per_tok if hashed else 4 * dims.n_routed_experts
    matrix = _fp4 if expert_dtype == "fp4" else lambda rows, columns: _fp8(rows, columns, scale)
    expert = 2 * matrix(dims.moe_intermediate_size, hidden) + matrix(hidden, dims.moe_intermediate_size)
    return Weights(
        experts=dims.n_routed_experts * expert,
        split=attention_split + 2 * _fp8(shared, hidden, scale) + _fp8(hidden, shared, scale),
        replicated=attention_replicated + 2 * 2 * hidden + hyper_connections + gate + routing,
    )


def _compressor(dims: Dims, scale: int, ratio: int) -> int:
    """The compressor of a layer and, where the ratio is 4, its indexer. Every rank holds both in full."""
    if ratio == 0:
        return 0
    hidden, size = dims.hidden_size, dims.head_dim
    if ratio != 4:  # one window: wkv, wgate, ape (float32), norm
        return 2 * 2 * size * hidden + 4 * ratio * size + 2 * size
    index = dims.index_head_dim
    main = 2 * 2 * 2 * size * hidden + 4 * ratio * 2 * size + 2 * size
    indexer = (
        _fp8(dims.index_n_heads * index, dims.q_lora_rank, scale)  # wq_b
        + 2 * dims.index_n_heads * hidden  # weights_proj
        + 2 * 2 * 2 * index * hidden  # its own wkv and wgate
        + 4 * ratio * 2 * index
        + 2 * index
    )
    return main + indexer


def _exit(dims: Dims) -> int:
    """hc_head_fn, hc_head_base and hc_head_scale, float32."""
    return 4 * (dims.hc_mult * dims.hc_mult * dims.hidden_size + dims.hc_mult + 1)


def _scale_bytes(expert_dtype: ExpertDtype) -> int:
    """Bytes of one FP8 scale: e8m0, but float32 everywhere in the checkpoints with FP8 experts.

    Source: vllm/models/deepseek_v4/quant_config.py, v0.33.0.
    """
    return 1 if expert_dtype == "fp4" else 4


def _fp8(rows: int, columns: int, scale: int) -> int:
    blocks = -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return rows * columns + blocks * scale


def _fp4(rows: int, columns: int) -> int:
    return rows * columns // 2 + rows * columns // FP4_GROUP
