"""Runs one vLLM engine in this process over a list of jobs and saves what it answered.

Usage: python engine.py SPEC.json OUT.pt, with SPEC = {"model": dir, "options": {LLM arguments}, "jobs": [...]}.
A job is {"prompts": [[ids], ...], "max_tokens": n, "prompt_logprobs": bool, "fault": name or null}; its result
is one dict for each prompt. A fault replaces one step of the reference operators for that job only: it shows
that the comparison would notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch


def _faults() -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    from rocm_patches.reference import attention, experts, output

    attend, swiglu = attention.attend, experts.swiglu

    def window_only(q: Any, keys: Any, index: Any, valid: Any, sink: Any, scale: float) -> Any:
        valid = valid.clone()
        valid[:, 128:] = False
        return attend(q, keys, index, valid, sink, scale)

    def no_sink(q: Any, keys: Any, index: Any, valid: Any, sink: Any, scale: float) -> Any:
        return attend(q, keys, index, valid, torch.full_like(sink, float("-inf")), scale)

    return {
        "no inverse RoPE": (output, "inverse_rotate", lambda o, positions, table: o.float()),
        "compressed entries ignored": (attention, "attend", window_only),
        "no sink": (attention, "attend", no_sink),
        "no SwiGLU clamp": (experts, "swiglu", lambda gate, up, limit: swiglu(gate, up, None)),
    }


@contextlib.contextmanager
def _injected(fault: str | None) -> Iterator[None]:
    if fault is None:
        yield
        return
    module, name, replacement = _faults()[fault]
    with mock.patch.object(module, name, replacement):
        yield


def _describe(output: Any, ids: list[int]) -> dict[str, Any]:
    completion = output.outputs[0]
    described = {
        "tokens": list(completion.token_ids),
        "logprobs": torch.tensor(
            [step[t].logprob for step, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        ),
        "cached": output.num_cached_tokens,
    }
    if output.prompt_logprobs is not None:
        steps = list(zip(output.prompt_logprobs, ids, strict=True))[1:]
        described["prompt_logprobs"] = torch.tensor([step[t].logprob for step, t in steps])
        described["prompt_top"] = torch.tensor(
            [max(step, key=lambda t: step[t].logprob) for step, _ in steps]
        )
    return described


def main() -> None:
    with Path(sys.argv[1]).open() as f:
        spec = json.load(f)
    from vllm import LLM, SamplingParams

    defaults = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8, "seed": 0}
    llm = LLM(spec["model"], **(defaults | spec["options"]))
    results = []
    for job in spec["jobs"]:
        sampling = SamplingParams(
            max_tokens=job["max_tokens"],
            temperature=0,
            logprobs=1,
            prompt_logprobs=1 if job["prompt_logprobs"] else None,
            ignore_eos=True,
        )
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        with _injected(job["fault"]):
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        results.append([_describe(o, ids) for o, ids in zip(outputs, job["prompts"], strict=True)])
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
