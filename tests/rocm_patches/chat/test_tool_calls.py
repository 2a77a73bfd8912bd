"""Tool calls through vLLM's real parsers, tokenizer and incremental detokenizer, whole and streamed at every split.

No model runs here: each case is a text that a model might produce (dsml.py). The same cases go through a real server in
tests/e2e/test_forced_output.py.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from dsv4_deploy import tiny
from tests.rocm_patches.chat import dsml
from tests.rocm_patches.chat.dsml import CASES, Case, D

pytest.importorskip("vllm")

EOS = 1


@dataclass(frozen=True)
class Got:
    """What a client has in the end. `calls` holds what was given out as whole calls; `begun` the others' texts."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, str], ...]
    begun: tuple[tuple[str, str], ...]
    incomplete: bool
    reasoning_tokens: int


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny checkpoint's tokenizer in vLLM's DeepSeek-V4 mode: short words, so that tags split at many places."""
    from vllm.tokenizers.deepseek_v4 import DeepseekV4Tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tiny._tokenizer_files(Path(directory))
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG))
    return DeepseekV4Tokenizer.from_pretrained(str(directory))


@functools.cache
def parser_class(stock: bool) -> type:
    """What `ParserManager.get_parser` composes for --reasoning-parser and --tool-call-parser deepseek_v4."""
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter

    from rocm_patches.chat.parser import StrictDeepSeekV4Parser

    engine = StrictDeepSeekV4Parser.__mro__[1] if stock else StrictDeepSeekV4Parser

    class Reasoning(ParserEngineReasoningAdapter):
        _parser_engine_cls = engine

    class Tools(ParserEngineToolAdapter):
        _parser_engine_cls = engine
        structural_tag_model = "deepseek_v4"

    class Parser(DelegatingParser):
        reasoning_parser_cls = Reasoning
        tool_parser_cls = Tools

    return Parser


def request_of(case: Case) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "chat_template_kwargs": {"thinking": case.thinking},
    }
    if case.tools:
        named = {"type": "function", "function": {"name": "get_weather"}}
        fields["tools"] = [dsml.WEATHER, dsml.CLOCK]
        fields["tool_choice"] = named if case.choice == "named" else case.choice
    return ChatCompletionRequest(**fields)


class Session:
    """One request of a case: its prompt, and a fresh parser."""

    def __init__(self, tokenizer: Any, case: Case, stock: bool) -> None:
        self.tokenizer, self.request = tokenizer, request_of(case)
        kwargs = self.request.build_chat_params(None, "auto").chat_template_kwargs
        messages = [dict(message) for message in self.request.messages]
        self.prompt = tokenizer.apply_chat_template(messages, **kwargs)
        self.parser = parser_class(stock)(tokenizer, self.request.tools, chat_template_kwargs=kwargs)
        self.tokens = [*tokenizer.encode(case.text, add_special_tokens=False), EOS]

    @property
    def incomplete(self) -> bool:
        return bool(getattr(self.parser.tool_parser._parser_engine, "incomplete_call", False))

    def whole(self, text: str) -> Got:
        self.parser.is_reasoning_end(self.prompt)  # vLLM asks before it generates
        reasoning, content, calls = self.parser.parse(text, self.request, True, self.tokens)
        given = tuple((call.name, call.arguments) for call in calls or ())
        return Got(
            reasoning,
            content or None,
            given,
            (),
            self.incomplete,
            self.parser.count_reasoning_tokens(self.tokens),
        )

    def streamed(self, deltas: Iterable[tuple[str, list[int], bool]]) -> Got:
        reasoning = content = ""
        names: dict[int, str] = {}
        texts: dict[int, str] = {}
        for text, tokens, last in deltas:
            delta = self.parser.parse_delta(text, tokens, self.request, self.prompt, finished=last)
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                if call.id:
                    assert call.index not in names, "a call's id is sent once"
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                texts[call.index] = texts.get(call.index, "") + (call.function.arguments or "")
        sent = [(names[index], texts[index]) for index in sorted(names)]
        given = tuple(call for call in sent if is_json(call[1]))
        begun = tuple(call for call in sent if not is_json(call[1]))
        count = self.parser.count_reasoning_tokens(self.tokens)
        return Got(reasoning or None, content or None, given, begun, self.incomplete, count)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@functools.cache
def detokenized(tokenizer: Any, tokens: tuple[int, ...]) -> tuple[str, list[int]]:
    """The text and its length after each token, by the detokenizer that vLLM's engine streams with."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    parameters = SamplingParams(skip_special_tokens=False)
    request = SimpleNamespace(
        sampling_params=parameters, prompt_token_ids=[20], prompt_embeds=None, request_id="test"
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)  # type: ignore[arg-type]
    lengths = []
    for token in tokens:
        detokenizer.update([token], stop_terminated=token == EOS)
        lengths.append(len(detokenizer.get_next_output_text(finished=True, delta=False)))
    return detokenizer.get_next_output_text(finished=True, delta=False), lengths


def deltas(
    tokenizer: Any, tokens: Sequence[int], sizes: Iterable[int]
) -> Iterable[tuple[str, list[int], bool]]:
    """(text, tokens, last) as vLLM's engine hands them to the parser, in pieces of so many tokens."""
    text, lengths = detokenized(tokenizer, tuple(tokens))
    at = sent = 0
    for size in sizes:
        end = min(at + size, len(tokens))
        if end == at:
            return
        yield text[sent : lengths[end - 1]], list(tokens[at:end]), end == len(tokens)
        at, sent = end, lengths[end - 1]


def splits(tokens: Sequence[int]) -> list[list[int]]:
    """One token at a time; every two pieces; pieces of 2, 3, 5 and 7 tokens, as speculation gives."""
    n = len(tokens)
    pairs = [[k, n - k] for k in range(1, n)] if n < 400 else [[k, n - k] for k in range(1, n, n // 20)]
    return [[1] * n, *pairs, *([size] * n for size in (2, 3, 5, 7))]


def wrong(case: Case, got: Got) -> list[str]:
    """In what `got` is not what the case asks for."""
    found = []
    if got.content != case.content:
        found.append(f"content {got.content!r}")
    if D in (got.content or "") or D.replace("｜", "|") in (got.content or ""):
        found.append("DSML in the content")
    if (got.reasoning or None) != case.reasoning:
        found.append(f"reasoning {got.reasoning!r}")
    try:
        calls = [(name, json.loads(text, parse_constant=fail)) for name, text in got.calls]
        for _, text in got.calls:
            text.encode()
    except ValueError as error:
        return [*found, f"arguments: {error}"]
    if calls != case.calls:
        found.append(f"calls {calls!r:.300}")
    if got.begun and not case.incomplete:
        found.append(f"begun, not ended: {got.begun!r:.300}")
    if got.incomplete != case.incomplete:
        found.append(f"incomplete: {got.incomplete}")
    return found


def fail(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def trial(tokenizer: Any, case: Case, stock: bool) -> dict[str, list[str]]:
    """What is wrong, for the whole text and for each way to stream it. An exception counts."""

    def attempt(run: Any) -> list[str]:
        try:
            got: Got = run()
        except Exception as error:
            return [f"{type(error).__name__}: {error!s:.80}"]
        problems = wrong(case, got)
        if not problems and not stock:
            counts.add(got.reasoning_tokens)
        return problems

    counts: set[int] = set()
    session = Session(tokenizer, case, stock)
    results = {"whole": attempt(lambda: session.whole(case.text))}
    for sizes in splits(session.tokens):
        other = Session(tokenizer, case, stock)
        results[f"streamed as {sizes[:2]}"] = attempt(
            lambda: other.streamed(deltas(tokenizer, other.tokens, sizes))  # noqa: B023 (run at once)
        )
    if len(counts) > 1:
        results["counts"] = [f"reasoning tokens differ: {sorted(counts)}"]
    return {how: problems for how, problems in results.items() if problems}


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
    assert len({case.id for case in CASES}) == len(CASES)
    assert {case.choice for case in CASES} == {"none", "auto", "named", "required"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_split_gives_what_was_meant(tokenizer: Any, case: Case) -> None:
    assert trial(tokenizer, case, stock=False) == {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_stock_vllm_does(tokenizer: Any, case: Case) -> None:
    """So that we see what the patch is for, and when it can go. `incomplete` is not known to stock vLLM, which must
    then at least not give out a call."""
    session = Session(tokenizer, case, stock=True)
    problems: list[str] = []
    for sizes in (None, [1] * len(session.tokens)):
        session = Session(tokenizer, case, stock=True)
        try:
            if sizes is None:
                got = session.whole(case.text)
            else:
                got = session.streamed(deltas(tokenizer, session.tokens, sizes))
        except RecursionError:
            problems.append("RecursionError")
            continue
        problems += [one for one in wrong(case, got) if not one.startswith("incomplete")]
    assert (problems == []) is case.stock, problems


CUT = "I look.\n\n" + dsml.block(dsml.CALL)


def test_a_call_cut_anywhere_is_incomplete_and_leaves_no_dsml(tokenizer: Any) -> None:
    """As max_tokens cuts it, at every token: nothing is given out as a call before its closing tag is there."""
    case = Case("cut", CUT, content="I look.\n\n")
    tokens = tokenizer.encode(CUT, add_special_tokens=False)
    _, lengths = detokenized(tokenizer, tuple(tokens))
    begins, closed = (
        CUT.index('invoke name="') + len('invoke name="'),
        CUT.index(f"</{D}invoke>") + len(f"</{D}invoke>"),
    )
    seen = set()
    for count in range(1, len(tokens)):
        text = CUT[: lengths[count - 1]]
        for stream in (False, True):
            session = Session(tokenizer, case, stock=False)
            pieces = deltas(tokenizer, tokens[:count], [1] * count)
            got = session.streamed(pieces) if stream else session.whole(text)
            assert D not in (got.content or ""), text
            assert case.content.startswith((got.content or "").removesuffix("<")), text
            assert (len(got.calls) == 1) is (len(text) >= closed), text
            assert got.incomplete is (begins <= len(text) < closed), text
            seen.add((got.incomplete, len(got.calls)))
    assert seen == {(False, 0), (True, 0), (False, 1)}


FRAGMENTS = st.sampled_from(
    [
        dsml.BERLIN, dsml.param("days", "3", "false"), dsml.param("tags", "[1", None), dsml.CALL, dsml.block(dsml.CALL),
        f"<{D}tool_calls>", f"</{D}tool_calls>", f'<{D}invoke name="clock">', f"</{D}invoke>", f"<{D}parameter",
        f"</{D}parameter>", f"<{D}", D, "<", '">', '" >', " name=", "text", "\n", ">", "杭",
    ]
)  # fmt: skip


@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.lists(FRAGMENTS, max_size=12), st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_any_sequence_of_tags(tokenizer: Any, fragments: list[str], sizes: list[int], thinking: bool) -> None:
    """Whole and streamed say the same, the content holds no DSML, and what is given out is JSON."""
    case = Case("any", "Hm.</think>" * thinking + "".join(fragments), thinking=thinking)
    whole = Session(tokenizer, case, stock=False).whole(case.text)
    session = Session(tokenizer, case, stock=False)
    sizes = (sizes * len(session.tokens))[: len(session.tokens)]
    streamed = session.streamed(deltas(tokenizer, session.tokens, sizes))
    for got in (whole, streamed):
        assert D not in (got.content or "")
        assert all(isinstance(json.loads(text), dict) for _, text in got.calls)
    assert whole.calls == streamed.calls
    assert whole.incomplete == streamed.incomplete
    assert (whole.content or "").strip() == (streamed.content or "").strip()
    assert whole.reasoning == streamed.reasoning


def test_the_patched_vllm_uses_it() -> None:
    """Where vLLM looks the parser up, after the plugin's entry point ran."""
    script = (
        "from rocm_patches import plugin; plugin.register()\n"
        "from vllm.parser.parser_manager import ParserManager\n"
        "made = ParserManager.get_parser('deepseek_v4', 'deepseek_v4', enable_auto_tools=True)\n"
        "print([c._parser_engine_cls.__name__ for c in (made.reasoning_parser_cls, made.tool_parser_cls)])\n"
        "from rocm_patches import registry\n"
        "from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as chat\n"
        "print(registry.patches_of(chat.chat_completion_full_generator))\n"
        "from vllm.parser.abstract_parser import Parser\n"
        "print(registry.patches_of(Parser.set_prompt_token_ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert "['StrictDeepSeekV4Parser', 'StrictDeepSeekV4Parser']" in done.stdout, done.stderr
    assert "('finish-reason',)" in done.stdout
    assert "('continued-answer',)" in done.stdout
