"""Hugging Face transformers' DeepSeek-V4 modules with random weights, as a second opinion in the tests."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from tests.rocm_patches.independent import generator

M = TypeVar("M", bound=nn.Module)

# YaRN as the published config.json files have it.
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


def config(**changes: Any) -> DeepseekV4Config:
    """DeepSeek-V4 with published head sizes and small everything else, one layer of each kind."""
    small: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
        "index_n_heads": 4,
        "vocab_size": 100,
        "compress_ratios": [0, 4, 128],
        "rope_parameters": dict(YARN),
    }
    return DeepseekV4Config(**{**small, **changes})


def randomised(module: M, seed: int, scale: float = 0.3) -> M:
    """The module, in fp32, every parameter drawn from a normal distribution of width `scale`."""
    source = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, scale, generator=source)
    return module.eval().requires_grad_(False)


def rope_table(configuration: DeepseekV4Config, positions: int, kind: str) -> Tensor:
    """transformers' cos and sin as this project's table: fp32 [positions, 64]. `kind` is main or compress."""
    embedding = DeepseekV4RotaryEmbedding(configuration)
    where = torch.arange(positions).unsqueeze(0)
    cos, sin = embedding(torch.zeros(1, dtype=torch.float32), where, layer_type=kind)
    return torch.cat((cos, sin), -1)[0]
