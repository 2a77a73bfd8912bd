"""A logits processor for tests: the request's `vllm_xargs["force"]` lists the tokens that the model then produces,
one after the other, whatever it would have said. Loaded by vLLM in the worker (--logits-processors).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


def _only(wanted: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits [vocabulary] that leave one token, the next of `wanted`; unchanged behind the last."""
    if len(output) < len(wanted):
        logits.fill_(-torch.inf)
        logits[wanted[len(output)]] = 0.0
    return logits


class Forced(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        wanted = (params.extra_args or {}).get("force")
        return functools.partial(_only, [int(token) for token in wanted]) if wanted else None
