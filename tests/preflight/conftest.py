"""Preflight on hosts made of files: what is written is read by the real facts, and judged by the real checks."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint
from dsv4_deploy.facts import host as host_facts
from dsv4_deploy.plan.plan import Facts, Plan, make_plan
from dsv4_deploy.preflight import run
from dsv4_deploy.preflight.case import Case, gather
from dsv4_deploy.preflight.finding import Finding
from dsv4_deploy.spec import ServingSpec
from tests import hosts
from tests.hosts import GIB, Host


@dataclasses.dataclass
class Bench:
    """Writes a host below a folder and checks it."""

    folder: pathlib.Path

    def case(
        self,
        machine: Host = Host(),  # noqa: B008  (frozen)
        *,
        environ: Mapping[str, str] | None = None,
        shm: int = 64 * GIB,
        shm_used: int = 0,
        rocm: str | None = None,
        our_pid: int | None = None,
        **spec: Any,
    ) -> Case:
        """The case of a deployment on that host; `spec` are fields of ServingSpec. A host that was written
        before stays as it is, so that a test can change files in it."""
        root = self.folder / "root"
        if not root.exists():
            hosts.write(root, machine)
        facts = host_facts.read(root, hosts.statvfs(shm, shm_used))
        asked = ServingSpec(**{"device": "rocm", **spec})
        variables = {"HOME": str(self.folder), **(environ or {})}
        plan, refusal = None, None
        try:
            plan = _plan(asked, facts, variables)
        except DeployError as error:
            refusal = error
        case = gather(asked, variables, facts, plan=plan, refusal=refusal, rocm=rocm, our_pid=our_pid)
        return dataclasses.replace(case, root=root)

    def findings(self, name: str, *arguments: Any, **options: Any) -> list[Finding]:
        """What the check of that name finds."""
        check = next(check for check in run.CHECKS if check.__name__ == name.replace("-", "_"))
        return list(check(self.case(*arguments, **options)))

    def finding(self, name: str, *arguments: Any, **options: Any) -> Finding:
        """The only finding of the check of that name."""
        (found,) = self.findings(name, *arguments, **options)
        return found


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Bench:
    return Bench(tmp_path)


def _plan(spec: ServingSpec, facts: host_facts.HostFacts, environ: Mapping[str, str]) -> Plan:
    local = None
    if spec.model and pathlib.Path(spec.model).is_dir():
        local = checkpoint.read(pathlib.Path(spec.model))
    return make_plan(
        spec,
        Facts(
            gpus=facts.gfx_names or None,
            vllm_version="0.33.0",
            host=facts if facts.gpus else None,
            checkpoint=local,
            tiny_directory=pathlib.Path("/cache/tiny-v1"),
            environ=environ,
        ),
    )


def expect(found: Finding, level: str, *words: str, refs: tuple[str, ...] = ()) -> None:
    """The level, words of the whole text, and the rows that it must name. What is not ok says why and what
    to do."""
    text = " ".join((found.found, found.why, found.fix))
    assert found.level == level, text
    for word in words:
        assert word in text, (word, text)
    assert set(refs) <= set(found.refs), found.refs
    if level != "ok":
        assert found.why.endswith((".", "!")), found.why
        assert found.fix
