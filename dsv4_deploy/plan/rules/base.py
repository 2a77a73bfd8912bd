"""What a rule is, and how rules are applied to a case.

In: a `Case`, everything that a rule may look at. Out: `Notice`s for what was changed, overridden or is worth
a warning, and a DeployError for what is refused. A rule is one function with a `@rule` line above it; the
line names its verdict, the rows of the failure log that it covers (F and W numbers, see docs/rules.md) and
a public link.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from dsv4_deploy.catalog import Card, Dims, Family, Traits, releases
from dsv4_deploy.errors import REFUSED, DeployError
from dsv4_deploy.facts.host import HostFacts
from dsv4_deploy.plan.memory import Memory
from dsv4_deploy.spec import Deployment

Verdict = Literal["refuse", "set", "warn"]
Value = str | bool
"""A flag's value: text, or True/False for a switch that is on or off by name."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a rule may look at.

    `flags` and `env` are what the server would get, by name; `explicit` are the flags that the operator gave
    and `environ` the variables that the operator set. `gpus` are architecture names, None where the GPUs
    are not known (planning for another machine); `card` is the kind of GPU, None on the CPU or when it is
    unknown; `virtual` marks a virtual function of it. `aiter` and `rocm` are versions, None when unknown.
    `deployment` is what the operator asks for. `memory` is None until the memory plan has been made. `exact`
    marks a profile that repeats somebody's command; `reasons` are those of what rules have changed.
    """

    device: Literal["cpu", "rocm"]
    model: str
    family: Family
    dims: Dims
    traits: Traits
    weight_bytes: int
    tp: int
    max_model_len: int
    gpus: tuple[str, ...] | None = None
    card: Card | None = None
    virtual: bool = False
    host: HostFacts | None = None
    vllm: str = ""
    aiter: str | None = None
    image: str = ""
    port: int = 8000
    quantization: str | None = None
    served_name: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    explicit: frozenset[str] = frozenset()
    deployment: Deployment = dataclasses.field(default_factory=Deployment)
    unwritable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory: Memory | None = None
    exact: bool = False
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def gfx942(self) -> bool:
        """Whether this is for one of our targets. Decided by architecture name, never by product name."""
        return self.device == "rocm" and "gfx942" in (self.gpus or ("gfx942",))

    @property
    def v41(self) -> bool:
        return self.traits.model_type == "deepseek_v41"

    def text(self, flag: str) -> str | None:
        """A flag's value as text, None when it is absent or a switch."""
        value = self.flags.get(flag)
        return value if isinstance(value, str) else None

    def on(self, switch: str) -> bool:
        return self.flags.get(switch) is True

    def number(self, flag: str, default: int) -> int:
        """A flag's value as a whole number; the default where it is absent or no number."""
        value = count(self.text(flag) or "")
        return default if value is None else value

    @property
    def dp(self) -> int:
        return self.number("data-parallel-size", 1)

    @property
    def world(self) -> int:
        """Ranks of one server, each with a GPU of its own."""
        return self.tp * self.dp * self.number("pipeline-parallel-size", 1)

    def json(self, flag: str) -> dict[str, Any]:
        """A JSON flag with its dotted spellings (`--flag.key value`) merged in; {} when absent."""
        found: dict[str, Any] = {}
        text = self.text(flag)
        if text:
            try:
                content = json_value(text)
            except ValueError:
                content = None
            found = dict(content) if isinstance(content, dict) else {}
        for name, value in self.flags.items():
            if name.startswith(f"{flag}."):
                found[name.removeprefix(f"{flag}.")] = _plain(value)
        return found

    @property
    def moe_backend(self) -> str | None:
        """--moe-backend as vLLM reads it: in small letters, with underscores."""
        value = self.text("moe-backend")
        return value.lower().replace("-", "_") if value else None

    def variable(self, name: str) -> str | None:
        """The value that the server would see: the operator's, else the plan's."""
        return self.environ.get(name, self.env.get(name))

    def has(self, feature: str) -> bool:
        """Whether the planned vLLM has a feature of releases.yaml."""
        return releases().has(feature, self.vllm)


@dataclasses.dataclass(frozen=True)
class Change:
    """What a set-rule does: `where` is "flag", "env" or "deployment"; `value` None takes a flag away."""

    where: Literal["flag", "env", "deployment"]
    name: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rule says about a case: `what` is one line with the value found, `why` and `fix` sentences."""

    what: str
    why: str
    fix: str
    changes: tuple[Change, ...] = ()


Check = Callable[[Case], Found | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule of the support matrix. `rows` are the F and W numbers that it covers; `title` says in one line
    what it is about; `after_memory` marks a rule that looks at the memory plan."""

    id: str
    verdict: Verdict
    title: str
    rows: tuple[str, ...]
    link: str
    after_memory: bool
    check: Check


@dataclasses.dataclass(frozen=True)
class Notice:
    """What a rule did to a plan: verdict "set" or "warn", or "allowed" for a refusal or change that the
    operator overrode by name."""

    rule: str
    verdict: Literal["set", "warn", "allowed"]
    what: str
    why: str
    fix: str
    rows: tuple[str, ...]
    link: str

    def line(self) -> str:
        """The notice on one line, with what to do about it."""
        rows = f" [{' '.join(self.rows)}]" if self.rows else ""
        return f"{self.verdict}: {self.what}. {self.why} {self.fix} (rule {self.rule}){rows}"


def rule(
    id: str, verdict: Verdict, title: str, *, rows: str = "", link: str, after_memory: bool = False
) -> Callable[[Check], Rule]:
    """Make a rule of a function. `rows` are F and W numbers with spaces between."""
    return lambda check: Rule(id, verdict, title, tuple(rows.split()), link, after_memory, check)


def change_flag(name: str, value: Value | None) -> Change:
    return Change("flag", name, value)


def change_env(name: str, value: str) -> Change:
    return Change("env", name, value)


def apply_changes(case: Case, changes: Iterable[Change], reason: str) -> Case:
    """The case with the changes made. A changed variable is the plan's, whatever the operator had."""
    flags, env, environ = dict(case.flags), dict(case.env), dict(case.environ)
    deployment, reasons = case.deployment, dict(case.reasons)
    for change in changes:
        reasons[change.name] = reason
        if change.where == "flag":
            for name in [name for name in flags if name == change.name or name.startswith(f"{change.name}.")]:
                if change.value is None or name != change.name:
                    del flags[name]
            if change.value is not None:
                flags[change.name] = change.value
        elif change.where == "env":
            env[change.name] = change.value
            environ.pop(change.name, None)
        else:
            deployment = dataclasses.replace(deployment, **{change.name: change.value})
    return dataclasses.replace(
        case, flags=flags, env=env, environ=environ, deployment=deployment, reasons=reasons
    )


def settle(case: Case, rules: Iterable[Rule], allow: Iterable[str]) -> tuple[Case, list[Notice]]:
    """Apply the set-rules in order; each sees what the ones before it changed.

    An allowed rule changes nothing and says that. Where the case is `exact` (a profile that keeps somebody's
    command as it was), rules only warn.
    """
    notices = []
    for one in rules:
        if one.verdict != "set":
            continue
        found = one.check(case)
        if found is None:
            continue
        if one.id in allow:
            notices.append(_notice(one, "allowed", dataclasses.replace(found, fix="Kept, as you allowed.")))
        elif case.exact and any(change.where == "flag" for change in found.changes):
            kept = "The profile keeps the command as it was."
            notices.append(_notice(one, "warn", dataclasses.replace(found, fix=kept)))
        else:
            case = apply_changes(case, found.changes, f"{found.why} (rule {one.id}: {found.what})")
            notices.append(_notice(one, "set", found))
    return case, notices


def refuse(case: Case, rules: Iterable[Rule], allow: Iterable[str]) -> list[Notice]:
    """Raise DeployError (exit code 2) for the first refusal, with the others below it; return notices for
    those that the operator allowed."""
    notices = []
    refused: list[tuple[Rule, Found]] = []
    for one in rules:
        if one.verdict != "refuse":
            continue
        found = one.check(case)
        if found is None:
            continue
        if one.id in allow:
            override = dataclasses.replace(found, fix=f"Goes on, because you said --allow {one.id}.")
            notices.append(_notice(one, "allowed", override))
        else:
            refused.append((one, found))
    if refused:
        one, found = refused[0]
        rows = f", {' '.join(one.rows)}" if one.rows else ""
        raise DeployError(
            found.what,
            why=found.why,
            fix=f"{found.fix} (rule {one.id}{rows}; --allow {one.id} overrides; {one.link})",
            detail="\n".join(
                f"also refused: {other.what}. {other.fix} (rule {rule.id})" for rule, other in refused[1:]
            ),
            exit_code=REFUSED,
        )
    return notices


def warn(case: Case, rules: Iterable[Rule], allow: Iterable[str]) -> list[Notice]:
    """The warnings about a case, without those that the operator silenced by name."""
    notices = []
    for one in rules:
        if one.verdict == "warn" and one.id not in allow:
            found = one.check(case)
            if found is not None:
                fix = f"{found.fix} Silence with --allow {one.id}.".strip()
                notices.append(_notice(one, "warn", dataclasses.replace(found, fix=fix)))
    return notices


def _notice(one: Rule, verdict: Literal["set", "warn", "allowed"], found: Found) -> Notice:
    return Notice(one.id, verdict, found.what, found.why, found.fix, one.rows, one.link)


def _plain(value: Value) -> Any:
    """A dotted flag's value as vLLM's parser reads it: JSON where it is JSON, else text."""
    if isinstance(value, bool):
        return value
    try:
        return json_value(value)
    except ValueError:
        return value


# More digits than any size, number or time has: from some length on Python itself gives up on them.
DIGITS = 18

_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


def count(text: str) -> int | None:
    """A whole number as vLLM reads it ("8192", "8k", "26g", "1.5M"; capital letters are powers of 1024), None
    when it is none or longer than any real one (`DIGITS`). Source: human_readable_int in
    vllm/utils/argparse_utils.py, v0.32.0."""
    match = re.fullmatch(rf"(\d{{1,{DIGITS}}}(?:\.\d{{1,{DIGITS}}})?)([kKmMgG]?)", text, re.ASCII)
    if not match or ("." in match[1] and (not match[2] or match[2].isupper())):
        return None
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> int | None:
    """A whole number of seconds as vLLM's variables hold them (no unit), None when it is none."""
    return int(text) if re.fullmatch(rf"\d{{1,{DIGITS}}}", text, re.ASCII) else None


def json_value(text: str) -> Any:
    """The content of a JSON text. Raises ValueError when it is none, or nested deeper than a parser goes."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def either(values: Iterable[Any]) -> str:
    """ "1, 2 or 4"."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
