"""A streamed answer put together again, with everything that is wrong about the stream itself.

In: the lines of a text/event-stream. Out: the same JSON that the plain answer would have been, and problems.
The format: https://html.spec.whatwg.org/multipage/server-sent-events.html, ended by `data: [DONE]`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

MOST_PROBLEMS = 4


@dataclasses.dataclass
class Stream:
    """Feed it line by line, then ask for the `answer`."""

    chat: bool
    problems: list[str] = dataclasses.field(default_factory=list)
    events: int = 0
    done: bool = False
    _text: str = ""
    _reasoning: str = ""
    _logprobs: list[Any] = dataclasses.field(default_factory=list)
    _calls: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)
    _finish: list[Any] = dataclasses.field(default_factory=list)
    _usage: Any = None

    def feed(self, line: str) -> None:
        """Take one line, without its end."""
        if not line or line.startswith(":"):
            return
        if not line.startswith("data:"):
            self._wrong(f"a line of the stream does not begin with 'data:': {line[:80]!r}")
            return
        data = line.removeprefix("data:").strip()
        if self.done:
            self._wrong("something came after [DONE]")
        elif data == "[DONE]":
            self.done = True
        else:
            self._event(data)

    def _event(self, data: str) -> None:
        self.events += 1
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._wrong(f"an event is not JSON ({error}): {data[:80]!r}")
            return
        if not isinstance(event, dict):
            self._wrong(f"an event is no JSON object: {data[:80]!r}")
            return
        if "error" in event:
            self._wrong(f"an error in the middle of the stream: {str(event['error'])[:200]}")
        self._usage = event.get("usage") or self._usage
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        if choice.get("finish_reason") is not None:
            self._finish.append(choice["finish_reason"])
        delta = choice.get("delta") if self.chat else None
        part = delta if isinstance(delta, dict) else {}
        self._text += str(part.get("content") or "") if self.chat else str(choice.get("text") or "")
        self._reasoning += str(part.get("reasoning") or part.get("reasoning_content") or "")
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("token_logprobs"), list):
            self._logprobs += logprobs["token_logprobs"]
        calls = part.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                known = self._calls.setdefault(int(call.get("index") or 0), {"name": "", "arguments": ""})
                for key in known:
                    known[key] += str(function.get(key) or "")

    def _wrong(self, problem: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)

    def answer(self) -> dict[str, Any]:
        """What the plain answer would have been. Ask when the stream has ended."""
        if not self.done:
            self._wrong("the stream ended without [DONE]")
        if len(self._finish) != 1:
            self._wrong(f"{len(self._finish)} events with a finish_reason instead of one")
        choice: dict[str, Any] = {"finish_reason": self._finish[-1] if self._finish else None}
        if self.chat:
            calls = [{"function": call} for _, call in sorted(self._calls.items())]
            choice["message"] = {
                "role": "assistant",
                "content": self._text,
                "reasoning": self._reasoning,
                "tool_calls": calls,
            }
        else:
            choice |= {"text": self._text, "logprobs": {"token_logprobs": self._logprobs}}
        kind = "chat.completion" if self.chat else "text_completion"
        return {"object": kind, "choices": [choice], "usage": self._usage}
