"""The request of the original pull request, sent to a running server and its answer checked.

In: the server's URL. Out: an Answer with the JSON and two speeds. The request is sent twice: streamed, to see
when the first token comes and how fast the others follow, and plain, for the answer that a person reads.
The request: https://github.com/vllm-project/vllm/pull/41451
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from dsv4_deploy.errors import DeployError
from dsv4_deploy.serve.probe import auth_headers, key_refused
from dsv4_deploy.validate import curl, shape
from dsv4_deploy.validate.calls import REQUEST

_LOOK = "Look at the log: dsv4-deploy logs"


@dataclasses.dataclass(frozen=True)
class Answer:
    """The server's JSON answer; `first_token_s` in seconds; `tokens_per_s` after the first token (None for
    one)."""

    body: dict[str, Any]
    first_token_s: float
    tokens_per_s: float | None


def ask(url: str, timeout_s: float, on_first_token: Callable[[], None] = lambda: None) -> Answer:
    """Send the request streamed, then plain.

    `timeout_s` bounds each silence, not the whole answer. Raises DeployError when the server does not answer,
    refuses, or answers something that is not a completion.
    """
    import httpx

    endpoint = f"{url}/v1/completions"
    limits = httpx.Timeout(timeout_s, connect=10.0)
    try:
        with httpx.Client(trust_env=False, timeout=limits, headers=auth_headers()) as client:
            first_token_s, tokens_per_s = _ask_streamed(client, endpoint, on_first_token)
            response = client.post(endpoint, json=REQUEST)
            _check_status(response)
            body = _json_object(response.text)
    except httpx.TimeoutException as error:
        raise DeployError(
            f"the server did not answer {endpoint} within {timeout_s:.0f} s",
            why="It accepted the request, then nothing came.",
            fix=f"{_LOOK}. A longer --timeout helps where the machine is merely slow.",
        ) from error
    except httpx.HTTPError as error:
        raise DeployError(
            f"the server broke off the request to {endpoint}",
            why=f"{type(error).__name__}: {error}",
            fix=f"{_LOOK}.",
        ) from error
    check_shape(body)
    return Answer(body, first_token_s, tokens_per_s)


def check_shape(body: dict[str, Any]) -> None:
    """Make sure that this is a text completion with at least one generated token. Raises DeployError."""
    if problems := shape.text_completion(body, REQUEST["max_tokens"]):
        raise _strange_answer("; ".join(problems), json.dumps(body, ensure_ascii=False))


def curl_line(url: str, *, with_key: bool) -> str:
    """A shell line that repeats the request. The key stays a variable, so that it is not written anywhere."""
    return curl.line(f"{url}/v1/completions", REQUEST, with_key=with_key)


def _ask_streamed(
    client: Any, endpoint: str, on_first_token: Callable[[], None]
) -> tuple[float, float | None]:
    started = time.perf_counter()
    first = last = None
    tokens = 0
    request = {**REQUEST, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", endpoint, json=request) as response:
        if response.status_code != 200:
            response.read()
        _check_status(response)
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            event = _json_object(data)
            if "error" in event:
                raise _strange_answer("an error in the middle of the stream", data)
            if event.get("choices"):
                last = time.perf_counter()
                if first is None:
                    first = last
                    on_first_token()
            if isinstance(event.get("usage"), dict):
                tokens = int(event["usage"].get("completion_tokens") or 0)
    if first is None or last is None or tokens < 1:
        raise _strange_answer("the stream ended without a single token", "")
    return first - started, (tokens - 1) / (last - first) if tokens > 1 and last > first else None


def _check_status(response: Any) -> None:
    if response.status_code == 200:
        return
    if response.status_code in (401, 403):
        raise key_refused(response.status_code)
    raise _strange_answer(f"HTTP status {response.status_code}", response.text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _strange_answer(f"not JSON ({error})", text) from error
    if not isinstance(body, dict):
        raise _strange_answer("not a JSON object", text)
    return body


def _strange_answer(reason: str, body: str) -> DeployError:
    return DeployError(
        f"the server's answer is not a completion: {reason}",
        why="It runs, but does not generate text as it should.",
        fix=f"{_LOOK}.",
        detail=body[:2000],
    )
