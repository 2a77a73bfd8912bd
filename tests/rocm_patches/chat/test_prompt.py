"""The end of the prompt, through vLLM's real DeepSeek-V4 encoder."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest

from rocm_patches.chat.prompt import ASSISTANT, END, NO_THINK, THINK
from rocm_patches.patches import tokenizers_deepseek_v4
from tests.rocm_patches.chat.dsml import WEATHER

pytest.importorskip("vllm")

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "Well,"}
THOUGHTS = {"role": "assistant", "content": "", "reasoning": "Hm"}


@pytest.fixture(scope="module")
def stock() -> Any:
    from vllm.tokenizers.deepseek_v4 import get_deepseek_v4_tokenizer

    return getattr(get_deepseek_v4_tokenizer, "__wrapped__", get_deepseek_v4_tokenizer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    from dsv4_deploy import tiny

    directory = tmp_path_factory.mktemp("tokenizer")
    tiny._tokenizer_files(directory)
    return PreTrainedTokenizerFast.from_pretrained(str(directory))


@pytest.fixture(scope="module")
def patched(stock: Any, plain: Any) -> Any:
    return tokenizers_deepseek_v4._ended_as_asked(stock)(plain)


def text(tokenizer: Any, *messages: dict[str, Any], **kwargs: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs))


@pytest.mark.parametrize("thinking", [True, False])
def test_ends(patched: Any, thinking: bool) -> None:
    opening = ASSISTANT + (THINK if thinking else NO_THINK)

    def prompt(*messages: dict[str, Any], add: bool = True, resume: bool = False) -> str:
        kwargs = {"thinking": thinking, "reasoning_effort": "low" if thinking else None}
        return text(patched, *messages, add_generation_prompt=add, continue_final_message=resume, **kwargs)

    assert prompt(USER).endswith("hi" + opening)
    assert prompt(USER, add=False).endswith("hi")
    assert prompt(USER, ANSWER).endswith("Well," + END + opening)
    assert prompt(USER, ANSWER, add=False).endswith("Well," + END)
    for add in (True, False):
        assert prompt(USER, ANSWER, add=add, resume=True).endswith(NO_THINK + "Well,")
    thought = prompt(USER, THOUGHTS, resume=True)
    assert thought.endswith("Hm" if thinking else NO_THINK)
    with pytest.raises(ValueError, match="ends with 'user'"):
        prompt(USER, resume=True)


def test_stock_vllm_heeds_neither(stock: Any, plain: Any) -> None:
    made = stock(plain)
    assert text(made, USER, add_generation_prompt=False) == text(made, USER, add_generation_prompt=True)
    for kwargs in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        assert text(made, USER, ANSWER, **kwargs).endswith("Well," + END)


def test_all_else_is_as_before(stock: Any, plain: Any, patched: Any) -> None:
    """Tools, results, several turns, efforts: the same text where the last message is a user's."""
    made = stock(plain)
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Berlin"}'},
    }
    conversations: list[list[dict[str, Any]]] = [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER],
        [
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        [{"role": "system", "content": "Only me."}],
    ]
    efforts = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
    for messages, effort, thinking, tools in itertools.product(
        conversations, efforts, (True, False, None), (None, [WEATHER])
    ):
        kwargs: dict[str, Any] = {"reasoning_effort": effort, "tools": tools, "add_generation_prompt": True}
        if thinking is not None:
            kwargs["thinking"] = thinking
        assert text(patched, *messages, **kwargs) == text(made, *messages, **kwargs)
        assert patched.apply_chat_template(messages, **kwargs) == made.apply_chat_template(messages, **kwargs)


def test_parser_and_prompt_agree_on_thinking(patched: Any) -> None:
    """For every way to ask, so effort names need no patch: what the prompt opens, the parser expects."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.engine.parser_engine_config import ParserState

    from rocm_patches.chat.parser import StrictDeepSeekV4Parser

    seen = set()
    efforts = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
    switches: list[dict[str, Any]] = [
        {},
        {"thinking": True},
        {"thinking": False},
        {"enable_thinking": False},
        {"enable_thinking": True},
    ]
    for effort, switch in itertools.product(efforts, switches):
        request = ChatCompletionRequest(
            model="tiny", messages=[USER], reasoning_effort=effort, chat_template_kwargs=switch
        )
        kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        opens = text(patched, USER, **kwargs).endswith(THINK)
        parser = StrictDeepSeekV4Parser(patched, chat_template_kwargs=kwargs)
        assert (parser.parser_engine_config.initial_state is ParserState.REASONING) is opens, (effort, switch)
        seen.add(opens)
    assert seen == {True, False}


def test_a_continued_answer_is_content(patched: Any) -> None:
    """Whole and streamed, with its tokens counted as such."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.engine import adapters

    from rocm_patches.chat.parser import StrictDeepSeekV4Parser
    from rocm_patches.patches import parser_deepseek_v4 as patches

    class Reasoning(adapters.ParserEngineReasoningAdapter):
        _parser_engine_cls = StrictDeepSeekV4Parser
        count_reasoning_tokens = patches._counted_with_the_prompt(
            adapters.ParserEngineReasoningAdapter.count_reasoning_tokens
        )

    request = ChatCompletionRequest(model="tiny", messages=[USER, ANSWER])
    for resume, expected in ((True, (None, " yes.", 0)), (False, (" yes.", None, 2))):
        prompt = patched.apply_chat_template(
            [USER, ANSWER], continue_final_message=resume, add_generation_prompt=True
        )
        parser = Reasoning(patched, chat_template_kwargs={})
        parser._parser_engine.set_prompt_token_ids(prompt)
        reasoning, content = parser.extract_reasoning(" yes.", request)
        count = parser.count_reasoning_tokens(patched.encode(" yes.", add_special_tokens=False))
        assert (reasoning, content) == expected[:2]
        assert (count > 0) is (expected[2] > 0)


def test_it_can_be_sent_to_another_process(patched: Any) -> None:
    again = pickle.loads(pickle.dumps(patched))  # noqa: S301 (our own bytes)
    assert text(again, USER) == text(patched, USER)
