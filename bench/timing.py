"""Timing on a GPU, for the kernel benchmarks. A case is a list of calls on different inputs, captured in one graph;
the cache is overwritten before every replay and the median replay counts. Ceilings are measured in the same process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]
_EVICT_BYTES = 256 << 20  # several times the largest last-level cache (H200: 60 MB, MI300X: 256 MB)
_evict: torch.Tensor | None = None


def evict() -> None:
    """Overwrite the cache."""
    global _evict
    if _evict is None:
        _evict = torch.empty(_EVICT_BYTES, dtype=torch.uint8, device="cuda")
    _evict.zero_()


def event_times(call: Call, repeats: int) -> list[float]:
    """Microseconds of single calls, each after an eviction."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        evict()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, after a warm-up outside it (compilation, workspaces)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_time(calls: Sequence[Call], repeats: int = 11) -> float:
    """Median microseconds of one call inside a graph of all of them."""
    graph = capture(calls)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(event_times(graph.replay, repeats)) / len(calls)


def launches(call: Call) -> int:
    """Device activities of one call: kernels, copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    host = ("cuda", "hip", "Context Sync", "Stream Sync")
    return sum(str(e.device_type).endswith("CUDA") and not e.name.startswith(host) for e in seen.events())


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: copy bandwidth (read plus written), and one tiny kernel inside a graph."""

    device: str
    units: int
    copy_gbps: float
    bf16_tflops: float
    slot_us: float


def copy_bandwidth() -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(event_times(lambda: target.copy_(source), 9)) / 1e3


def matrix_rate() -> float:
    """TFLOP/s of an 8192^3 bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * 8192**3 / statistics.median(event_times(lambda: a @ b, 9)) / 1e6


def ceilings() -> Ceilings:
    one = torch.zeros(1, device="cuda")
    found = torch.cuda.get_device_properties(0)
    return Ceilings(
        found.name,
        found.multi_processor_count,
        copy_bandwidth(),
        matrix_rate(),
        graph_time([lambda: one.add_(1)] * 256),
    )


@dataclass(frozen=True)
class Row:
    """One measured case. bytes: every needed input once and every output once."""

    operator: str
    case: str
    side: str
    us: float
    launches: int
    bytes: float
    copy_share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(operator: str, case: str, side: str, calls: Sequence[Call], size: float, top: Ceilings) -> Row:
    """Times only: launches stay 0 until `launches` has counted them. That comes after every timing, because kernels
    seemed about a microsecond slower each once the profiler had been used in the process."""
    us = graph_time(calls)
    return Row(operator, case, side, us, 0, size, size / us / 1e3 / top.copy_gbps)


def sets(size: float, least: int = 2, most: int = 24, budget: float = 400e6) -> int:
    """How many different inputs to rotate through, for inputs of `size` bytes."""
    return int(min(most, max(least, budget // max(size, 1))))


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))
