"""The end of a DeepSeek-V4 prompt as the request wants it. In: the text that vLLM's encoder makes, which looks only
at the last message's role, and the request's `add_generation_prompt` and `continue_final_message`. Out: the text
that opens the assistant's turn, does not, or continues it.

The markers are DeepSeek's: `encoding/` in https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

END = "<｜end▁of▁sentence｜>"
ASSISTANT = "<｜Assistant｜>"
THINK, NO_THINK = "<think>", "</think>"


def ended_as_asked(
    text: str, messages: Sequence[Mapping[str, Any]], thinking: bool, add: bool | None, resume: bool
) -> str:
    """`text` with the end that `add` (add_generation_prompt) and `resume` (continue_final_message) ask for.

    `resume` wins over `add`, whose default is True in vLLM's protocol. `add` None changes nothing. Raises
    ValueError where there is no assistant message to continue; vLLM answers 400 with its text.
    """
    last = messages[-1] if messages else {}
    answered = last.get("role") == "assistant"
    if resume:
        if not answered:
            raise ValueError(
                "continue_final_message needs a conversation that ends with an assistant message; this one "
                f"ends with {last.get('role', 'nothing')!r}."
            )
        text = text.removesuffix(END)
        only_thoughts = last.get("reasoning") and not last.get("content") and not last.get("tool_calls")
        return text.removesuffix(NO_THINK) if thinking and only_thoughts else text
    if add is None or last.get("task") is not None:  # a task ends with a marker of its own
        return text
    opening = ASSISTANT + (THINK if thinking else NO_THINK)
    if add and answered and text.endswith(END):
        return text + opening
    if not add and not answered:
        return text.removesuffix(opening)
    return text
