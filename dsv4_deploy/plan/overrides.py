"""`--set key=value`: any vLLM flag that dsv4-deploy has no option for, checked before it reaches vLLM.

In: the texts of --set. Out: a mapping from flag name (no dashes in front) to its value, or True/False for a
switch. Refused are keys that an option of ours owns, secrets (a command line can be read by every user of
the machine), and keys without a usable value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dsv4_deploy.catalog import vllm_flags
from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.plan.rules.base import json_value

_KEY = re.compile(r"[a-z][a-z0-9]*([-.][a-z0-9_]+)*", re.ASCII | re.IGNORECASE)

# Flag -> what to use in its place.
_OWNED: Mapping[str, str] = {
    "model": "--model NAME|DIR",
    "model-tag": "--model NAME|DIR",
    "host": "--host ADDRESS",
    "port": "--port N",
    "tensor-parallel-size": "--tp N",
    "max-model-len": "--max-model-len N",
}
_SECRETS: Mapping[str, str] = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
_CANNOT: Mapping[str, str] = {
    "config": "A file of vLLM options could change the port or the model behind dsv4-deploy's back. Write "
    "each flag with --set.",
    "uds": "dsv4-deploy checks and stops the server through its port; a Unix socket has none.",
    "headless": "A headless vLLM answers no requests, so `up` could never see it ready.",
    "grpc": "The gRPC server does not answer the HTTP request that `up` checks.",
    "help": "It prints a help text and starts nothing. Run `vllm serve --help`.",
}


def parse(settings: Iterable[str]) -> dict[str, str | bool]:
    """Turn the values of --set into flag name -> value.

    "enforce-eager=true", "--no-enable-prefix-caching" and "enable-prefix-caching=false" are switches (True
    or False, without "no-"). Everything else keeps its value as text; JSON must be valid. Raises DeployError
    (exit code 2).
    """
    parsed: dict[str, str | bool] = {}
    for setting in settings:
        written_key, equals, value = setting.partition("=")
        key = _canonical(setting, written_key)
        key, switch_on = _switch(key)
        _check_allowed(key)
        if key in parsed:
            raise refused(
                f"--set {key} is given twice",
                why="The two values would compete, and which one wins would depend on their order.",
                fix="Give it once.",
            )
        parsed[key] = _value(key, switch_on, value if equals else None)
    return parsed


def _canonical(setting: str, written_key: str) -> str:
    """The flag's name as vLLM documents it: no dashes in front, dashes inside, the long spelling."""
    key = written_key.strip().lstrip("-")
    head, dot, rest = key.partition(
        "."
    )  # `hf-overrides.some_key=1`: what follows the dot is the key of a JSON object
    key = head.replace("_", "-") + dot + rest
    if not _KEY.fullmatch(key):
        raise refused(
            f"--set {setting!r} does not name a flag",
            why="A flag's name is made of letters, digits and dashes.",
            fix="Write --set name=value, for example --set max-num-seqs=64.",
        )
    head = head.replace("_", "-")
    return vllm_flags().aliases.get(head, head) + dot + rest


def _switch(key: str) -> tuple[str, bool]:
    """("enable-lora", False) for "no-enable-lora"; (key, True) for every other key."""
    if key.startswith("no-") and key.removeprefix("no-") in vllm_flags().switches_with_no_form:
        return key.removeprefix("no-"), False
    return key, True


def _check_allowed(key: str) -> None:
    if key in _OWNED:
        raise refused(
            f"--set {key} is not possible: dsv4-deploy has an option for it",
            why="The plan is checked against that value, so it must know it.",
            fix=f"Use {_OWNED[key]}.",
        )
    if key in _SECRETS:
        raise refused(
            f"--set {key} would put a secret on a command line",
            why="Every user of this machine can read the command line of every process.",
            fix=f"Export {_SECRETS[key]} in the environment; vLLM reads it from there.",
        )
    if key in _CANNOT:
        raise refused(f"--set {key} is not possible", why=_CANNOT[key], fix="Leave it out.")


def _value(key: str, switch_on: bool, value: str | None) -> str | bool:
    flags = vllm_flags()
    is_switch = key in flags.switches_with_no_form or key in flags.switches
    if value is None:
        if is_switch:
            return switch_on
        raise refused(
            f"--set {key} needs a value",
            why=f"Only switches can stand alone, and vLLM 0.32 has no switch called {key}.",
            fix=f"Write --set {key}=VALUE (or --set {key}=true when it is a switch of a newer vLLM).",
        )
    if value.lower() in ("true", "false") and key not in flags.valued:
        wanted = value.lower() == "true"
        if key in flags.switches and not wanted:
            raise refused(
                f"--set {key}=false is not possible",
                why=f"vLLM has no --no-{key}.",
                fix="Leave it out; off is its default.",
            )
        return wanted if switch_on else not wanted
    if is_switch:
        raise _switch_with_value(key, value)
    if not value:
        raise refused(
            f"--set {key}= has no value", why="vLLM would refuse it.", fix=f"Write --set {key}=VALUE."
        )
    if value[0] in "{[":
        try:
            json_value(value)
        except ValueError as error:
            raise refused(
                f"--set {key} is not valid JSON: {error}",
                why="The value starts like JSON, and vLLM reads it as JSON.",
                fix="Quote the whole value for your shell: --set 'key={\"a\": 1}'.",
            ) from error
    return value


def _switch_with_value(key: str, value: str) -> DeployError:
    return refused(
        f"--set {key}={value} is not possible",
        why=f"{key} is a switch: it is on or off.",
        fix=f"Write --set {key}=true or --set {key}=false.",
    )
