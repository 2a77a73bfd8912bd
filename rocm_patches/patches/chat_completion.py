"""Patches of vllm/entrypoints/openai/chat_completion: why an answer ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

SERVING = "vllm.entrypoints.openai.chat_completion.serving"
PROCESSOR = "vllm.entrypoints.openai.chat_completion.stream_processor"


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    from rocm_patches.chat import finish

    return finish.stream_0_32(original)


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    from rocm_patches.chat import finish

    return finish.whole_0_32(original)


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    from rocm_patches.chat import finish

    return finish.step_0_33(original)


_COMMON: dict[str, Any] = {
    "title": 'finish_reason "tool_calls" only for whole calls',
    "remedy": "say what ended the output unless every call that was given out is whole",
    "platforms": ("any",),
    "rows": ("F74",),
    "checked": "needs no GPU",
}

PATCHES = (
    Patch(
        id="finish-reason",
        symptom='a call cut by max_tokens is reported with finish_reason "tool_calls"; so is "required" without a call',
        cause="the handler of whole answers puts tool_calls over the engine's length; that of streams does so when the "
        "model ends inside a call",
        upstream="https://github.com/arrogance231/deepseek-v4-flash-ablit-mi300x",
        upstream_state="seen there; 0.33.0 tells a cut from an end",
        drop_when="vLLM 0.32.0 is no longer supported",
        releases=("0.32.0",),
        targets=(
            Target(SERVING, "OpenAIServingChat.chat_completion_stream_generator", _stream),
            Target(SERVING, "OpenAIServingChat.chat_completion_full_generator", _whole),
            Target(SERVING, "OpenAIServingChat._make_parser"),
        ),
        **_COMMON,
    ),
    Patch(
        id="finish-reason-stream",
        symptom='a streamed call inside which the model ended is reported with finish_reason "tool_calls"',
        cause="the stream processor asks whether any piece of a call was sent",
        upstream="https://github.com/arrogance231/deepseek-v4-flash-ablit-mi300x",
        upstream_state="cut calls were seen there; no report on vLLM is known",
        drop_when="the stream processor asks the parser whether its calls are whole",
        releases=("0.33.0",),
        targets=(
            Target(PROCESSOR, "ChatStreamProcessor.step", _step),
            Target("vllm.entrypoints.serve.utils.tool_calls_utils", "resolve_finish_reason"),
        ),
        **_COMMON,
    ),
)
