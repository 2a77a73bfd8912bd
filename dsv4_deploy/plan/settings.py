"""The three small things that a plan is made of: a `Setting`, the facts it was made from, and the plan.

They are apart from `make_plan` so that what renders or runs a plan needs nothing of how it was decided.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

from dsv4_deploy.catalog import Card
from dsv4_deploy.facts.checkpoint import Checkpoint
from dsv4_deploy.facts.host import HostFacts
from dsv4_deploy.plan.memory import Memory
from dsv4_deploy.plan.rules import Notice
from dsv4_deploy.spec import Deployment


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about this machine and the model.

    `gpus`: architecture names, None when planning for another machine. `vllm_version`: public version of the
    vLLM that will run, None if there is none here. `checkpoint`: what `facts.checkpoint.read` found, None
    for a model that vLLM downloads by its repo id or that is still to be made in `tiny_directory`.
    `environ`: the operator's environment, whose values win over ours. `host` is everything else about this
    host, None when planning for another machine; `aiter_version` that of an installed AITER. `unwritable`
    maps cache variables whose directory cannot be written to one that can.
    """

    gpus: tuple[str, ...] | None
    vllm_version: str | None
    checkpoint: Checkpoint | None
    tiny_directory: pathlib.Path
    environ: Mapping[str, str]
    host: HostFacts | None = None
    aiter_version: str | None = None
    unwritable: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One environment variable or flag. `value` True is a flag without a value; `theirs` marks a variable
    that the operator had set otherwise, and which stays so."""

    name: str
    value: str | Literal[True]
    reason: str
    theirs: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that starting the server needs. `model` is what vLLM loads, `served_name` what clients call
    it.

    `ready_timeout_s` and `shutdown_timeout_s` are in seconds. `note` is one line for people: what was chosen
    and why. `profile`, `vllm`, `image` and `card` say what it was made for; `card` is None on the CPU.
    `memory` is the memory of one rank, `notices` what rules changed, overrode or warn about, `deployment`
    what surrounds the server, with every value decided. `weight_bytes` is the size of the checkpoint.
    """

    device: Literal["cpu", "rocm"]
    model: str
    served_name: str
    tp: int
    host: str
    port: int
    env: tuple[Setting, ...]
    flags: tuple[Setting, ...]
    ready_timeout_s: int
    shutdown_timeout_s: int
    note: str
    profile: str = "default"
    vllm: str = ""
    image: str = ""
    card: Card | None = None
    memory: Memory | None = None
    notices: tuple[Notice, ...] = ()
    deployment: Deployment = dataclasses.field(default_factory=Deployment)
    weight_bytes: int = 0

    @property
    def argv(self) -> list[str]:
        """The arguments after the launcher: `serve MODEL --flag value ...`."""
        argv = ["serve", self.model]
        for flag in self.flags:
            if flag.value is True:
                argv.append(f"--{flag.name}")
            elif flag.value.startswith("-"):
                argv.append(f"--{flag.name}={flag.value}")
            else:
                argv += [f"--{flag.name}", flag.value]
        return argv

    @property
    def from_environment(self) -> list[Setting]:
        """The variables where the operator's own value replaces ours."""
        return [setting for setting in self.env if setting.theirs]

    @property
    def environment(self) -> dict[str, str]:
        """The variables to add to the inherited environment."""
        return {setting.name: str(setting.value) for setting in self.env}

    def digest(self, launcher: Sequence[str]) -> str:
        """A fingerprint of what would run: two plans with the same digest start the same server."""
        content = json.dumps([list(launcher), self.argv, sorted(self.environment.items())])
        return hashlib.sha256(content.encode()).hexdigest()
