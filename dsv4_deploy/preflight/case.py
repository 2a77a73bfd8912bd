"""Case: everything that a check may look at, gathered once.

In: a ServingSpec and the environment. Out: a Case with the plan, or with the reason why there is none; the
checks that need no plan then still run, so that a person sees all problems at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Literal

from dsv4_deploy import catalog
from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint
from dsv4_deploy.facts.checkpoint import Checkpoint
from dsv4_deploy.facts.gpu import ROOT
from dsv4_deploy.facts.host import HostFacts
from dsv4_deploy.plan.plan import Plan, choose_device, default_model
from dsv4_deploy.spec import ServingSpec


@dataclasses.dataclass(frozen=True)
class Case:
    """`plan` is None when it was refused; `refusal` then says why. `rocm` is the version of the userspace
    that will run, None when nobody knows. `our_pid` is the server of ours on the wanted port, if any. `root`
    is where the file system that `host` describes begins."""

    spec: ServingSpec
    device: Literal["cpu", "rocm"]
    plan: Plan | None
    refusal: DeployError | None
    host: HostFacts
    checkpoint: Checkpoint | None
    environ: Mapping[str, str]
    rocm: str | None
    our_pid: int | None = None
    root: pathlib.Path = ROOT

    @property
    def tp(self) -> int | None:
        return self.plan.tp if self.plan else self.spec.tp

    @property
    def model(self) -> str:
        """The catalog name or directory that was asked for, or would be served when nobody asks."""
        return self.spec.model or default_model(self.device)

    @property
    def repo(self) -> str | None:
        """The hub's id of a model that vLLM would download; None for a local one."""
        entry = catalog.models().get(self.model)
        return entry.repo if entry and self.checkpoint is None else None

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights that have to be read, None for a model that nobody knows."""
        if self.checkpoint:
            return self.checkpoint.weight_bytes
        entry = catalog.models().get(self.model)
        return entry.weight_bytes if entry else None

    def flag(self, name: str) -> str | None:
        """The value of a flag of the plan; None when it is not set or takes no value."""
        flags = {flag.name: flag.value for flag in self.plan.flags} if self.plan else {}
        value = flags.get(name)
        return value if isinstance(value, str) else None

    def variable(self, name: str) -> str | None:
        """The value that vLLM will see of a variable: the plan's, else the environment's."""
        planned = self.plan.environment.get(name) if self.plan else None
        return planned if planned is not None else self.environ.get(name)

    @property
    def home(self) -> pathlib.Path:
        return pathlib.Path(self.environ.get("HOME") or "/")


def gather(
    spec: ServingSpec,
    environ: Mapping[str, str],
    host: HostFacts,
    *,
    plan: Plan | None = None,
    refusal: DeployError | None = None,
    rocm: str | None = None,
    our_pid: int | None = None,
) -> Case:
    """The case of a deployment on this host. `plan` or `refusal` is what planning it gave.

    `rocm` is the version that the operator names; by default the one installed here, else that of the
    image of the planned vLLM, as far as it is public.
    """
    device, _ = choose_device(spec, host.gfx_names)
    found = None
    name = spec.model or default_model(device)
    directory = checkpoint.expanded(name)
    if name not in catalog.models() and checkpoint.is_directory(directory):
        try:
            found = checkpoint.read(directory.absolute())
        except DeployError as problem:
            refusal = refusal or problem
    return Case(
        spec=spec,
        device=device,
        plan=plan,
        refusal=refusal,
        host=host,
        checkpoint=found,
        environ=environ,
        rocm=rocm or host.rocm,
        our_pid=our_pid,
    )
