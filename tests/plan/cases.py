"""Plans and refusals for tests: what an operator types becomes a plan as it does in `dsv4-deploy plan`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import host
from dsv4_deploy.plan.overrides import parse
from dsv4_deploy.plan.plan import Facts, Plan, make_plan
from dsv4_deploy.plan.rules import Notice
from dsv4_deploy.spec import Deployment, ServingSpec
from tests import hosts

TINY_DIRECTORY = pathlib.Path("/cache/tiny-v1")


def facts(environ: Mapping[str, str] | None = None, **known: Any) -> Facts:
    """Nothing is known about this machine but what is named."""
    nothing: dict[str, Any] = {"gpus": None, "vllm_version": None, "checkpoint": None}
    return Facts(**{**nothing, "tiny_directory": TINY_DIRECTORY, "environ": environ or {}, **known})


def on_host(root: pathlib.Path, made_up: hosts.Host) -> dict[str, Any]:
    """What would be known on such a host, with vLLM 0.33.0 installed."""
    here = host.read(hosts.write(root, made_up), hosts.statvfs(64 * 2**30))
    return {"gpus": here.gfx_names, "host": here, "vllm_version": "0.33.0"}


def plan(
    *settings: str,
    environ: Mapping[str, str] | None = None,
    known: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Plan:
    """The plan for `--set SETTING ...` and the options in `spec`, on 8 MI300X if nothing else is said."""
    if spec.get("device") != "cpu" and not known:
        spec = {"gpu": "mi300x", "gpu_count": 8, **spec}
    return make_plan(
        ServingSpec(overrides=parse(settings), deployment=Deployment(**(deployment or {})), **spec),
        facts(environ, **(known or {})),
    )


def refusal(*settings: str, **rest: Any) -> DeployError:
    """The refusal of such a plan; it must end with exit code 2, a reason and a fix."""
    with pytest.raises(DeployError) as raised:
        plan(*settings, **rest)
    assert raised.value.exit_code == 2
    assert raised.value.why
    assert raised.value.fix
    return raised.value


def text(error: DeployError) -> str:
    return f"{error.what} {error.why} {error.fix}"


def flags(made: Plan) -> dict[str, str | bool]:
    return {flag.name: flag.value for flag in made.flags}


def notice(made: Plan, rule: str) -> Notice:
    """The one notice of that rule."""
    (found,) = [notice for notice in made.notices if notice.rule == rule]
    assert found.what
    assert found.why
    assert found.fix
    return found


def rules_of(made: Plan) -> set[str]:
    return {notice.rule for notice in made.notices}
