"""Tool calls over HTTP: a real server whose model is made to say what DeepSeek-V4 says, token by token.

One server start for all; the cases are those of tests/rocm_patches/chat.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Deployment
from tests.rocm_patches.chat import dsml
from tests.rocm_patches.chat.dsml import CASES, Case, D

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
EOS = 1
AT_ONCE = 64
ROOT = Path(__file__).resolve().parents[2]
# Without the few texts of thousands of tokens.
OVER_HTTP = [case for case in CASES if len(case.text) < 700]


@pytest.fixture(scope="module")
def server(deployment: Deployment) -> Iterator[Deployment]:
    # The worker imports it by this name; only an editable installation would have it on its path.
    path = os.pathsep.join([str(ROOT), *filter(None, [deployment.env.get("PYTHONPATH")])])
    deployment = dataclasses.replace(deployment, env={**deployment.env, "PYTHONPATH": path})
    # One layer of random weights: what the model thinks does not matter here, and this is four times as fast.
    settings = [
        "logits-processors=tests.e2e.forced:Forced",
        f"max-num-seqs={AT_ONCE}",
        "load-format=dummy",
        'hf-overrides={"num_hidden_layers": 1}',
    ]
    done = deployment.up(*(part for setting in settings for part in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    yield deployment


@pytest.fixture(scope="module")
def client(server: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def tokens_of(server: Deployment, text: str) -> list[int]:
    body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]
    assert isinstance(tokens, list)
    return tokens


def ask(server: Deployment, client: openai.OpenAI, case: Case, stream: bool, **more: Any) -> dict[str, Any]:
    """The message as a client has it in the end, with `finish_reason` and the usage's reasoning tokens."""
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "temperature": 0,
        "max_tokens": 600,
        "extra_body": {
            "vllm_xargs": {"force": [*tokens_of(server, case.text), EOS]},
            "chat_template_kwargs": {"thinking": case.thinking},
        },
        **more,
    }
    if case.thinking:
        request["extra_body"]["chat_template_kwargs"]["reasoning_effort"] = "low"
    if case.tools:
        request["tools"] = [dsml.WEATHER, dsml.CLOCK]
        request.setdefault("tool_choice", case.choice)
    if not stream:
        answer = client.chat.completions.create(**request)
        (choice,) = answer.choices
        return {
            "content": choice.message.content or None,
            "reasoning": getattr(choice.message, "reasoning", None),
            "calls": [
                (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
            ],
            "finish_reason": choice.finish_reason,
            "reasoning_tokens": answer.usage.completion_tokens_details.reasoning_tokens,
        }
    got: dict[str, Any] = {"content": "", "reasoning": "", "finish_reason": None}
    calls: dict[int, list[str]] = {}
    request["stream_options"] = {"include_usage": True}
    for chunk in client.chat.completions.create(**request, stream=True):
        if chunk.usage:
            got["reasoning_tokens"] = chunk.usage.completion_tokens_details.reasoning_tokens
        for choice in chunk.choices:
            got["content"] += choice.delta.content or ""
            got["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            got["finish_reason"] = choice.finish_reason or got["finish_reason"]
            for call in choice.delta.tool_calls or []:
                parts = calls.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
    got["calls"] = [tuple(calls[index]) for index in sorted(calls)]
    return {key: value or None if isinstance(value, str) else value for key, value in got.items()}


def whole_calls(got: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Calls whose arguments are JSON; a streamed call that was cut has none."""
    found = []
    for name, text in got["calls"]:
        try:
            found.append((name, json.loads(text)))
        except ValueError:
            assert got["finish_reason"] in ("stop", "length"), got
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_case(server: Deployment, client: openai.OpenAI, stream: bool) -> None:
    """All at once: a step costs this CPU about as much for sixty requests as for one."""
    cases = [case for case in OVER_HTTP if case.choice in ("auto", "none")]
    assert len(cases) >= 60

    def wrong(case: Case) -> str | None:
        got = ask(server, client, case, stream)
        calls = whole_calls(got)
        ends = "tool_calls" if case.calls and not (case.incomplete and stream) else "stop"
        expected = (case.content, case.reasoning, case.calls, ends)
        found = (got["content"], got["reasoning"], calls, got["finish_reason"])
        if (
            found != expected
            or D in (got["content"] or "")
            or (got["reasoning_tokens"] > 0) is not case.thinking
        ):
            return f"{case.id}: {got}"
        return None

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        assert [one for one in pool.map(wrong, cases) if one] == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_cut_by_max_tokens(server: Deployment, client: openai.OpenAI, stream: bool) -> None:
    """At each token: finish_reason is length, nothing half is given out whole, no DSML is seen."""
    text = "I look." + dsml.block(dsml.CALL)
    case = Case("cut", text)
    count = len(tokens_of(server, text))
    closed = len(tokens_of(server, text[: text.index(f"</{D}invoke>") + len(f"</{D}invoke>")]))

    def cut(limit: int) -> str | None:
        got = ask(server, client, case, stream, max_tokens=limit)
        calls = whole_calls(got)
        right = got["finish_reason"] == "length" and D not in (got["content"] or "")
        right = right and (calls == [dsml.MEANT]) is (limit >= closed) and len(calls) <= 1
        return None if right and (got["content"] or "").removesuffix("<") in "I look." else f"{limit}: {got}"

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        assert [one for one in pool.map(cut, range(3, count, 3)) if one] == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_forced_choices(server: Deployment, client: openai.OpenAI, stream: bool) -> None:
    """Here vLLM's grammar constrains the model too: what it lets through is what the parser must read."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, ends in ((named, "stop"), ("required", "tool_calls")):
        case = Case("led", "\n\n" + dsml.block(dsml.CALL))
        got = ask(server, client, case, stream, tool_choice=choice)
        assert (whole_calls(got), got["content"], got["finish_reason"]) == ([dsml.MEANT], None, ends)


def test_an_answer_is_continued(server: Deployment, client: openai.OpenAI) -> None:
    """The prompt ends inside the given answer, and what is said next is content, with thinking on or off."""
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    for thinking in (True, False):
        kwargs = {"thinking": thinking, "reasoning_effort": "low" if thinking else None}
        body = {
            "model": "tiny",
            "messages": messages,
            "chat_template_kwargs": kwargs,
            "return_token_strs": True,
            **more,
        }
        rendered = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).raise_for_status().json()
        assert "".join(rendered["token_strs"]).replace("Ġ", " ").endswith("</think>Well,")
        said = {"vllm_xargs": {"force": [*tokens_of(server, " yes."), EOS]}, "chat_template_kwargs": kwargs}
        for stream in (False, True):
            case = Case("more", "", tools=False)
            got = ask(server, client, case, stream, messages=messages, extra_body={**more, **said})
            assert (got["content"], got["reasoning"], got["reasoning_tokens"]) == (" yes.", None, 0)
    with pytest.raises(openai.BadRequestError, match="ends with 'user'"):
        ask(server, client, Case("no", "", tools=False), False, messages=messages[:1], extra_body=more)


def test_the_log_names_the_patches(server: Deployment) -> None:
    log = server.run("logs", "--port", str(server.port), "-n", "100000").stdout
    lines = re.findall(r"rocm_patches active in process (\d+), (\S+) .*", log)
    assert len({pid for pid, _ in lines}) >= 3, "API server, engine core and worker"
    assert log.count("dsml-parser") >= 3
