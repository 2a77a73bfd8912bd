"""Why a chat answer ended, told truthfully: "tool_calls" only where whole calls were given out and the model
stopped by itself. In: vLLM's chat handler and its results. Out: the same results with `finish_reason` put right.

Streaming needs to know whether the request's parser saw a call that did not arrive whole; the parser of
`rocm_patches.chat.parser` says so in `incomplete_call`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

_CALLS = '"finish_reason":"tool_calls"'


def has_incomplete_call(parser: Any) -> bool:
    """Whether one of a vLLM `Parser`'s engines was left with a call that did not arrive whole."""
    return bool(
        getattr(
            getattr(getattr(parser, "tool_parser", None), "_parser_engine", None), "incomplete_call", False
        )
    )


class _Watched:
    """A chat handler that remembers the parsers which it makes for one request; else the handler itself."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.parsers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def _make_parser(self, *args: Any, **kwargs: Any) -> Any:
        self.parsers.append(self._handler._make_parser(*args, **kwargs))
        return self.parsers[-1]


def _relabelled(event: str, parsers: list[Any]) -> str:
    """A server-sent event whose choices end with "stop" where the call that they streamed is incomplete."""
    chunk = json.loads(event.removeprefix("data: "))
    for choice in chunk["choices"]:
        if choice["finish_reason"] == "tool_calls" and has_incomplete_call(parsers[choice["index"]]):
            choice["finish_reason"] = "stop"
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def stream_0_32(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `OpenAIServingChat.chat_completion_stream_generator` of vLLM 0.32.0."""

    @functools.wraps(original)
    async def chat_completion_stream_generator(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        watched = _Watched(self)
        async with contextlib.aclosing(original(watched, *args, **kwargs)) as events:
            async for event in events:
                yield _relabelled(event, watched.parsers) if _CALLS in event else event

    return chat_completion_stream_generator


def whole_0_32(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `OpenAIServingChat.chat_completion_full_generator` of vLLM 0.32.0."""

    @functools.wraps(original)
    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        reasons: dict[int, str] = {}

        async def noted() -> AsyncIterator[Any]:
            async for result in result_generator:
                reasons.update({output.index: output.finish_reason for output in result.outputs})
                yield result

        response = await original(self, request, noted(), *args, **kwargs)
        for choice in getattr(response, "choices", ()):
            reason = reasons.get(choice.index) or "stop"
            if choice.finish_reason == "tool_calls" and (reason != "stop" or not choice.message.tool_calls):
                choice.finish_reason = reason
        return response

    return chat_completion_full_generator


def step_0_33(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `ChatStreamProcessor.step` of vLLM 0.33.0, which tells a cut from an end by itself."""

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(self, *args, **kwargs)
        if done.finish_reason == "tool_calls" and has_incomplete_call(self.parser):
            return done._replace(finish_reason="stop")
        return done

    return step
