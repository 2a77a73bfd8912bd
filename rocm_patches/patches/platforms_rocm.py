"""Patches of vllm/platforms/rocm.py: side streams of the attention's inputs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, PatchError, Target

SWITCH = "DSV4_AUX_STREAMS"


def _switchable(original: Callable[..., bool]) -> Callable[..., bool]:
    wanted = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if wanted not in ("auto", "captured", "off"):
        raise PatchError(f"{SWITCH}={wanted} is none of auto, captured, off")

    @functools.wraps(original)
    def enable_multi_stream_overlap(cls: Any, aux_stream_list: Any, attn_metadata: object) -> bool:
        if wanted == "off" or not original(cls, aux_stream_list, attn_metadata):
            return False
        import torch

        return wanted == "auto" or torch.cuda.is_current_stream_capturing()

    return enable_multi_stream_overlap


PATCHES = (
    Patch(
        id="aux-stream-switch",
        title="The attention's side streams can be switched off",
        symptom="a hang or wrong answers under load that disappear without side streams: until now nobody could try",
        cause="vLLM forks side streams inside captured graphs and in the profiling run, and has no switch for it",
        remedy=f"{SWITCH}=off runs everything on one stream, captured forks in captured graphs only (not in the "
        "profiling run); auto, the default, is vLLM's own rule",
        upstream="https://github.com/vllm-project/vllm/blob/v0.21.0/vllm/models/deepseek_v4/amd/rocm.py",
        upstream_state="0.21.0 to 0.29.0 had them off because of hangs; no report against 0.32.0 is known",
        drop_when="vLLM has such a switch, or a year went by without anybody using this one",
        platforms=("gfx942",),
        targets=(
            Target("vllm.platforms.rocm", "RocmPlatform.enable_multi_stream_overlap", _switchable),
            Target("vllm.models.deepseek_v4.amd.rocm", "DeepseekV4ROCMAiterMLAAttention.forward"),
        ),
    ),
)
