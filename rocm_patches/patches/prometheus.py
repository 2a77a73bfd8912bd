"""Patches of vllm/v1/metrics/prometheus.py: vLLM's /metrics also says which patches run in which process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import Patch, Target


def _with_patches(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def get_prometheus_registry() -> Any:
        from rocm_patches import report

        registry = original()
        report.register_collector(registry)
        return registry

    return get_prometheus_registry


PATCHES = (
    Patch(
        id="patches-in-metrics",
        title="vLLM's /metrics lists the patches of every process",
        symptom="nobody can see from outside which of a server's processes are patched",
        cause="no defect: vLLM has no place where a plugin can add a metric",
        remedy="the registry behind /metrics also collects what each process has reported",
        upstream="https://docs.vllm.ai/en/stable/design/plugin_system/",
        upstream_state="plugins can add stat loggers, not metrics",
        drop_when="vLLM lets a plugin add a collector",
        platforms=("any",),
        targets=(Target("vllm.v1.metrics.prometheus", "get_prometheus_registry", _with_patches),),
        checked="on the CPU: read from a real server's /metrics",
    ),
)
