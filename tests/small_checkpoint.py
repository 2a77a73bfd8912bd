"""A directory that looks like a published DeepSeek-V4 checkpoint to everything that does not load its
weights.

Written without torch in a millisecond: real config.json, index and safetensors headers, a few bytes of
tensors.
"""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 512,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 8192,
    "vocab_size": 896,
    "sliding_window": 128,
    "hc_mult": 4,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4],
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(directory: pathlib.Path, **config: Any) -> pathlib.Path:
    """Write it; `config` replaces fields of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    _json(directory / "config.json", {**CONFIG, **config})
    _json(directory / "tokenizer.json", {"model": {}})
    _json(directory / "tokenizer_config.json", {})
    for number, name in enumerate(SHARDS):
        write_shard(directory / name, {f"layers.{number}.attn_norm.weight": 64})
    weight_map = {f"layers.{number}.attn_norm.weight": name for number, name in enumerate(SHARDS)}
    _json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory


def write_shard(path: pathlib.Path, tensors: dict[str, int]) -> None:
    """A safetensors file with tensors of that many bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))


def _json(path: pathlib.Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
