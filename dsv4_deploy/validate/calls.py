"""The requests that show whether a server works, as data: `curl` prints them and `validate` sends them.

In: nothing but the model's name, where it is known. Out: `Call`s, in the order from "does it live" to "does it
call tools". Text completion asks for what the original pull request asked for:
https://github.com/vllm-project/vllm/pull/41451
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Kind = Literal["health", "models", "metrics", "completion", "chat", "refusal"]

REQUEST: dict[str, Any] = {
    "prompt": "Write me a poem about AMD and Deepseek",
    "max_tokens": 100,
    "temperature": 0.0,
}
"""The original one."""

TOOL_NAME = "get_weather"
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# `strict`, or vLLM lets the constrained output leave out what is required.
_TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "strict": True,
        "description": "Weather of a city",
        "parameters": TOOL_SCHEMA,
    },
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One request. `body` is None for a GET; `thinks` tells whether thinking was switched on, None where
    there is nothing to switch."""

    name: str
    purpose: str
    kind: Kind
    path: str
    body: dict[str, Any] | None = None
    thinks: bool | None = None
    must_call_tool: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream"))

    @property
    def max_tokens(self) -> int:
        return int(self.body["max_tokens"]) if self.body else 0


def calls(model: str | None = None) -> list[Call]:
    """All requests. vLLM takes its only model when the request names none; routers before it may not."""
    return [
        Call("health", "the engine is loaded and its process lives", "health", "/health"),
        Call("models", "which models it serves", "models", "/v1/models"),
        Call("metrics", "its counters, for Prometheus", "metrics", "/metrics"),
        *(_with_model(call, model) for call in _generating()),
    ]


def _generating() -> list[Call]:
    text = {**REQUEST, "max_tokens": 16, "logprobs": 1}
    off = _chat("What is 17 + 25? Answer with the number only.", thinks=False, max_tokens=16)
    on = _chat("What is 17 + 25? Answer with the number only.", thinks=True, max_tokens=48)
    tools = {
        **_chat("What is the weather in Berlin?", thinks=False, max_tokens=400),
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": TOOL_NAME}},
    }
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chat = "/v1/chat/completions"
    return [
        Call("completion", "text goes on, with log-probabilities", "completion", "/v1/completions", text),
        Call(
            "completion-stream", "the same as it comes", "completion", "/v1/completions", {**text, **stream}
        ),
        Call("chat", "an answer without thinking", "chat", chat, {**off, "logprobs": True}, thinks=False),
        Call("chat-stream", "the same as it comes", "chat", chat, {**off, **stream}, thinks=False),
        Call("chat-thinking", "thoughts and answer, apart", "chat", chat, on, thinks=True),
        Call(
            "chat-thinking-stream", "the same as it comes", "chat", chat, {**on, **stream}, thinks=True
        ),
        Call(
            "tools", "a function is called by name", "chat", chat, tools, thinks=False, must_call_tool=True
        ),
        Call(
            "tools-stream", "the same as it comes", "chat", chat, {**tools, **stream}, thinks=False,
            must_call_tool=True,
        ),
        Call("refusal", "a wrong request is refused", "refusal", chat, {**off, "max_tokens": -1}),
    ]  # fmt: skip


def _chat(question: str, *, thinks: bool, max_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "chat_template_kwargs": {"thinking": thinks},
    }


def _with_model(call: Call, model: str | None) -> Call:
    return dataclasses.replace(call, body={"model": model, **(call.body or {})}) if model else call
