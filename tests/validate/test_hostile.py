"""Answers that are almost right: whatever stands where something else should, it is judged, and nothing raises."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from dsv4_deploy.validate.calls import Call, calls
from dsv4_deploy.validate.check import Judgement, Reply, judge
from dsv4_deploy.validate.stream import Stream
from tests.validate import openai_server

JUNK: list[Any] = [
    None,
    True,
    -1,
    float("inf"),
    float("nan"),
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    10**400,
    [1, 1, 1],
]
DEEP = ["[" * 100_000, '{"a":' * 50_000, '{"choices":' + "[" * 100_000]


def right(call: Call) -> Any:
    if call.body is None:
        return {"object": "list", "data": [{"id": openai_server.MODEL}]}
    if call.kind == "refusal":
        return {"error": {"message": "max_tokens must be at least 1", "code": 400}}
    return openai_server.answer(call.body, call.kind == "chat", "")


def judged(call: Call, text: str) -> Judgement:
    if not call.streams:
        return judge(call, Reply(400 if call.kind == "refusal" else 200, "application/json", text), None)
    stream = Stream(chat=call.kind == "chat")
    for line in (f"data: {text}", "", "data: [DONE]", ""):
        stream.feed(line)
    reply = Reply(200, "text/event-stream", text, stream.answer(), tuple(stream.problems))
    return judge(call, reply, None)


def mutated(value: Any, chance: random.Random) -> Any:
    """The same with one thing in it replaced."""
    whole = current = copy.deepcopy(value)
    holder, key = None, None
    while isinstance(current, dict | list) and current and (holder is None or chance.random() < 0.85):
        holder = current
        key = chance.choice(list(current) if isinstance(current, dict) else range(len(current)))
        current = current[key]
    if holder is not None:
        holder[key] = chance.choice(JUNK)
    return whole


@pytest.mark.parametrize("call", calls(openai_server.MODEL), ids=lambda call: call.name)
def test_nothing_raises(call: Call) -> None:
    chance = random.Random(call.name)  # noqa: S311 (the same every time)
    for _ in range(300):
        body = right(call)
        for _ in range(chance.choice([1, 1, 2, 3])):
            body = mutated(body, chance)
        judged(call, json.dumps(body))
    for text in DEEP:
        if call.kind not in ("health", "metrics", "refusal"):
            assert judged(call, text).problems
