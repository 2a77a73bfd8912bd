"""Patches of vllm/parser/deepseek_v4.py, which reads reasoning and tool calls out of DeepSeek-V4's output, and of
the places in vllm/parser that keep the prompt from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rocm_patches.registry import Patch, Target

ENGINE = "vllm.parser.engine"


def _strict_parser(original: type) -> type:
    from rocm_patches.chat.parser import StrictDeepSeekV4Parser

    return StrictDeepSeekV4Parser


def _engine_of(parser: Any) -> Any:
    """The parser engine behind a `DelegatingParser`'s reasoning parser, or None."""
    return getattr(parser.reasoning_parser, "_parser_engine", None)


def _prompt_handed_on(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_prompt_token_ids(self: Any, prompt_token_ids: Sequence[int]) -> None:
        original(self, prompt_token_ids)
        if (engine := _engine_of(self)) is not None:
            engine.set_prompt_token_ids(prompt_token_ids)

    return set_prompt_token_ids


def _prompt_noted(original: Callable[..., bool]) -> Callable[..., bool]:
    # vLLM asks this about the prompt, once before it generates and once before it streams.
    @functools.wraps(original)
    def is_reasoning_end(self: Any, input_ids: list[int]) -> bool:
        if (engine := _engine_of(self)) is not None:
            engine.set_prompt_token_ids(input_ids)
        return original(self, input_ids)

    return is_reasoning_end


def _counted_with_the_prompt(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def count_reasoning_tokens(self: Any, token_ids: Sequence[int]) -> int:
        if getattr(self._parser_engine, "_prompt_closes_reasoning", False):
            return 0
        return original(self, token_ids)

    return count_reasoning_tokens


PATCHES = (
    Patch(
        id="dsml-parser",
        title="Tool calls only when they arrived whole, and no DSML in the content",
        symptom="raw <｜DSML｜...> in the content; arguments {} or a part of them as if complete after max_tokens; "
        "invalid JSON (NaN, cut strings); text after an empty block lost; HTTP 500 for deeply nested arguments; an API "
        "server that is busy for a minute with one argument of 30 KB that holds many '>'",
        cause="the state machine has no transitions for closing tags of nothing, unknown tags, empty blocks; the end "
        "of the output closes an open call; a cut tag becomes text; each streamed '>' converts all again",
        remedy="a parser on vLLM's own engine with these transitions, which converts arguments as they arrive and "
        "gives out only calls that were closed",
        upstream="https://github.com/vllm-project/vllm/pull/56184",
        upstream_state="open, for empty blocks and closing tags; https://github.com/vllm-project/vllm/pull/52645 for "
        "malformed wrappers is open too",
        drop_when="the cases of tests/rocm_patches/chat pass with vLLM's own parser",
        platforms=("any",),
        targets=(
            Target("vllm.parser.deepseek_v4", "DeepSeekV4Parser", _strict_parser),
            Target("vllm.parser.deepseek_v4", "deepseek_v4_config"),
            Target(f"{ENGINE}.parser_engine", "ParserEngine"),
            Target(f"{ENGINE}.streaming_parser_engine", "StreamingParserEngine"),
            Target(f"{ENGINE}.incremental_lexer", "IncrementalLexer"),
            Target(f"{ENGINE}.token_id_scanner", "TokenIDScanner"),
            Target(f"{ENGINE}.adapters", "ParserEngineReasoningAdapter"),
            Target(f"{ENGINE}.adapters", "ParserEngineToolAdapter"),
            Target("vllm.parser.abstract_parser", "DelegatingParser"),
            Target("vllm.tool_parsers.utils", "coerce_to_schema_type"),
            Target("vllm.tool_parsers.utils", "extract_types_from_schema"),
            Target("vllm.tool_parsers.utils", "find_tool_properties"),
        ),
        rows=("F73", "F74"),
        checked="run with vLLM 0.32.0 on the CPU; needs no GPU",
    ),
    Patch(
        id="continued-answer",
        title="A continued answer is content, not reasoning",
        symptom="with thinking on and continue_final_message, the whole answer arrives as reasoning, content is empty",
        cause="a parser of whole answers does not look at the prompt, which ends behind </think>",
        remedy="hand the prompt to the parser, as vLLM 0.33.0 does",
        upstream="https://github.com/vllm-project/vllm/issues/46256",
        upstream_state="open; 0.33.0 has the mechanism",
        drop_when="vLLM 0.32.0 is no longer supported",
        platforms=("any",),
        releases=("0.32.0",),
        targets=(
            Target("vllm.parser.abstract_parser", "Parser.set_prompt_token_ids", _prompt_handed_on),
            Target("vllm.parser.abstract_parser", "DelegatingParser.is_reasoning_end", _prompt_noted),
            Target(
                f"{ENGINE}.adapters",
                "ParserEngineReasoningAdapter.count_reasoning_tokens",
                _counted_with_the_prompt,
            ),
        ),
        needs=("dsml-parser",),
        checked="run with vLLM 0.32.0 on the CPU; needs no GPU",
    ),
)
