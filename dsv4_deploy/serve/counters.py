"""vLLM's counters as two facts per engine: is there work, and has anything moved since the last look.

In: the text of vLLM's /metrics (0.32.0: vllm/v1/metrics/loggers.py). Out: Counters. Only values that an engine
step changes count as movement. `iteration_tokens_total_count` alone would not do: it stands still while one
long prompt is prefilled, and `kv_cache_usage_perc` is what moves then.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

_PENDING = ("num_requests_running", "num_requests_waiting")
_MOVING = (
    "kv_cache_usage_perc",
    "iteration_tokens_total_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
)
_SAMPLE = re.compile(rf"^vllm:({'|'.join(_PENDING + _MOVING)})(?:\{{(.*)\}})? (\S+)$".encode(), re.MULTILINE)
_ENGINE = re.compile(rb'(?:^|,)engine="([^"]*)"')
_ADMISSION = re.compile(rb"^dsv4_requests_(in_flight|accepted_total)(?:\{.*\})? (\S+)$", re.MULTILINE)
_PATCHES = re.compile(rb"^(?:# (?:HELP|TYPE) )?dsv4_patch_info[ {].*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine (one data-parallel rank). `pending`: requests that run or wait; `position`: differs from an
    earlier one exactly when the engine has done something in between."""

    pending: int
    position: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Counters:
    """`in_flight` and `accepted` come from rocm_patches/admission.py; None where that is not loaded."""

    engines: Mapping[str, Engine]
    in_flight: int | None
    accepted: int | None

    @property
    def pending(self) -> int:
        """Requests that are not done, as far as is known: counted at the door, else by the engines."""
        if self.in_flight is not None:
            return self.in_flight
        return sum(engine.pending for engine in self.engines.values())


def parse(text: bytes) -> Counters | None:
    """The counters in that text; None when there is nothing of vLLM's engines in it."""
    pending: dict[str, float] = {}
    position: dict[str, list[float]] = {}
    for name, labels, number in _SAMPLE.findall(text):
        found = _ENGINE.search(labels)
        engine = found[1].decode(errors="replace") if found else ""
        value = _number(number)
        position.setdefault(engine, []).append(value)
        if name.decode() in _PENDING:
            pending[engine] = pending.get(engine, 0.0) + value
    if not position:
        return None
    admission = {name: int(_number(number)) for name, number in _ADMISSION.findall(text)}
    return Counters(
        engines={
            engine: Engine(int(pending.get(engine, 0.0)), tuple(values))
            for engine, values in position.items()
        },
        in_flight=admission.get(b"in_flight"),
        accepted=admission.get(b"accepted_total"),
    )


def patch_lines(text: bytes) -> bytes:
    """What the patches report about themselves (rocm_patches/report.py), as it stands in vLLM's metrics."""
    return b"".join(line + b"\n" for line in _PATCHES.findall(text))


def _number(text: bytes) -> float:
    """The value; 0 for what is none. NaN is none: it differs from itself, which would look like movement."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
