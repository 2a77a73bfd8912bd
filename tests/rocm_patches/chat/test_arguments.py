"""The incremental conversion of arguments, without vLLM: any pieces, one sum."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from rocm_patches.chat.arguments import Arguments
from tests.rocm_patches.chat.dsml import D, param

START, CLOSE = f"<{D}parameter", f"</{D}parameter>"


class Anything:
    """A schema that declares nothing."""

    names: frozenset[str] = frozenset()

    def keeps_text(self, name: str) -> bool:
        return True

    def is_text(self, name: str) -> bool:
        return False

    def fit(self, name: str, value: Any) -> Any:
        return value


class OnlyHeld(Anything):
    """A schema whose text values may become something else, so that none may be sent early."""

    names = frozenset({"a"})

    def keeps_text(self, name: str) -> bool:
        return False

    def fit(self, name: str, value: Any) -> Any:
        return int(value)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """As vLLM's lexer hands it on: the two tags whole, all else in any pieces."""
    out: list[str] = []
    turn = 0
    while text:
        tag = next((tag for tag in (START, CLOSE) if text.startswith(tag)), None)
        size = (
            len(tag)
            if tag
            else min(
                cuts[turn % len(cuts)], *(at for t in (START, CLOSE) if (at := text.find(t)) > 0), len(text)
            )
        )
        out.append(text[:size])
        text = text[size:]
        turn += 1
    return out


def convert(text: str, cuts: list[int] | None = None, schema: Any = None) -> str | None:
    arguments = Arguments((START,), (CLOSE,), schema or Anything())
    out = [arguments.feed(piece) for piece in pieces(text, cuts or [1])]
    rest = arguments.end()
    assert arguments.complete is (rest is not None)
    return None if rest is None else "".join(out) + rest


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(blacklist_characters='"', blacklist_categories=("Cs",)), min_size=1, max_size=8)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.dictionaries(NAMES, VALUES, max_size=4), st.lists(st.integers(1, 6), min_size=1))
def test_what_the_encoder_writes_is_read_back(meant: dict[str, Any], cuts: list[int]) -> None:
    """Written as DeepSeek's encoder does; vLLM's json.dumps notation, whatever the pieces."""
    hypothesis.assume(not any(isinstance(v, str) and (START in v or CLOSE in v) for v in meant.values()))
    written = "\n".join(
        param(
            name, value if isinstance(value, str) else json.dumps(value), str(isinstance(value, str)).lower()
        )
        for name, value in meant.items()
    )
    assert convert(f"\n{written}\n", cuts) == json.dumps(meant, ensure_ascii=False).encode(
        errors="surrogatepass"
    ).decode(errors="replace")


def test_text_flows_out_before_its_end() -> None:
    arguments = Arguments((START,), (CLOSE,), Anything())
    sent = "".join(arguments.feed(piece) for piece in (START, ' name="a" string="true">', "Ber", "lin"))
    assert sent == '{"a": "Berlin'


def test_text_that_may_become_a_number_is_held() -> None:
    arguments = Arguments((START,), (CLOSE,), OnlyHeld())
    assert [arguments.feed(piece) for piece in (START, ' name="a" string="true">', "1", "2")] == [""] * 4
    assert arguments.feed(CLOSE) == '{"a": 12'


@pytest.mark.parametrize(
    "text",
    [
        f'{START} name="a" string="true">x',
        f"{START} name=",
        f"{START}>x{CLOSE}",
        "prose",
        '["a list"]',
        START,
    ],
)
def test_what_is_not_whole_has_no_end(text: str) -> None:
    assert convert(text) is None


def test_nothing_is_kept_of_what_was_sent() -> None:
    """So a piece costs as much late as early; vLLM 0.32.0 converts everything again at each ">"."""
    arguments = Arguments((START,), (CLOSE,), Anything())
    for piece in (START, ' name="a" string="true">', *["<b>1 > 0</b>\n"] * 1000):
        arguments.feed(piece)
    assert len("".join((*arguments._value, *arguments._stray))) <= 1
