"""Where a kernel runs, and the one door through which it is launched.

Launchers ask `target_of` for the chip and call `launch`. Tensors on torch's `meta` device stand for gfx942
without a GPU: nothing runs, and `recording` hands out what would have been launched, so that the compile gate
and the launch census look at exactly the launches of production.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """A chip: LLVM's name for it ("gfx942", "sm_90", "interpreter") and its number of compute units."""

    arch: str
    compute_units: int

    @property
    def amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def native_fnuz(self) -> bool:
        """Whether the conversion instructions read and write FNUZ e4m3 (CDNA3: the gfx94x family)."""
        return self.arch.startswith("gfx94")


# MI300X and MI325X have 304 compute units, MI308X has 80 (rocminfo); the last is what `meta` can be told to be.
MI300X = Target("gfx942", 304)
MI308X = Target("gfx942", 80)
INTERPRETER = Target("interpreter", 8)

_assumed: list[Target] = []
_recorders: list[list[Launch]] = []
_poison = False


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fill every output and scratch buffer with NaN (bytes: 0x55) before its kernel runs, so that a check sees an
    element that nothing wrote."""
    global _poison
    before, _poison = _poison, True
    try:
        yield
    finally:
        _poison = before


def empty(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer for a kernel to fill."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _poison:
        made.fill_(float("nan") if dtype.is_floating_point else 0x55)
    return made


@contextlib.contextmanager
def assume(target: Target) -> Iterator[None]:
    """Make launchers tile for `target` (tests, gates). Code generation still follows the real device."""
    _assumed.append(target)
    try:
        yield
    finally:
        _assumed.pop()


def target_of(device: torch.device) -> Target:
    """The chip behind a device: meta is an MI300X, a CPU is Triton's interpreter."""
    if _assumed:
        return _assumed[-1]
    if device.type == "meta":
        return MI300X
    if device.type == "cpu":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target(found.gcnArchName.split(":")[0], found.multi_processor_count)
    return Target(f"sm_{found.major}{found.minor}", found.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a Triton kernel, its grid, arguments in order, constants and compile options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(getattr(self.kernel, "__name__", self.kernel))


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect every launch made inside, on any device."""
    made: list[Launch] = []
    _recorders.append(made)
    try:
        yield made
    finally:
        _recorders.pop()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    target: Target,
    warps: int,
    stages: int = 1,
    amd: Mapping[str, int] | None = None,
    **constants: Any,
) -> None:
    """Launch a kernel, unless its grid is empty. `amd` holds options that only AMD's backend knows."""
    if math.prod(grid) == 0:
        return
    options = {"num_warps": warps, "num_stages": stages, **((amd or {}) if target.amd else {})}
    for made in _recorders:
        made.append(Launch(kernel, grid, arguments, constants, options))
    if not any(isinstance(a, Tensor) and a.is_meta for a in arguments):
        kernel[grid](*arguments, **constants, **options)


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
