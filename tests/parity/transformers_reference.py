"""Prompt log-probabilities from Hugging Face transformers in fp32: python transformers_reference.py SPEC OUT.

SPEC = {"model": dir, "prompts": [[ids], ...]}. A process of its own, because vLLM registers another config
class for the same model type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config


def main() -> None:
    with Path(sys.argv[1]).open() as f:
        spec = json.load(f)
    # fp32 is less noisy than bf16, and faster where the CPU has no bf16 units.
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    model = model.eval().float()
    results = []
    for ids in spec["prompts"]:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logprobs = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
        top = logprobs.topk(2, -1)
        gap = top.values[:, 0] - top.values[:, 1]
        results.append({"prompt_logprobs": chosen, "prompt_top": top.indices[:, 0], "gap": gap})
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
