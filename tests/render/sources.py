"""Plans to render: the profiles that are checked in, and hostile ones that hypothesis makes up."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from hypothesis import strategies as st

from dsv4_deploy.facts.checkpoint import Checkpoint
from dsv4_deploy.plan.plan import Facts, make_plan
from dsv4_deploy.plan.settings import Setting
from dsv4_deploy.render.source import Source
from dsv4_deploy.spec import ServingSpec

RENDER_GID = 109

ELSEWHERE = Facts(
    gpus=None, vllm_version=None, checkpoint=None, tiny_directory=pathlib.Path("/cache/tiny-v1"), environ={}
)


@dataclasses.dataclass(frozen=True)
class Named:
    """A deployment that is checked in under `name`."""

    name: str
    spec: ServingSpec


def _named(profile: str, model: str, tp: int) -> Named:
    short = model.removeprefix("deepseek-v4-")
    name = profile if profile != "default" else None
    spec = ServingSpec(model=model, tp=tp, profile=name, device="rocm", gpu="mi300x", gpu_count=8)
    if profile == "pr41451" and model.endswith("pro"):
        # Its 0.35 of the memory was meant for Flash, and the rule that says so stops it.
        spec = dataclasses.replace(spec, overrides={"gpu-memory-utilization": "0.90"})
    return Named(f"{profile}-{short}-tp{tp}", spec)


PROFILES = ("default", "latency", "throughput", "long-context", "pr41451")
CASES = tuple(
    _named(profile, model, tp)
    for profile in PROFILES
    for model, tp in (("deepseek-v4-flash", 4), ("deepseek-v4-flash", 8), ("deepseek-v4-pro", 8))
)


def source(spec: ServingSpec | None = None, facts: Facts = ELSEWHERE, **fields: Any) -> Source:
    """The source of a deployment. Without a spec: Flash on four of eight MI300X, with `fields` changed."""
    base = spec or ServingSpec(model="deepseek-v4-flash", tp=4, device="rocm", gpu="mi300x", gpu_count=8)
    base = dataclasses.replace(base, **fields)
    return Source(make_plan(base, facts), base, "dsv4-deploy render TARGET ...", RENDER_GID)


def no_gpu(**fields: Any) -> Source:
    """The no-GPU mode with the tiny model."""
    return source(
        ServingSpec(device="cpu", **fields), dataclasses.replace(ELSEWHERE, gpus=(), vllm_version="0.32.0")
    )


# Everything that a quoting rule could forget, more often than chance would bring it.
_SHARP = st.sampled_from(
    ["$(touch /tmp/pwned)", "`id`", "$HOME", "${HOME}", "%h", "%%", "'", '"', "\\", "\\n", "\n", "\t", "#", " ", "*",
     "~", "!", ";", "&", "|", ">", "$", "$$", "{{ .Values.x }}", "é", "\u202e", "\x7f", "\x01", "\ufeff", "\u2028",
     "\U0001f600", "- ", ": ", "%s", "\r\n"]
)  # fmt: skip
_PIECES = st.one_of(_SHARP, st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8))
HOSTILE = st.lists(_PIECES, min_size=1, max_size=6).map("".join)
"""Any text that a command line can hold."""


def hostile(text: str, reason: str = "because") -> Source:
    """Flash, with that text as a flag's value, a variable's value and a reason, put in behind every check that
    could have refused it: quoting may not rely on what came before."""
    made = source()
    plan = dataclasses.replace(
        made.plan,
        flags=(*made.plan.flags, Setting("hf-overrides", text, f"{reason} {text}")),
        env=(*made.plan.env, Setting("DSV4_PROBE", text, f"{reason} {text}", theirs=True)),
        note=f"note {text}",
    )
    return dataclasses.replace(made, plan=plan, command=f"dsv4-deploy {text}")


def with_checkpoint(directory: pathlib.Path, checkpoint: Checkpoint) -> Source:
    """Flash's sizes in a directory of the host."""
    spec = ServingSpec(model=str(directory), tp=4, device="rocm", gpu="mi300x", gpu_count=8)
    return source(spec, dataclasses.replace(ELSEWHERE, checkpoint=checkpoint))
