"""The options beside --set that name something: `--gpu`, `--env`, `--deploy` and `--allow`, checked.

In: their texts as typed. Out: the values of a ServingSpec. Each raises DeployError (exit code 2) that says
what may be written.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable
from typing import Any

from dsv4_deploy import catalog
from dsv4_deploy.errors import refused
from dsv4_deploy.plan.rules.base import DIGITS, count
from dsv4_deploy.spec import Deployment

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# A command line can be read by every user of the machine, and a rendered file by everybody who gets it.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$", re.IGNORECASE)
_SIZE = re.compile(rf"(\d{{1,{DIGITS}}})([KMGT]i?B?|B)?", re.ASCII)
_SIZES = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def gpu(text: str) -> tuple[str, int | None]:
    """ "mi300x" or "mi300x:8" as a card of the catalog and how many there are (None: not said)."""
    name, colon, number = text.partition(":")
    if colon and not (re.fullmatch(r"[0-9]{1,4}", number) and 1 <= int(number) <= 1024):
        raise refused(
            f"--gpu {text} does not say how many",
            why="After the colon stands the number of GPUs.",
            fix="Write --gpu mi300x:8, for example.",
        )
    return catalog.find_card(name).name, int(number) if colon else None


def variables(settings: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE of --env."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise refused(
                f"--env {name!r} does not name a variable and its value",
                why="A name is made of letters, digits and underscores.",
                fix="Write --env NAME=VALUE.",
            )
        if _SECRET.search(name):
            raise refused(
                f"--env {name} would put a secret on a command line",
                why="Every user of this machine can read the command line of every process.",
                fix=f"Export {name} in the environment; the server inherits it.",
            )
        if "\0" in value or "\n" in value:
            raise refused(
                f"--env {name} has a value of several lines",
                why="Environment files and manifests hold one line per variable.",
                fix="Use a value without line breaks.",
            )
        if name in found:
            raise refused(f"--env {name} is given twice", why="Only one can win.", fix="Give it once.")
        found[name] = value
    return found


def deployment(settings: Iterable[str]) -> Deployment:
    """KEY=VALUE of --deploy. Keys are the fields of `Deployment` with dashes and without their unit."""
    fields = {_key(field.name): field for field in dataclasses.fields(Deployment)}
    types = typing.get_type_hints(Deployment)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        field = fields.get(key.strip().replace("_", "-"))
        if not equals or field is None:
            near = difflib.get_close_matches(key, list(fields), n=1)
            raise refused(
                f"--deploy {setting!r} does not name anything that surrounds the server",
                why=f"There are: {', '.join(fields)}.",
                fix=f"Did you mean --deploy {near[0]}=...?"
                if near
                else "Write --deploy replicas=2, for example.",
            )
        if field.name in values:
            raise refused(f"--deploy {key} is given twice", why="Only one can win.", fix="Give it once.")
        values[field.name] = _value(key, field.name, types[field.name], text)
    return Deployment(**values)


def allowed(names: Iterable[str]) -> tuple[str, ...]:
    """The rules and checks of --allow; an unknown name would let nothing pass and look as if it did."""
    from dsv4_deploy.plan.rules import BY_ID

    wanted = tuple(names)
    known = set(BY_ID)
    if set(wanted) - known:
        # Not a rule: then perhaps a check of preflight, which is slow to import.
        from dsv4_deploy.preflight import run as preflight

        known |= preflight.NAMES
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            raise refused(
                f"--allow {name}: no rule and no check is called that",
                why="`dsv4-deploy rules` lists the rules, `dsv4-deploy preflight` names its checks.",
                fix=f"Did you mean {near[0]}?" if near else "Use the name that the message shows.",
            )
    return wanted


def rule(name: str) -> str:
    """The rule of that name. Raises DeployError (exit code 2) that names the nearest."""
    from dsv4_deploy.plan.rules import BY_ID

    if name not in BY_ID:
        near = difflib.get_close_matches(name, list(BY_ID), n=1)
        raise refused(
            f"there is no rule called {name!r}",
            why="`dsv4-deploy rules` lists them.",
            fix=f"Did you mean {near[0]}?" if near else "Use one of these.",
        )
    return name


def _key(field: str) -> str:
    return field.removesuffix("_bytes").removesuffix("_s").replace("_", "-")


def _value(key: str, field: str, wanted: Any, text: str) -> Any:
    kinds = typing.get_args(wanted)
    if bool in kinds:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise refused(
            f"--deploy {key}={text} is not true or false", why="It is a switch.", fix="Use true or false."
        )
    if int not in kinds:
        if text:
            return text
        raise refused(
            f"--deploy {key}= has no value", why="It needs one.", fix=f"Write --deploy {key}=VALUE."
        )
    number = _size(text) if field.endswith("_bytes") else count(text)
    if number is None:
        unit = "a size such as 32Gi" if field.endswith("_bytes") else "a whole number"
        raise refused(f"--deploy {key}={text} is not {unit}", why=f"It is {unit}.", fix="Correct it.")
    return number


def _size(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    if not match:
        return None
    unit = (match[2] or "").removesuffix("B") or "B"
    if unit.endswith("i"):
        return int(match[1]) * 1024 ** (" KMGT".index(unit[0]))
    return int(match[1]) * _SIZES[unit]
