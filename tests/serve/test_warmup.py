"""What counts as a sound answer, for the warm-up and for the canary."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from dsv4_deploy.serve import canary, warmup
from dsv4_deploy.serve.warmup import ANSWER_TOKENS, unsound


def answer(**changes: Any) -> dict[str, Any]:
    logprobs = {
        "tokens": [str(number) for number in range(ANSWER_TOKENS)],
        "token_logprobs": [-0.1] * ANSWER_TOKENS,
    }
    choice = {"text": "4, 5, 6", "finish_reason": "length", "logprobs": logprobs}
    for name, value in changes.items():
        (logprobs if name in logprobs else choice)[name] = value
    return {"choices": [choice], "usage": {"completion_tokens": ANSWER_TOKENS}}


def test_a_sound_answer() -> None:
    assert unsound(answer()) == ""
    # A model may be quite sure of itself, and one token may come often.
    assert unsound(answer(token_logprobs=[0.0] * ANSWER_TOKENS)) == ""
    assert unsound(answer(tokens=["a"] * (ANSWER_TOKENS - 1) + ["b"])) == ""


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "not a completion"),
        ({"choices": []}, "not a completion"),
        (answer(logprobs=None), "not a completion"),
        (answer(token_logprobs=[None] * ANSWER_TOKENS), "no finite numbers"),
        (answer(token_logprobs=[float("nan")] + [-0.1] * (ANSWER_TOKENS - 1)), "no finite numbers"),
        (answer(token_logprobs=[float("-inf")] + [-0.1] * (ANSWER_TOKENS - 1)), "no finite numbers"),
        (answer(token_logprobs=[-9999.0] + [-0.1] * (ANSWER_TOKENS - 1)), "probability 0"),
        (answer(tokens=["!"] * ANSWER_TOKENS), "over and over: '!'"),
        (answer(tokens=["a", "b"]), "2 tokens"),
        (answer(text=""), "empty text"),
    ],
)
def test_what_is_not_sound(body: dict[str, Any], problem: str) -> None:
    assert problem in unsound(body)


def client(answers: Any) -> httpx.AsyncClient:
    """A client whose server is a function of the request."""
    return httpx.AsyncClient(base_url="http://vllm", transport=httpx.MockTransport(answers))


def warm(answers: Any, length: int = 4608) -> tuple[dict[str, float], list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def server(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(range(5000))})
        asked.append(body)
        return answers(body)

    async def run() -> dict[str, float]:
        async with client(server) as one:
            return await warmup.run(one, "tiny", length, 5.0, lambda _step: None)

    return asyncio.run(run()), asked


def test_the_three_lengths_are_asked_where_they_fit() -> None:
    seconds, asked = warm(lambda _body: httpx.Response(200, json=answer()))
    assert [len(body["prompt"]) for body in asked] == [12, 200, 2200]
    assert set(seconds) == {"short", "past the window", "past the index's top-k"}
    _, asked = warm(lambda _body: httpx.Response(200, json=answer()), length=2048)
    assert [len(body["prompt"]) for body in asked] == [12, 200]


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (
            httpx.Response(200, json=answer(tokens=["!"] * ANSWER_TOKENS)),
            "prompt of 12 tokens (short) is not sound",
        ),
        (httpx.Response(500, json={"error": {"message": "Out of range float values"}}), "HTTP status 500"),
        (httpx.Response(401, json={}), "another API key"),
        (httpx.Response(200, text="[1]"), "JSON object"),
        (httpx.Response(200, text="<html>"), "JSON object"),
    ],
)
def test_a_warm_up_that_fails_says_why(response: httpx.Response, problem: str) -> None:
    with pytest.raises(warmup.WarmupError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        warm(lambda _body: response)


def ask(answers: Any, *, priority_allowed: bool = False) -> canary.Outcome:
    async def run() -> canary.Outcome:
        async with client(answers) as one:
            return await canary.send(one, "tiny", 1.0, priority_allowed=priority_allowed)

    return asyncio.run(run())


def test_a_canary_is_one_token_with_a_name_of_its_own() -> None:
    seen: list[httpx.Request] = []

    def server(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=answer())

    assert ask(server).result == "ok"
    assert ask(server, priority_allowed=True).result == "ok"
    first, second = (json.loads(request.content) for request in seen)
    assert first["max_tokens"] == 1
    assert "priority" not in first
    assert second["priority"] == canary.PRIORITY
    assert first["prompt"] != second["prompt"]
    assert all(request.headers["x-request-id"].startswith("canary-") for request in seen)


def failing(_request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("late")


def refusing(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("server", "result", "reason"),
    [
        (lambda _request: httpx.Response(503, json={}), "refused", "503"),
        (lambda _request: httpx.Response(429, json={}), "refused", "429"),
        (lambda _request: httpx.Response(500, text="EngineDeadError"), "failed", "EngineDeadError"),
        (lambda _request: httpx.Response(200, json=answer(finish_reason="abort")), "failed", "abort"),
        (lambda _request: httpx.Response(200, json={"choices": []}), "failed", "not a completion"),
        (failing, "failed", "no answer within 1 s"),
        (refusing, "failed", "ConnectError"),
    ],
)
def test_what_a_canary_comes_to(server: Any, result: str, reason: str) -> None:
    outcome = ask(server)
    assert outcome.result == result
    assert reason in outcome.reason
