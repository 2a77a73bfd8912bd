"""The canary: one token through /v1/completions, which tells an idle server that hangs from one that rests.

In: an HTTP client for vLLM. Out: how it went. A raw completion has no chat template, so there is no thinking
to switch off. The prompt differs each time, or a prefix cache could answer part of it. The supervisor decides
when to send one; see health.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import httpx

# Lower is later in vLLM's priority scheduling; requests of people have 0.
PRIORITY = 1_000_000
# Too many requests, or a queue limit: it is busy, which is no verdict on its health.
_REFUSALS = (429, 503)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`seconds` from the request to its answer; `reason` says what was wrong with it."""

    result: Literal["ok", "failed", "refused"]
    seconds: float
    reason: str = ""


async def send(client: httpx.AsyncClient, model: str, timeout_s: float, *, priority_allowed: bool) -> Outcome:
    """Send one canary and judge its answer. Never raises for what the server does."""
    import httpx

    mark = uuid.uuid4().hex
    request: dict[str, Any] = {
        "model": model,
        "prompt": f"{mark[:8]} is a number. The next number is",
        "max_tokens": 1,
        "temperature": 0.0,
    }
    if priority_allowed:
        # Any other scheduler policy answers a priority with 400.
        request["priority"] = PRIORITY
    began = time.perf_counter()
    try:
        # httpx bounds each read; an answer that comes in drops would never end.
        async with asyncio.timeout(timeout_s):
            response = await client.post(
                "/v1/completions",
                json=request,
                headers={"X-Request-Id": f"canary-{mark}"},
                timeout=timeout_s,
            )
    except (httpx.TimeoutException, TimeoutError):
        return Outcome("failed", time.perf_counter() - began, f"no answer within {timeout_s:.0f} s")
    except httpx.HTTPError as error:
        return Outcome("failed", time.perf_counter() - began, f"{type(error).__name__}: {error}".rstrip(": "))
    seconds = time.perf_counter() - began
    if response.status_code in _REFUSALS:
        return Outcome("refused", seconds, f"HTTP status {response.status_code}")
    problem = _problem(response)
    return Outcome("failed", seconds, problem) if problem else Outcome("ok", seconds)


def _problem(response: httpx.Response) -> str:
    if response.status_code != 200:
        return f"HTTP status {response.status_code}: {response.text[:200]}"
    try:
        body = response.json()
        reason = body["choices"][0]["finish_reason"]
        tokens = int(body["usage"]["completion_tokens"])
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
        return f"not a completion: {response.text[:200]}"
    if reason not in ("length", "stop") or tokens < 1:
        return f"finish_reason {reason} with {tokens} token(s)"
    return ""
