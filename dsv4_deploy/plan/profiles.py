"""Profiles: named sets of limits for one kind of load, and the original pull request's command as it was.

In: a name. Out: a `Profile`. The figures are starting points from public recipes and measurements; no AMD
hardware was at hand to confirm one. What a profile leaves open the memory plan decides.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Literal

from dsv4_deploy.errors import refused

DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Upper bounds in tokens and sequences. `max_model_len` "auto" is the longest that fits; None leaves it to
    the model's own default."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | Literal["auto"] | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """One way to serve. `limits` are for Flash, `large` for models of several hundred gigabytes on cards of
    the 192 GB class, `large_roomy` for those on 256 GB cards. `command` is a complete list of flags for a
    profile that repeats somebody's command exactly: nothing is added to it and rules only warn."""

    name: str
    summary: str
    limits: Limits
    large: Limits
    large_roomy: Limits
    tp: int | None = None
    command: Mapping[str, tuple[str | Literal[True], str]] | None = None


# What the author of https://github.com/vllm-project/vllm/pull/41451 ran on MI308X, flag by flag.
_PR41451: Mapping[str, tuple[str | Literal[True], str]] = {
    "host": ("localhost", "as in the pull request"),
    "dtype": ("auto", "as in the pull request; it is the default"),
    "tensor-parallel-size": ("4", "as in the pull request"),
    "max-num-seqs": ("16", "as in the pull request"),
    "trust-remote-code": (True, "as in the pull request; no longer needed"),
    "profiler-config": (
        '{"profiler": "torch", "torch_profiler_dir": "./vllm_profile", "torch_profiler_with_stack": "False"}',
        "as in the pull request; not for production",
    ),
    "gpu-memory-utilization": ("0.35", "as in the pull request; holds Flash only"),
    "moe-backend": ("triton_unfused", "as in the pull request; later releases have a faster kernel"),
    "tokenizer-mode": ("deepseek_v4", "as in the pull request"),
    "async-scheduling": (True, "as in the pull request; it is the default now"),
    "enforce-eager": (True, "as in the pull request; decode graphs are off"),
}

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            DEFAULT,
            "balanced: many users, moderate lengths (https://github.com/vllm-project/recipes/pull/830)",
            limits=Limits(256, 8192),
            large=Limits(32, 8192),
            large_roomy=Limits(128, 8192),
        ),
        Profile(
            "latency",
            "few users at a time: small batches, so that nobody waits for another's long prompt",
            limits=Limits(16, 2048, 131_072),
            large=Limits(8, 2048, 65_536),
            large_roomy=Limits(8, 2048, 65_536),
        ),
        Profile(
            "throughput",
            "as many tokens per second as possible: many sequences of limited length",
            limits=Limits(512, 8192, 65_536),
            large=Limits(64, 8192, 32_768),
            large_roomy=Limits(128, 8192, 32_768),
        ),
        Profile(
            "long-context",
            "the longest texts that fit, a few at a time",
            limits=Limits(8, 2048, "auto"),
            large=Limits(4, 2048, "auto"),
            large_roomy=Limits(8, 2048, "auto"),
        ),
        Profile(
            "pr41451",
            "the command of https://github.com/vllm-project/vllm/pull/41451, flag by flag",
            limits=Limits(16, 16_384),
            large=Limits(16, 16_384),
            large_roomy=Limits(16, 16_384),
            tp=4,
            command=_PR41451,
        ),
    )
}


def find(name: str | None) -> Profile:
    """The profile of that name. Raises DeployError (exit code 2) that names those there are."""
    wanted = name or DEFAULT
    if wanted in PROFILES:
        return PROFILES[wanted]
    near = difflib.get_close_matches(wanted, list(PROFILES), n=1)
    raise refused(
        f"there is no profile called {wanted!r}",
        why=f"There are: {', '.join(PROFILES)}.",
        fix=f"Did you mean {near[0]}?" if near else "Use one of these.",
    )
