"""Judges one answer: are there problems, and what is worth telling about it.

In: the call and what came back. Out: `Judgement`, with what triage knows about the words of an error.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from dsv4_deploy.triage.rules import book, fits
from dsv4_deploy.validate import shape
from dsv4_deploy.validate.calls import TOOL_NAME, TOOL_SCHEMA, Call

_SAMPLE = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? [0-9.eE+-]+$", re.MULTILINE)
SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back. `body` is the whole text; for a stream `answer` is what it amounts to and `problems`
    what is wrong with the stream itself."""

    status: int
    content_type: str
    body: str
    answer: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Problems (none: the call passed), and a note for people."""

    problems: tuple[str, ...] = ()
    note: str = ""


def judge(call: Call, reply: Reply, wanted_model: str | None) -> Judgement:
    """Judge any call's reply."""
    if call.kind == "refusal":
        return _refusal(reply)
    if reply.status != 200:
        return Judgement((_refused(reply),))
    if call.kind == "health":
        return Judgement()
    if call.kind == "metrics":
        found = _SAMPLE.search(reply.body)
        return Judgement() if found else Judgement(("there is no vllm:num_requests_running",))
    if call.streams and "text/event-stream" not in reply.content_type:
        return Judgement((f"the content type is {reply.content_type!r}, not 'text/event-stream'",))
    body = reply.answer if call.streams else json_object(reply.body)
    if body is None:
        return Judgement((f"the answer is no JSON object: {reply.body[:SHOWN]!r}",))
    if call.kind == "models":
        return _models(body, wanted_model)
    problems, note = (_completion if call.kind == "completion" else _chat)(call, body)
    return Judgement((*reply.problems, *problems), note)


def served_models(body: Mapping[str, Any]) -> list[str]:
    """The ids in an answer of /v1/models."""
    data = body.get("data")
    return (
        [str(one["id"]) for one in data if isinstance(one, dict) and "id" in one]
        if isinstance(data, list)
        else []
    )


def json_object(text: str) -> Mapping[str, Any] | None:
    """The JSON object that the text is, None when it is none."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _refusal(reply: Reply) -> Judgement:
    if not 400 <= reply.status < 500:
        return Judgement((f"max_tokens=-1 got HTTP status {reply.status}, not one of 400 to 499",))
    return Judgement(note=f"HTTP status {reply.status}, as it should be")


def _refused(reply: Reply) -> str:
    """An HTTP error in words, with the known cause where there is one."""
    body = json_object(reply.body) or {}
    error = body.get("error")
    message = str(error.get("message") if isinstance(error, dict) else error or reply.body).strip()
    text = f"HTTP status {reply.status}: {' '.join(message.split())[:300]}"
    if reply.status in (401, 403):
        return f"{text} (wrong or missing key: export the server's VLLM_API_KEY)"
    for rule in book().candidates(reply.body.encode("utf-8", errors="replace")):
        if fits(rule, reply.body) and not rule.after and not rule.nearby:
            return f"{text} ({rule.about.id}: {rule.about.fix})"
    return text


def _models(body: Mapping[str, Any], wanted: str | None) -> Judgement:
    names = served_models(body)
    if not names:
        return Judgement(("the list of models is empty",))
    if wanted is not None and wanted not in names:
        return Judgement((f"it serves {', '.join(names)}, not {wanted} (F76)",))
    return Judgement(note=", ".join(names))


def _completion(call: Call, body: Mapping[str, Any]) -> tuple[list[str], str]:
    problems = shape.text_completion(body, call.max_tokens)
    choice = shape.only_choice(body)
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not problems:
        problems += shape.logprobs(values, body["usage"]["completion_tokens"])
    if not problems and not choice["text"]:
        problems.append("the text is empty")
    return problems, _quote(choice.get("text"))


def _chat(call: Call, body: Mapping[str, Any]) -> tuple[list[str], str]:
    problems = shape.chat_completion(body, call.max_tokens)
    choice = shape.only_choice(body)
    message = choice.get("message")
    if not isinstance(message, dict):
        return problems, ""
    content = message.get("content") or ""
    thoughts = message.get("reasoning") or message.get("reasoning_content") or ""
    if call.must_call_tool:
        calls = message.get("tool_calls")
        return problems + shape.tool_call(calls, TOOL_NAME, TOOL_SCHEMA), _quote_call(calls)
    if call.thinks is False and thoughts:
        problems.append("there are thoughts although thinking is off")
    if call.thinks is False and not content:
        problems.append("the content is empty")
    if call.thinks and not thoughts:
        problems.append("there are no thoughts although thinking is on")
    if call.body and call.body.get("logprobs") and not problems:
        about = choice.get("logprobs")
        tokens = about.get("content") if isinstance(about, dict) else None
        values = None
        if isinstance(tokens, list):
            values = [token.get("logprob") if isinstance(token, dict) else None for token in tokens]
        problems += shape.logprobs(values, body["usage"]["completion_tokens"])
    if call.thinks and not content and choice.get("finish_reason") == "length":
        return problems, f"the budget of {call.max_tokens} tokens ended inside the thoughts"
    return problems, _quote(content)


def _quote(text: Any) -> str:
    if not isinstance(text, str) or not text:
        return ""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return f'"{line[:SHOWN]}{"..." if len(line) > SHOWN else ""}"'


def _quote_call(calls: Any) -> str:
    try:
        function = calls[0]["function"]
        return f"{function['name']}({_quote(function['arguments'])[1:-1]})"
    except (LookupError, TypeError):
        return ""
