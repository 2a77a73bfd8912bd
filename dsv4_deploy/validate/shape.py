"""What an answer of the OpenAI-style API has to look like, whatever the model says.

In: the JSON of an answer, or the events of a stream. Out: problems in words, none when all is well. Where a
number has a meaning (token counts, log-probabilities) the meaning is checked too: a kernel that writes NaN
still answers 200. The API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_NATURAL_ENDS = ("length", "stop")
# DeepSeek-V4 writes tool calls in this markup; the tool parser has to turn all of it into JSON.
_TOOL_MARKUP = "DSML"


def text_completion(body: Mapping[str, Any], max_tokens: int) -> list[str]:
    """Problems of an answer of /v1/completions to one prompt."""
    problems = []
    if body.get("object") != "text_completion":
        problems.append(f"object is {body.get('object')!r}, not 'text_completion'")
    choice = only_choice(body)
    if not isinstance(choice.get("text"), str):
        problems.append("there is not exactly one choice with a text")
    else:
        problems += finish(choice.get("finish_reason"))
    return problems + usage(body.get("usage"), max_tokens)


def chat_completion(body: Mapping[str, Any], max_tokens: int) -> list[str]:
    """Problems of an answer of /v1/chat/completions with one message."""
    problems = []
    if body.get("object") != "chat.completion":
        problems.append(f"object is {body.get('object')!r}, not 'chat.completion'")
    choice = only_choice(body)
    message = choice.get("message")
    if not isinstance(message, dict):
        problems.append("there is not exactly one choice with a message")
    else:
        if message.get("role") != "assistant":
            problems.append(f"the message's role is {message.get('role')!r}, not 'assistant'")
        problems += finish(choice.get("finish_reason"), tools=bool(message.get("tool_calls")))
        if _TOOL_MARKUP in str(message.get("content")):
            problems.append(f"the content holds the model's tool markup ({_TOOL_MARKUP})")
    return problems + usage(body.get("usage"), max_tokens)


def only_choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice of an answer that has exactly one, else an empty mapping."""
    choices = body.get("choices")
    one = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return one if isinstance(one, dict) else {}


def finish(reason: Any, *, tools: bool = False) -> list[str]:
    """Problems of a finish_reason."""
    allowed = (*_NATURAL_ENDS, "tool_calls") if tools else _NATURAL_ENDS
    if reason in allowed:
        return []
    return [f"finish_reason is {reason!r}, not {' or '.join(map(repr, allowed))}"]


def usage(counts: Any, max_tokens: int) -> list[str]:
    """Problems of the token counts."""
    found = [counts[name] for name in _COUNTS if isinstance(counts, dict) and type(counts.get(name)) is int]
    if len(found) != len(_COUNTS):
        return ["usage has no token counts"]
    prompt, completion, total = found
    if prompt < 1 or not 1 <= completion <= max_tokens or prompt + completion != total:
        return [f"the token counts {found} do not fit together"]
    return []


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        # An integer that is larger than any number of the machine.
        return False


def logprobs(values: Any, tokens: int) -> list[str]:
    """Problems of the log-probabilities of `tokens` generated tokens: one each, finite, not above zero."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != tokens:
        count = len(values) if isinstance(values, Sequence) else "no"
        return [f"{count} log-probabilities for {tokens} tokens"]
    bad = [value for value in values if not _is_finite(value)]
    if bad:
        return [
            f"{len(bad)} of {tokens} log-probabilities are not finite numbers, the first is {str(bad[0])[:80]}"
        ]
    # A little above zero is rounding.
    above = [value for value in values if value > 1e-4]
    return (
        [f"{len(above)} of {tokens} log-probabilities are above zero, the first is {above[0]}"]
        if above
        else []
    )


def tool_call(calls: Any, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Problems of a message's tool calls when this one function had to be called."""
    if not isinstance(calls, list) or len(calls) != 1 or not isinstance(calls[0], dict):
        return ["there is not exactly one tool call"]
    function = calls[0].get("function")
    if not isinstance(function, dict) or function.get("name") != name:
        return [f"the tool call is not one of {name!r}: {calls[0]!r}"]
    text = function.get("arguments")
    try:
        arguments = json.loads(text or "")
    except (TypeError, ValueError, RecursionError) as error:
        return [f"the arguments of the tool call are not JSON ({error}): {text!r}"]
    if not isinstance(arguments, dict):
        return [f"the arguments of the tool call are no JSON object: {text!r}"]
    problems = [f"the argument {key!r} is missing" for key in schema["required"] if key not in arguments]
    for key, value in arguments.items():
        allowed = schema["properties"].get(key, {}).get("enum")
        if allowed is None:
            problems.append(f"the argument {key!r} was not asked for")
        elif value not in allowed:
            problems.append(f"the argument {key!r} is {value!r}, not one of {allowed}")
    return problems
