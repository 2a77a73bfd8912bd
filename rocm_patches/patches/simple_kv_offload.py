"""Patches of vllm/v1/simple_kv_offload: KV blocks that come back from the CPU's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target

BACKEND = "vllm.v1.simple_kv_offload.copy_backend"
WORKER = "vllm.v1.simple_kv_offload.worker"


def _loads_wait(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def launch_copy(
        self: Any,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        if not is_store and wait_event is None:
            import torch

            # The caller's stream is the one that computes. An event of its own: another thread waits for it.
            wait_event = torch.Event()
            wait_event.record(torch.cuda.current_stream())
        original(self, src_blocks, dst_blocks, is_store, event_idx, events_list, wait_event)

    return launch_copy


PATCHES = (
    Patch(
        id="kv-offload-load-fence",
        title="KV blocks are loaded back only when nobody reads them any more",
        symptom="with VLLM_USE_SIMPLE_KV_OFFLOAD=1 and under load: answers that begin well and collapse into "
        "repetition and mixed scripts",
        cause="a load may overwrite a freed block while a step that is still running on the GPU reads it; stores wait "
        "for the step, loads do not",
        remedy="loads wait for what has been launched before them, as stores do",
        upstream="https://github.com/vllm-project/vllm/issues/47282",
        upstream_state="open in 0.32.0 and 0.33.0, as are its fixes (https://github.com/vllm-project/vllm/pull/47324)",
        drop_when="start_load_kv passes a wait_event",
        platforms=("gfx942",),
        targets=(
            Target(BACKEND, "DmaCopyBackend.launch_copy", _loads_wait),
            Target(BACKEND, "DmaCopyBackend._copy_loop"),
            Target(WORKER, "SimpleCPUOffloadWorker.start_load_kv"),
            Target(WORKER, "SimpleCPUOffloadWorker.wait_for_save"),
        ),
        rows=("F72",),
    ),
)
