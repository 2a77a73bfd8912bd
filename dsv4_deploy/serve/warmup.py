"""The warm-up: three completions that must be sound before the first user comes.

In: an HTTP client for a vLLM that listens. Out: seconds per prompt, or a WarmupError that says what is wrong.
The lengths are where DeepSeek-V4 changes its path, so afterwards its kernels are compiled: a short prompt; one
past the sliding window of 128 tokens; one past 2,048 tokens, from where the sparse indexer has more
compressed entries (ratio 4) than its top-k of 512 and must choose
(https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash/blob/main/config.json).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

ANSWER_TOKENS = 16
# A count goes on in a predictable way and never repeats itself, so neither does a sound answer to it.
_NUMBERS = 1500


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One warm-up prompt: its name in metrics, and its length in tokens."""

    name: str
    tokens: int


PROMPTS = (
    Prompt("short", 12),
    Prompt("past the window", 200),
    Prompt("past the index's top-k", 2200),
)


class WarmupError(Exception):
    """The server answered the warm-up wrongly, or not at all. The text is one sentence for people."""


async def run(
    client: httpx.AsyncClient,
    model: str,
    max_model_len: int,
    timeout_s: float,
    on_step: Callable[[str], None],
) -> dict[str, float]:
    """Send the prompts that fit `max_model_len`, one after the other; seconds by prompt name.

    `timeout_s` bounds each answer; kernels may be compiled in it. Raises WarmupError.
    """
    text = "Counting: " + ", ".join(str(number) for number in range(1, _NUMBERS + 1))
    body = await _post(client, "/tokenize", {"model": model, "prompt": text}, timeout_s)
    ids = body.get("tokens")
    if not isinstance(ids, list) or len(ids) < PROMPTS[-1].tokens:
        raise WarmupError(
            f"/tokenize gave {len(ids) if isinstance(ids, list) else 'no'} tokens for a long text"
        )
    seconds = {}
    for prompt in PROMPTS:
        if prompt.tokens + ANSWER_TOKENS > max_model_len:
            continue
        on_step(f"prompt of {prompt.tokens} tokens ({prompt.name})")
        began = time.perf_counter()
        request = {
            "model": model,
            "prompt": ids[: prompt.tokens],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "logprobs": 1,
            "ignore_eos": True,
        }
        answer = await _post(client, "/v1/completions", request, timeout_s)
        if problem := unsound(answer):
            raise WarmupError(
                f"the answer to a prompt of {prompt.tokens} tokens ({prompt.name}) is not sound: {problem}"
            )
        seconds[prompt.name] = time.perf_counter() - began
    return seconds


def unsound(body: dict[str, Any]) -> str:
    """What is wrong with a completion that has log-probabilities; "" when nothing is.

    Sound means: as many tokens as asked for, finite log-probabilities, and not one token over and over, which
    is what logits full of NaN come to. It does not mean that the text is good.
    """
    try:
        choice = body["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
        tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        return f"not a completion with log-probabilities: {json.dumps(body)[:200]}"
    if not isinstance(tokens, list) or not isinstance(values, list):
        return f"log-probabilities that are no lists: {json.dumps(logprobs)[:200]}"
    if len(tokens) != ANSWER_TOKENS or len(values) != len(tokens):
        return f"{len(tokens)} tokens with {len(values)} log-probabilities, not {ANSWER_TOKENS}"
    # A float: an integer as large as JSON allows has no place in one.
    strange = [value for value in values if not isinstance(value, float) or not math.isfinite(value)]
    if strange:
        return f"log-probabilities that are no finite numbers: {strange[:3]}"
    # vLLM replaces minus infinity by -9999: the model gave its own choice no probability at all.
    if min(values) <= -9999.0:
        return "a chosen token has probability 0"
    if all(token == tokens[0] for token in tokens):
        return f"one token over and over: {tokens[0]!r}"
    if not text:
        return "an empty text"
    return ""


async def _post(
    client: httpx.AsyncClient, path: str, request: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    import httpx

    try:
        # httpx bounds each read; an answer that comes in drops would never end.
        async with asyncio.timeout(timeout_s):
            response = await client.post(path, json=request, timeout=timeout_s)
    except (httpx.TimeoutException, TimeoutError) as error:
        raise WarmupError(f"{path} did not answer within {timeout_s:.0f} s") from error
    except httpx.HTTPError as error:
        raise WarmupError(f"{path} broke off: {type(error).__name__} {error}".rstrip()) from error
    if response.status_code in (401, 403):
        raise WarmupError(
            f"{path} answered HTTP status {response.status_code}: it wants another API key than VLLM_API_KEY is "
            "here"
        )
    if response.status_code != 200:
        # vLLM cannot write NaN as JSON, so broken numbers arrive as an error of the server.
        raise WarmupError(f"{path} answered HTTP status {response.status_code}: {response.text[:300]}")
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise WarmupError(f"{path} did not answer with a JSON object: {response.text[:300]}")
    return body
