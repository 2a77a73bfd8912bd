"""The known failures as data: reads and checks rules.yaml, which says how to write one.

In: the YAML file. Out: a `Book` of frozen rules, and the pattern of bytes that finds the lines worth a closer
look. Anything wrong in the file is reported with its line.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Literal, cast, get_args

from dsv4_deploy.catalog.document import Node, load
from dsv4_deploy.triage.diagnosis import Cause

RULES_FILE = pathlib.Path(__file__).with_name("rules.yaml")
MARK = ">>> "
"""Stands before the line of an example that triage has to name."""

Kind = Literal["cause", "ending", "consequence", "hint", "reference"]
Words = tuple[tuple[str, ...], ...]
"""Alternatives; the words of each have to stand in one line, in this order."""

# The characters of vLLM's logs, the rarest first, counted over starts and requests of 0.32.0 on the CPU.
_RARITY = "!#$&@QYZ\\~+?JX|>;<j*{}%BHK\"^VzU`GqLDxCWw6METR7Sb9Afk)(8O[F]P-'N5y,I=/v4gmh.30_2ucld:1psanoitre "

_ESCAPED = re.compile(r'["\\]')


@dataclasses.dataclass(frozen=True)
class Rule:
    """One known failure; the head of rules.yaml describes the fields. `example` is a piece of a log and
    `example_line` the index of the line in it that has to be named."""

    kind: Kind
    about: Cause
    lines: Words
    unless: Words
    nearby: tuple[str, ...]
    after: Words
    until: Words
    exit_codes: frozenset[int]
    quiet_s: int | None
    unless_running: tuple[str, ...]
    anywhere: bool
    possible: tuple[str, ...]
    ask: str | None
    example: tuple[str, ...]
    example_line: int
    example_exit: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Book:
    """All rules in the file's order, and words: of trouble in general, of a shutdown and of a start."""

    rules: tuple[Rule, ...]
    trouble: Words
    stopping: Words
    start: Words

    def rule(self, number: str) -> Rule:
        """The first rule with that number."""
        return next(rule for rule in self.rules if rule.about.id == number)

    @functools.cached_property
    def nearby(self) -> frozenset[str]:
        """The words that rules want to stand in the same traceback."""
        return frozenset(word for rule in self.rules for word in rule.nearby)

    @functools.cache  # noqa: B019 (there is one book, for ever)
    def wanted(self, unknown: bool = True, without: frozenset[str] = frozenset()) -> re.Pattern[bytes]:
        """Finds every line that the rules, except those with the ids in `without`, have to see; with
        `unknown` also every other line of trouble."""
        rules = [words for rule in self.rules if rule.about.id not in without for words in _used(rule)]
        return pattern([self.stopping, self.start, *([self.trouble] if unknown else []), *rules])

    def candidates(self, line: bytes) -> tuple[Rule, ...]:
        """The rules that have a word in this line, in the file's order: those that have to look closer."""
        found = {match[0] for match in self._known.finditer(line)}
        if len(found) == 1:
            return self._owners[found.pop()]
        owners = {rule.about.id for tail in found for rule in self._owners[tail]}
        return tuple(rule for rule in self.rules if rule.about.id in owners)

    @functools.cached_property
    def _known(self) -> re.Pattern[bytes]:
        return pattern([words for rule in self.rules for words in _used(rule)])

    @functools.cached_property
    def _owners(self) -> dict[bytes, tuple[Rule, ...]]:
        """For each tail that `_known` can find, the rules that it may stand for."""
        words = {rule: [rare_tail(one) for many in _used(rule) for one in many] for rule in self.rules}
        tails = _needed(tail for own in words.values() for tail in own)
        return {
            tail.encode("ascii"): tuple(
                rule for rule in self.rules if any(tail in own for own in words[rule])
            )
            for tail in tails
        }


def _used(rule: Rule) -> tuple[Words, ...]:
    return (rule.lines, rule.after, rule.until)


@functools.cache
def book() -> Book:
    """The rules that this bundle comes with."""
    return read(RULES_FILE)


def read(path: pathlib.Path) -> Book:
    """Read and check a rules file. Raises DeployError that names the line."""
    root = load(path)
    root.only("trouble", "stopping", "start", "rules")
    nodes = root.child("rules").items()
    rules = tuple(_rule(node) for node in nodes)
    numbers = [rule.about.id for rule in rules]
    for node, rule in zip(nodes, rules, strict=True):
        if rule is not rules[numbers.index(rule.about.id)]:
            raise node.child("id").wrong(f"{rule.about.id} is listed twice")
        for number in rule.possible:
            if number not in numbers:
                raise node.child("possible").wrong(f"there is no rule {number!r}")
    return Book(
        rules,
        trouble=_words(root.child("trouble")),
        stopping=_words(root.child("stopping")),
        start=_words(root.child("start")),
    )


def repeated_word(rule: Rule) -> bytes | None:
    """The word by which a hint's further lines can be counted without looking at them, None where it takes
    more than one word to know them."""
    simple = rule.kind == "hint" and len(rule.lines) == 1 and len(rule.lines[0]) == 1
    return (
        rule.lines[0][0].encode("ascii")
        if simple and not (rule.unless or rule.after or rule.nearby)
        else None
    )


def fits(rule: Rule, text: str) -> bool:
    """Whether a line is one of those that the rule is about."""
    return holds(rule.lines, text) and not holds(rule.unless, text)


def holds(words: Words, text: str) -> bool:
    """Whether one of the alternatives stands in this line."""
    return any(_in_order(alternative, text) for alternative in words)


def pattern(many: Iterable[Words]) -> re.Pattern[bytes]:
    """Finds the lines that may hold any of these words.

    Each alternative is searched for from its rarest character on: the regular expression engine then jumps
    from one rare character to the next instead of trying at every letter.
    """
    tails = _needed(rare_tail(words) for alternatives in many for words in alternatives)
    # One branch for each first character: the engine tries them one after the other.
    branches = [
        re.escape(first) + "(?:" + "|".join(re.escape(tail[1:]) for tail in group) + ")"
        for first, group in itertools.groupby(tails, key=lambda tail: tail[0])
    ]
    return re.compile("|".join(branches).encode("ascii"))


def rare_tail(words: Sequence[str]) -> str:
    """What to search for when looking for these words: the end of one of them, from its rarest character
    on, four characters at least (or it would be found in too many lines). Of a word without quotation marks where
    there is one, because a log in JSON writes those in another way."""
    plain = [word for word in words if len(word) >= 4 and not _ESCAPED.search(word)] or words
    tails = [word[start:] for word in plain for start in range(max(1, len(word) - 3))]
    return min(tails, key=lambda tail: (len(tail) < 4, _RARITY.index(tail[0])))


def _needed(tails: Iterable[str]) -> list[str]:
    """Without those that contain another one, which would be found anyway."""
    all_tails = set(tails)
    return sorted(
        tail for tail in all_tails if not any(other != tail and other in tail for other in all_tails)
    )


def _in_order(words: tuple[str, ...], text: str) -> bool:
    position = 0
    for word in words:
        found = text.find(word, position)
        if found < 0:
            return False
        position = found + len(word)
    return True


def _rule(node: Node) -> Rule:
    optional = (
        "lines", "unless", "nearby", "after", "until", "exit", "quiet_s", "unless_running", "anywhere", "possible",
        "ask", "example", "example_exit",
    )  # fmt: skip
    node.only("id", "kind", "title", "cause", "fix", "links", optional=optional)
    kind = cast("Kind", node.child("kind").one_of(*get_args(Kind)))
    number = node.child("id").text()
    if not re.fullmatch(r"[FWD]\d\d", number):
        raise node.child("id").wrong(f"expected a letter F, W or D and two digits, found {number!r}")
    lines, after = _maybe_words(node, "lines"), _maybe_words(node, "after")
    exit_codes, quiet = _maybe_items(node, "exit"), node.maybe("quiet_s")
    at_the_end = bool(exit_codes or quiet)
    if kind == "reference" and (lines or at_the_end or node.maybe("example")):
        raise node.wrong("a reference is named by other rules and matches nothing itself")
    if kind != "reference" and not lines and not at_the_end:
        raise node.wrong("a rule needs lines, exit or quiet_s")
    if at_the_end and (kind not in ("cause", "ending") or not after):
        raise node.wrong("exit and quiet_s are for causes and endings with after, whose line is named")
    example, example_line = _example(node) if kind != "reference" else ((), 0)
    example_exit = node.maybe("example_exit")
    anywhere, ask = node.maybe("anywhere"), node.maybe("ask")
    return Rule(
        kind=kind,
        about=Cause(
            id=number,
            title=_sentence(node.child("title"), end=False),
            cause=_sentence(node.child("cause")),
            fix=_sentence(node.child("fix")),
            links=node.child("links").links(),
        ),
        lines=lines,
        unless=_maybe_words(node, "unless"),
        nearby=tuple(item.text() for item in _maybe_items(node, "nearby")),
        after=after,
        until=_maybe_words(node, "until"),
        exit_codes=frozenset(_exit_code(item) for item in exit_codes),
        quiet_s=quiet.count() if quiet else None,
        unless_running=tuple(item.text() for item in _maybe_items(node, "unless_running")),
        anywhere=anywhere is not None and anywhere.flag(),
        possible=tuple(item.text() for item in _maybe_items(node, "possible")),
        ask=" ".join(ask.text().split()) if ask else None,
        example=example,
        example_line=example_line,
        example_exit=_exit_code(example_exit) if example_exit else None,
    )


def _example(node: Node) -> tuple[tuple[str, ...], int]:
    child = node.maybe("example")
    if child is None:
        raise node.wrong("key 'example' is missing")
    lines = child.text().rstrip("\n").split("\n")
    marked = [number for number, line in enumerate(lines) if line.startswith(MARK)]
    if len(marked) != 1:
        raise child.wrong(f"exactly one line has to start with {MARK!r}")
    return tuple(line.removeprefix(MARK) for line in lines), marked[0]


def _sentence(node: Node, *, end: bool = True) -> str:
    text = " ".join(node.text().split())
    if text.endswith(".") != end:
        raise node.wrong("expected sentences with a full stop" if end else "expected no full stop at the end")
    return text


def _maybe_items(node: Node, name: str) -> list[Node]:
    child = node.maybe(name)
    return child.items() if child else []


def _maybe_words(node: Node, name: str) -> Words:
    child = node.maybe(name)
    return _words(child) if child else ()


def _words(node: Node) -> Words:
    """A list of alternatives; ` ... ` separates the words of one."""
    alternatives = []
    for item in node.items():
        words = tuple(item.text().split(" ... "))
        if len(max(words, key=len)) < 4 or not all(
            word and word.isascii() and word.isprintable() for word in words
        ):
            raise item.wrong("expected words of printable ASCII, one of them with four characters or more")
        alternatives.append(words)
    return tuple(alternatives)


def _exit_code(node: Node) -> int:
    value = node.text()
    if not re.fullmatch(r"-?\d{1,3}", value):
        raise node.wrong(f"expected an exit code such as 137 or -9, found {value!r}")
    return int(value)
