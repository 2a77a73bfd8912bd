"""The rules file is checked like code: every slip in it is reported with its line."""

from __future__ import annotations

import pathlib
import re

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.triage import rules
from tests.triage import logs

GOOD = """\
trouble: [ERROR]
stopping: [shutdown triggered]
start: [vLLM API server version]
rules:
  - id: F01
    kind: cause
    title: it broke
    cause: It was old.
    fix: Take a new one.
    links: [https://example.org/1]
    lines: [it broke ... badly]
    example: |
      before
      >>> it broke very badly
"""


def read(tmp_path: pathlib.Path, text: str) -> rules.Book:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return rules.read(path)


def test_a_rule_with_its_example(tmp_path: pathlib.Path) -> None:
    (rule,) = read(tmp_path, GOOD).rules
    assert rule.lines == (("it broke", "badly"),)
    assert (rule.example, rule.example_line) == (("before", "it broke very badly"), 1)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("title: it broke", "title: it broke.", 7, "no full stop"),
        ("cause: It was old.", "cause: It was old", 8, "full stop"),
        ("kind: cause", "kind: reason", 6, "one of cause, ending, consequence, hint, reference"),
        ("id: F01", "id: X1", 5, "F, W or D and two digits"),
        ("links: [https://example.org/1]", "links: [somewhere]", 10, "https://"),
        ("links: [https://example.org/1]", "links: []", 10, "at least one"),
        ("    lines: [it broke ... badly]\n", "", 5, "needs lines, exit or quiet_s"),
        ("[it broke ... badly]", "[abc]", 11, "four characters"),
        ("[it broke ... badly]", "[it bröke]", 11, "ASCII"),
        (">>> it", "it", 12, "exactly one line"),
        ("      before", "      >>> before", 12, "exactly one line"),
        ("    kind: cause\n", "    kind: cause\n    exit: [137]\n", 5, "for causes and endings with after"),
        ("    kind: cause\n", "    kind: cause\n    exit: [many]\n    after: [loading]\n", 7, "exit code"),
        ("    kind: cause\n", "    kind: cause\n    possible: [F99]\n", 7, "no rule 'F99'"),
        ("    kind: cause\n", "    kind: cause\n    colour: red\n", 7, "unknown key 'colour'"),
        ("    fix: Take a new one.\n", "", 5, "'fix' is missing"),
        ("trouble: [ERROR]\n", "", 1, "'trouble' is missing"),
        ("kind: cause", "kind: [cause", 7, "expected"),
    ],
)
def test_a_slip_is_named_with_its_line(
    tmp_path: pathlib.Path, old: str, new: str, line: int, words: str
) -> None:
    assert old in GOOD
    with pytest.raises(DeployError) as raised:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert raised.value.what.startswith(f"rules.yaml, line {line}: "), raised.value.what
    assert words in raised.value.what


def test_an_id_listed_twice(tmp_path: pathlib.Path) -> None:
    again = GOOD + GOOD[GOOD.index("  - id") :]
    with pytest.raises(DeployError, match="line 15: F01 is listed twice"):
        read(tmp_path, again)


def test_words_have_to_come_in_order() -> None:
    words = (("one", "two"), ("three",))
    assert rules.holds(words, "one and two")
    assert rules.holds(words, "three")
    assert not rules.holds(words, "two and one")
    assert not rules.holds((("aa", "aa"),), "aa b")


def test_every_line_of_a_rule_is_found_by_the_quick_search() -> None:
    """The search by the rarest end of a word may find too much, never too little."""
    book = rules.book()
    for rule in book.rules:
        for words in (*rule.lines, *rule.after, *rule.until):
            line = " something ".join(words).encode()
            assert book.wanted().search(line), line
            assert book.wanted(unknown=False).search(line), line
            assert rule in book.candidates(line), line


def test_a_healthy_server_is_skipped_quickly() -> None:
    """What keeps 200 MB under five seconds: the lines that a server writes all day hold none of the words."""
    book = rules.book()
    noise = [line for line in logs.chatter(50) if book.wanted().search(line.encode())]
    assert noise == []


def test_texts_are_for_people() -> None:
    for rule in rules.book().rules:
        about = rule.about
        assert 15 < len(about.title) < 90, about
        assert len(about.cause) < 260, about
        assert len(about.fix) < 260, about
        assert not re.search(r"\bTODO\b|\bfoo\b", f"{about.cause} {about.fix}")
