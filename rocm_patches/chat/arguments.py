"""The arguments of one DSML tool call, turned into JSON while they arrive. In: the text between a call's opening
and its closing tag, in any pieces that leave the tags whole (vLLM's lexer does). Out: pieces of one JSON object,
in the notation of `json.dumps`, whose sum is complete only when the call is.

The format is that of DeepSeek's own encoder (`encoding/` in https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro):

    <｜DSML｜parameter name="city" string="true">Berlin</｜DSML｜parameter>

`string="true"` marks text, anything else JSON. Each piece of text is looked at once, so that a long argument costs
time in proportion to its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

_ATTRIBUTES = re.compile(r'\s+name="(?P<name>[^"]+)"(?P<more>[^>]*)>', re.DOTALL)
_STRING = re.compile(r'\sstring="([^"]*)"')
_QUOTED = re.compile('"[^"]*("|$)')
_SURROGATE = re.compile("[\ud800-\udfff]")
_NEXT_NAME = 'name="'
# What models wrap around the arguments although the format has no such level (vLLM knows the same two).
WRAPPERS = ("arguments", "input")


class Schema(Protocol):
    """What the request says about one function's parameters."""

    names: frozenset[str]  # declared parameters; empty when nothing is known

    def keeps_text(self, name: str) -> bool:
        """Whether a text value stays the text that it is, whatever it says."""

    def is_text(self, name: str) -> bool:
        """Whether text is the only thing that the parameter may be."""

    def fit(self, name: str, value: Any) -> Any:
        """The value in the type that is declared for the parameter."""


def to_json(value: Any) -> str:
    """JSON that can be sent as UTF-8. Raises ValueError for NaN and infinities, RecursionError for depth."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def from_json(text: str) -> Any:
    """What `text` says as JSON, or `text` itself where it is none (NaN, too deep, or not JSON at all)."""
    try:
        value = json.loads(text)
        to_json(value)
    except (ValueError, RecursionError):
        return text
    return value


class Arguments:
    """Feed the pieces of one call, then `end` it. `start` and `close` are the spellings of the parameter tags."""

    def __init__(self, start: Collection[str], close: Collection[str], schema: Schema) -> None:
        self._start, self._close, self._schema = start, close, schema
        self._emitted = False
        self._stray: list[str] = []  # text outside parameters
        self._head: str | None = None  # a parameter's attributes, while they arrive
        self._name: str | None = None  # the open parameter
        self._is_text = self._flows = False
        self._value: list[str] = []  # its value so far, or the end of it that is held back
        self._maybe: tuple[str, str] | None = None  # a start tag inside a value, and what follows it
        self._wrapper: tuple[str, Any] | None = None
        self._broken = False
        self.complete = False

    @property
    def in_parameter(self) -> bool:
        """Whether a parameter is open, inside which every tag but its own is text."""
        return self._head is not None or self._name is not None

    def feed(self, text: str) -> str:
        """Take the next piece; returns what may be sent on, often nothing."""
        if self._maybe is not None:
            return self._feed_maybe(text)
        if self._head is not None:
            return self._feed_head(text)
        if self._name is None:
            if text in self._start:
                self._head = ""
            else:
                self._stray.append(text)
            return ""
        if text in self._close:
            return self._close_value("".join(self._value))
        if text in self._start:
            self._maybe = (text, "")
            return ""
        return self._feed_value(text)

    def end(self) -> str | None:
        """The call was closed. Returns the rest, or None when what came are not its whole arguments."""
        rest = self._rest()
        self.complete = rest is not None
        return rest

    def _rest(self) -> str | None:
        if self._broken or self.in_parameter:
            return None
        if self._wrapper is not None:
            return self._unwrapped()
        if self._emitted:
            return "}"
        stray = "".join(self._stray).strip()
        if not stray:
            return "{}"
        # Some outputs hold the JSON object itself instead of parameters.
        whole = from_json(stray)
        return to_json(self._fitted(whole)) if isinstance(whole, dict) else None

    # --- parameters ---------------------------------------------------------------------------------

    def _feed_head(self, text: str) -> str:
        self._head = (self._head or "") + text
        if ">" not in text:
            return ""
        match = _ATTRIBUTES.match(self._head)
        if match is None:
            self._broken = ">" in _QUOTED.sub("", self._head)  # the tag ended, and this is no parameter
            return ""
        rest, self._head = self._head[match.end() :], None
        said = _STRING.search(match["more"])
        out = self._settle_wrapper()
        self._name, self._is_text = match["name"], bool(said and said[1] == "true")
        lone = not self._emitted and self._name in WRAPPERS and self._name not in self._schema.names
        self._flows = (
            self._is_text and not (lone and self._schema.names) and self._schema.keeps_text(self._name)
        )
        if self._flows:
            out += self._key(self._name) + '"'
        return out + (self._feed_value(rest) if rest else "")

    def _feed_value(self, text: str) -> str:
        if not self._flows:
            self._value.append(text)
            return ""
        # The last newline is held back: before a following parameter it only separates.
        text = "".join(self._value) + text
        body = text[:-1] if text.endswith("\n") else text
        self._value = [text[len(body) :]]
        return to_json(body)[1:-1]

    def _feed_maybe(self, text: str) -> str:
        """A start tag inside a value is a new parameter, whose predecessor was not closed, or just text."""
        assert self._maybe is not None  # noqa: S101 (the caller asked)
        tag, after = self._maybe[0], self._maybe[1] + text
        word = after.lstrip()
        if (after[:1].isspace() or not after) and _NEXT_NAME.startswith(word[: len(_NEXT_NAME)]):
            self._maybe = (tag, after)
            if len(word) < len(_NEXT_NAME):
                return ""
            self._maybe = None
            out = self._close_value("".join(self._value).removesuffix("\n"))
            self._head = ""
            return out + self._feed_head(after)
        self._maybe = None
        return self._feed_value(tag + after[: len(after) - len(text)]) + self.feed(text)

    def _close_value(self, rest: str) -> str:
        name, self._name, self._value = self._name, None, []
        assert name is not None  # noqa: S101 (a value is open)
        if self._flows:
            return to_json(rest)[1:-1] + '"'
        value = rest if self._is_text else from_json(rest)
        if self._schema.is_text(name) and not isinstance(value, str):
            value = rest  # as it was written: 1.10 is not 1.1, and an object is not its Python notation
        if not self._emitted and name in WRAPPERS and self._schema.names and name not in self._schema.names:
            self._wrapper = (name, value)
            return ""
        return self._key(name) + to_json(self._schema.fit(name, value))

    def _key(self, name: str) -> str:
        lead = ", " if self._emitted else "{"
        self._emitted = True
        return f"{lead}{to_json(name)}: "

    # --- wrapped arguments --------------------------------------------------------------------------

    def _settle_wrapper(self) -> str:
        """Another parameter follows, so it was no wrapper."""
        if self._wrapper is None:
            return ""
        (name, value), self._wrapper = self._wrapper, None
        return self._key(name) + to_json(value)

    def _unwrapped(self) -> str:
        assert self._wrapper is not None  # noqa: S101 (the caller asked)
        name, value = self._wrapper
        inner = from_json(value) if isinstance(value, str) else value
        if isinstance(inner, dict) and set(inner) <= set(self._schema.names):
            return to_json(self._fitted(inner))
        return to_json({name: value})

    def _fitted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._schema.fit(name, value) for name, value in arguments.items()}
