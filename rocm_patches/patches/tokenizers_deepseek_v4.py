"""Patches of vllm/tokenizers/deepseek_v4.py, which writes a conversation as DeepSeek-V4's prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target


def _ended_as_asked(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap what makes the tokenizer, whose class is made anew for each one."""

    @functools.wraps(original)
    def get_deepseek_v4_tokenizer(tokenizer: Any) -> Any:
        from rocm_patches.chat import prompt

        made = original(tokenizer)
        stock = type(made)

        class Tokenizer(stock):  # type: ignore[misc, valid-type]
            def apply_chat_template(
                self, messages: list[Any], tools: list[dict[str, Any]] | None = None, **kwargs: Any
            ) -> str | list[int]:
                tokenize = kwargs.pop("tokenize", True)
                text = super().apply_chat_template(messages, tools, tokenize=False, **kwargs)
                switches = [kwargs[name] for name in ("thinking", "enable_thinking") if name in kwargs]
                thinking = any(switches or [True]) and kwargs.get("reasoning_effort") != "none"
                text = prompt.ended_as_asked(
                    text,
                    kwargs.get("conversation", messages),
                    thinking=thinking,
                    add=kwargs.get("add_generation_prompt"),
                    resume=bool(kwargs.get("continue_final_message")),
                )
                if not tokenize:
                    return text
                limits = {name: kwargs[name] for name in ("truncation", "max_length") if name in kwargs}
                ids: list[int] = self.encode(text, add_special_tokens=False, **limits)
                return ids

        Tokenizer.__name__ = stock.__name__
        made.__class__ = Tokenizer
        return made

    return get_deepseek_v4_tokenizer


PATCHES = (
    Patch(
        id="prompt-end",
        title="add_generation_prompt and continue_final_message are heeded",
        symptom="empty or garbled answers to conversations that end with an assistant message; a prefilled "
        "answer is not continued",
        cause="the encoder opens an assistant's turn behind a user's message and nowhere else, and always writes the "
        "end token behind an assistant's",
        remedy="open the turn, leave it closed or continue it as the request says",
        upstream="https://github.com/vllm-project/vllm/issues/46256",
        upstream_state="open, as is its fix https://github.com/vllm-project/vllm/pull/46257",
        drop_when="vLLM's tokenizer reads both",
        platforms=("any",),
        targets=(
            Target("vllm.tokenizers.deepseek_v4", "get_deepseek_v4_tokenizer", _ended_as_asked),
            Target("vllm.tokenizers.deepseek_v4_encoding", "encode_messages"),
            Target("vllm.tokenizers.deepseek_v4_encoding", "render_message"),
        ),
        checked="run with vLLM 0.32.0 on the CPU; needs no GPU",
    ),
)
