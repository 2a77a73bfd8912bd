"""Why an answer ended: the wrappers around vLLM's handlers, with handlers that do what vLLM 0.32.0's do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from rocm_patches.chat import finish


def parser(incomplete: bool) -> Any:
    return SimpleNamespace(
        tool_parser=SimpleNamespace(_parser_engine=SimpleNamespace(incomplete_call=incomplete))
    )


@pytest.mark.parametrize(
    ("engine", "calls", "reported"),
    [("stop", 1, "tool_calls"), ("stop", 0, "stop"), ("length", 1, "length"), ("length", 0, "length")],
)
def test_whole_answers(engine: str, calls: int, reported: str) -> None:
    async def handler(self: Any, request: Any, results: AsyncIterator[Any]) -> Any:
        async for result in results:
            assert result.outputs
        message = SimpleNamespace(tool_calls=[object()] * calls)
        return SimpleNamespace(
            choices=[SimpleNamespace(index=0, message=message, finish_reason="tool_calls")]
        )

    async def results() -> AsyncIterator[Any]:
        for reason in (None, engine):
            yield SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=reason)])

    response = asyncio.run(finish.whole_0_32(handler)(object(), object(), results()))
    assert response.choices[0].finish_reason == reported


def test_an_error_response_passes() -> None:
    async def handler(self: Any, request: Any, results: AsyncIterator[Any]) -> Any:
        return "error"

    async def results() -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[])

    assert asyncio.run(finish.whole_0_32(handler)(object(), object(), results())) == "error"


def test_streams() -> None:
    """Each choice is judged by its own parser; other events pass as they are; closing reaches the handler."""
    closed = []

    class Handler:
        def _make_parser(self, incomplete: bool) -> Any:
            return parser(incomplete)

        async def stream(self) -> AsyncIterator[str]:
            try:
                for incomplete in (False, True):
                    self._make_parser(incomplete)
                yield 'data: {"choices":[{"index":0,"delta":{"content":"杭"},"finish_reason":null}]}\n\n'
                for index in (0, 1):
                    chunk = {"choices": [{"index": index, "delta": {}, "finish_reason": "tool_calls"}]}
                    yield f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
                yield "data: [DONE]\n\n"
            finally:
                closed.append(True)

    wrapped = finish.stream_0_32(Handler.stream)

    async def collect(limit: int) -> list[str]:
        events, stream = [], wrapped(Handler())
        async for event in stream:
            events.append(event)
            if len(events) == limit:
                break
        await stream.aclose()
        return events

    events = asyncio.run(collect(9))
    assert "杭" in events[0]
    reasons = [json.loads(event[6:])["choices"][0]["finish_reason"] for event in events[:3]]
    assert reasons == [None, "tool_calls", "stop"]
    assert events[3] == "data: [DONE]\n\n"
    assert len(asyncio.run(collect(1))) == 1
    assert closed == [True, True]


@pytest.mark.parametrize(("incomplete", "reported"), [(False, "tool_calls"), (True, "stop")])
def test_stream_steps_of_0_33(incomplete: bool, reported: str) -> None:
    class Step(NamedTuple):
        delta: Any
        finish_reason: str | None

    def step(self: Any) -> Step:
        return Step(None, "tool_calls")

    assert finish.step_0_33(step)(SimpleNamespace(parser=parser(incomplete))).finish_reason == reported
    assert finish.step_0_33(lambda self: Step(None, None))(SimpleNamespace(parser=None)).finish_reason is None
