"""vLLM's DeepSeek-V4 parser, made strict. In: the model's text and tokens, in any pieces. Out: reasoning, content
and tool calls, where a call that did not arrive whole is never given out as one, arguments are always valid JSON,
and no DSML tag reaches the content. vLLM 0.32.0 and 0.33.0 have the same `vllm/parser/deepseek_v4.py`.

The state machine stays vLLM's (`ParserEngineConfig`); this file adds transitions for tags at wrong places and converts
arguments with `rocm_patches.chat.arguments`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.logger import init_logger
from vllm.parser import deepseek_v4 as upstream
from vllm.parser.engine.events import EventType, SemanticEvent
from vllm.parser.engine.parser_engine_config import ParserEngineConfig, ParserState, Transition
from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
from vllm.parser.engine.token_id_scanner import DROP_TERMINAL
from vllm.tool_parsers.utils import coerce_to_schema_type, extract_types_from_schema, find_tool_properties

from rocm_patches.chat import arguments

logger = init_logger("vllm.rocm_patches")

CONTENT, PREAMBLE = ParserState.CONTENT, ParserState.TOOL_PREAMBLE
NAME, ARGS = ParserState.TOOL_NAME, ParserState.TOOL_ARGS
# The wrapper of DeepSeek-V3.2, which V4 falls back to: https://github.com/sgl-project/sglang/issues/40236
OLD_WRAPPER = "function_calls"


def _spellings(*texts: str) -> tuple[str, ...]:
    """With the ASCII bars that were seen too: https://github.com/cline/cline/issues/13348"""
    return (*texts, *(text.replace("｜", "|") for text in texts))


def spellings_of(config: ParserEngineConfig, terminal: str) -> tuple[str, ...]:
    value = config.terminals[terminal]
    return (value,) if isinstance(value, str) else tuple(value)


def strict_config(config: ParserEngineConfig) -> ParserEngineConfig:
    """vLLM's description of the format with the missing spellings and transitions.

    The additional terminals are what all tags begin with; the lexer takes them where no known tag follows.
    """

    def known(name: str) -> tuple[str, ...]:
        return spellings_of(config, name)

    def renamed(name: str) -> tuple[str, ...]:
        return tuple(one.replace("tool_calls", OLD_WRAPPER) for one in known(name) if "tool_calls" in one)

    closers = tuple(one.replace("<", "</", 1) for one in known("TOOL_START"))
    terminals = {
        **config.terminals,
        "TOOL_START": _spellings(*known("TOOL_START"), *renamed("TOOL_START")),
        "TOOL_END": _spellings(*dict.fromkeys((*known("TOOL_END"), *renamed("TOOL_END"), *closers))),
        "INVOKE_NAME_END": (*known("INVOKE_NAME_END"), '" >'),
        "DSML_TAG": _spellings("<｜DSML｜", "</｜DSML｜"),
        "DSML_MARK": _spellings("｜DSML｜"),
        **{
            name: _spellings(*known(name))
            for name in ("INVOKE_PREFIX", "INVOKE_END", "PARAM_START", "PARAM_CLOSE")
        },
    }
    stay, dropped = Transition(CONTENT), Transition(PREAMBLE)
    return dataclasses.replace(
        config,
        terminals=terminals,
        transitions={
            **config.transitions,
            # A block without a call is nothing: what follows it is content.
            (PREAMBLE, "TOOL_END"): stay,
            # Closing tags of nothing.
            (CONTENT, "TOOL_END"): stay,
            (CONTENT, "INVOKE_END"): stay,
            (CONTENT, "PARAM_CLOSE"): stay,
            # A parameter of no call is dropped whole.
            (CONTENT, "PARAM_START"): dropped,
            (PREAMBLE, "PARAM_CLOSE"): stay,
            # Unknown tags, of which the engine below drops the rest, and the bare mark. The lines for the
            # preamble make vLLM count both among the terminals of tool calls.
            (CONTENT, "DSML_TAG"): stay,
            (CONTENT, "DSML_MARK"): stay,
            (PREAMBLE, "DSML_TAG"): dropped,
            (PREAMBLE, "DSML_MARK"): dropped,
        },
        # Reasoning is open or closed as the last turn left it, whatever an earlier one did.
        turn_boundary_tokens=frozenset({"<｜User｜>", "<｜Assistant｜>"}),
    )


class StrictEngine(StreamingParserEngine):
    """vLLM's engine, which also knows whether it is inside a parameter, and at the end, inside a call."""

    state: ParserState
    in_parameter = False
    in_unknown_tag = False
    in_calls = False
    cut_off = False  # the output ended inside a call

    def reset(self, initial_state: ParserState | None = None) -> None:
        super().reset(initial_state)
        self.in_parameter = self.in_unknown_tag = self.in_calls = self.cut_off = False

    def _on_terminal(self, terminal: str, value: str, token_count: int = 0) -> list[SemanticEvent]:
        if self.state is ARGS and terminal != DROP_TERMINAL:
            if terminal in ("PARAM_START", "PARAM_CLOSE"):
                self.in_parameter = terminal == "PARAM_START"
            elif self.in_parameter:  # a value is text up to its own closing tag
                return self._emit_for_state(value, token_count)
            elif terminal == "INVOKE_PREFIX":  # the next call begins, this one was not closed
                begin = Transition(NAME, (EventType.TOOL_CALL_END, EventType.TOOL_CALL_START))
                return self._apply_transition(begin, value, token_count)
        if self.state is PREAMBLE and self.tool_index >= 0 and terminal in ("TOOL_END", "PARAM_CLOSE"):
            self.state = ParserState.TOOL_BETWEEN  # behind a call, nothing is content any more
            return []
        if self.skip_tool_parsing and terminal != DROP_TERMINAL:
            # vLLM's pass for reasoning. From the first call on, all of it is for the pass that reads calls.
            called, opens = self.in_calls, terminal in ("TOOL_START", "INVOKE_PREFIX")
            self.in_calls = called or (opens and (self.state, terminal) in self.config.transitions)
            if self.state is CONTENT and (called or terminal in self._tool_terminals):
                return [SemanticEvent(EventType.TEXT_CHUNK, value=value, tool_index=self.tool_index)]
        if (
            self.state is CONTENT
            and self.in_unknown_tag
            and (CONTENT, terminal) not in self.config.transitions
        ):
            return self._emit_for_state(value, token_count)
        self.in_unknown_tag = terminal == "DSML_TAG" and self.state is CONTENT
        return super()._on_terminal(terminal, value, token_count)

    def _emit_for_state(self, text: str, token_count: int = 0) -> list[SemanticEvent]:
        if self.in_unknown_tag and self.state is CONTENT:
            end = next((i for i, char in enumerate(text) if char in ">\n"), None)
            if end is None:
                return []
            self.in_unknown_tag = False
            text = text[end + (text[end] == ">") :]
            if not text:
                return []
        return super()._emit_for_state(text, token_count)

    def finish(self) -> list[SemanticEvent]:
        events = self._process_scanner_items(self._scanner.flush_pending())
        events += self._process_lex_tokens(self._lexer.flush())
        self._record_reasoning_tokens(events)
        if self.state in (NAME, ARGS):
            self.cut_off, self.state = True, CONTENT
        return events + super().finish()


def _declared(schema: Any) -> set[str] | None:
    """JSON types that a schema allows, None where it does not say ({}, $ref, const, ...)."""
    if not isinstance(schema, Mapping):
        return None
    parts = [part for word in ("anyOf", "oneOf", "allOf") for part in schema.get(word) or []]
    if "type" not in schema and not schema.get("enum") and not parts:
        return None
    if any(_declared(part) is None for part in parts):
        return None
    return set(extract_types_from_schema(dict(schema)))


_JSON_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}


def _fit(value: Any, schema: Any) -> Any:
    """`value` in the type that its schema declares; unchanged where that says nothing or cannot be met."""
    if isinstance(value, dict):
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return {k: _fit(v, (properties or {}).get(k)) for k, v in value.items()}
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_fit(v, items) for v in value]
    types = _declared(schema)
    if types is None or types.intersection(_JSON_TYPES.get(type(value), ())):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        fitted = coerce_to_schema_type(text, list(types))
        arguments.to_json(fitted)
    except (ValueError, RecursionError):
        return value
    return fitted


class ToolSchema:
    """`arguments.Schema` of one function of the request."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._properties = properties
        self.names = frozenset(properties)

    def keeps_text(self, name: str) -> bool:
        types = _declared(self._properties.get(name))
        return types is None or "string" in types

    def is_text(self, name: str) -> bool:
        return _declared(self._properties.get(name)) == {"string"}

    def fit(self, name: str, value: Any) -> Any:
        return _fit(value, self._properties.get(name))


@functools.cache
def deepseek_v4_config(thinking: bool = False) -> ParserEngineConfig:
    return strict_config(upstream.deepseek_v4_config(thinking=thinking))


class StrictDeepSeekV4Parser(upstream.DeepSeekV4Parser):
    """The parser that stands in for vLLM's `DeepSeekV4Parser`."""

    parser_config = staticmethod(deepseek_v4_config)

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None, **kwargs: Any) -> None:
        self._arguments: dict[int, arguments.Arguments] = {}
        self._whole: dict[int, list[str]] = {}  # JSON of calls so far
        self._ended: set[int] = set()
        self._failed = False
        self._prompt_closes_reasoning = False
        super().__init__(tokenizer, tools, **kwargs)
        self._engine = StrictEngine(self.parser_engine_config, tokenizer, vocab=self.vocab)

    @property
    def incomplete_call(self) -> bool:
        """Whether a call was begun and did not arrive whole."""
        return self._failed or (self._engine.cut_off and not self._suppress_tool_calls)

    # --- the prompt ---------------------------------------------------------------------------------

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """A prompt that ends behind `</think>`, as a continued answer does, leaves nothing to reason."""
        reasons = self.parser_engine_config.initial_state is ParserState.REASONING
        self._prompt_closes_reasoning = reasons and self.is_reasoning_end(list(prompt_token_ids))

    def _reset(self, initial_state: ParserState | None = None) -> None:
        closed = initial_state is None and self._prompt_closes_reasoning
        super()._reset(CONTENT if closed else initial_state)
        if closed:
            self._reasoning_ended = True
        self._arguments.clear()
        self._whole.clear()
        self._ended.clear()
        self._failed = False

    def _preprocess_feed(self, delta_text: str, delta_token_ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Without end tokens that the detokenizer left out: vLLM's scanner would wait for their text and lose
        the count of the tokens before them."""
        ids = list(delta_token_ids)
        while ids and self._engine._resolved_token_ids.get(ids[-1]) == DROP_TERMINAL:
            if self._engine._scanner._decode_token(ids[-1]) in delta_text:
                break
            ids.pop()
        return delta_text, ids

    # --- calls --------------------------------------------------------------------------------------

    def _accept_tool_name(self, name: str) -> bool:
        return super()._accept_tool_name(name) and not set(name) & set('"<>\n')

    def _arguments_of(self, index: int) -> arguments.Arguments:
        if index not in self._arguments:
            config, name = self.parser_engine_config, self._tool_slots[index].name.strip()
            self._arguments[index] = arguments.Arguments(
                spellings_of(config, "PARAM_START"),
                spellings_of(config, "PARAM_CLOSE"),
                ToolSchema(find_tool_properties(self._tools, name) or {}),
            )
        return self._arguments[index]

    def _send(self, index: int, text: str, deltas: list[DeltaToolCall]) -> None:
        """A call's name goes out with the first piece of its arguments, never alone."""
        slot = self._tool_slots[index]
        slot.name = slot.name.strip()
        if not text or not self._accept_tool_name(slot.name):
            return
        self._whole.setdefault(index, []).append(text)
        delta = DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=text))
        if not slot.name_sent:
            slot.name_sent = True
            self._ensure_tool_id(slot, slot.name)
            delta = DeltaToolCall(
                index=index,
                id=slot.id,
                type="function",
                function=DeltaFunctionCall(name=slot.name, arguments=text),
            )
        deltas.append(delta)

    def _handle_arg_chunk(self, event: SemanticEvent, deltas: list[DeltaToolCall]) -> None:
        if event.value:
            self._send(event.tool_index, self._arguments_of(event.tool_index).feed(event.value), deltas)

    def _handle_tool_end(self, event: SemanticEvent, deltas: list[DeltaToolCall]) -> None:
        index = event.tool_index
        if index >= len(self._tool_slots) or index in self._ended:
            return  # vLLM's engine reports the last call's end once more when the output ends
        self._ended.add(index)
        rest = self._arguments_of(index).end()
        name = self._tool_slots[index].name.strip()
        if rest is None or not self._accept_tool_name(name):
            logger.warning("A tool call did not arrive whole and is left out: %.80r", name)
            self._failed = True
            return
        self._send(index, rest, deltas)

    def _build_extracted_result(self, *deltas: Any) -> ExtractedToolCallInformation:
        calls = []
        for index in sorted(self._ended):
            slot = self._tool_slots[index]
            text = "".join(self._whole.get(index, ()))
            if slot.name_sent and self._arguments_of(index).complete:
                call = FunctionCall(name=slot.name, arguments=text)
                calls.append(ToolCall(id=slot.id, function=call))
        content = "".join(delta.content for delta in deltas if delta is not None and delta.content)
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=calls,
            content=self._strip_content_whitespace(content, bool(calls)),
        )
