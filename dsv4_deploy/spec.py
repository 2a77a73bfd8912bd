"""ServingSpec: one deployment as somebody asked for it, before anything is known about the machine.

It goes into `plan.make_plan` together with the facts. None always means "you choose", and the plan says what
it chose and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Device = Literal["auto", "rocm", "cpu"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclasses.dataclass(frozen=True)
class ServingSpec:
    """What is to be served, where, and what the operator wants different from the plan's own choices.

    `model` is a catalog name or the path of a checkpoint directory. `overrides` maps vLLM flag names to
    their value as text, or to True/False for a switch (see `plan.overrides.parse`).
    """

    model: str | None = None
    tp: int | None = None
    device: Device = "auto"
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    max_model_len: int | None = None
    overrides: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain JSON-able data, for the state file."""
        return {**dataclasses.asdict(self), "overrides": dict(self.overrides)}
