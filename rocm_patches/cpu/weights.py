"""Decoded weights, kept. Decoding FP8 and FP4 weights anew on every call would be most of a decode step.

A tiny model fits many times into the budget; what does not fit is decoded per call, slower and equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import Tensor

DEFAULT_BUDGET_MIB = 1024


class DecodedWeights:
    """fp32 copies by the address of their packed weight, up to `budget` bytes.

    An entry holds its packed weight, so an address is not reused while its entry lives.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def get(self, weight: Tensor, scale: Tensor, decode: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """decode(weight, scale), from the store when both are where they were."""
        # Shapes too: a slice from the start of a weight has the weight's address.
        key = (weight.data_ptr(), weight.shape, scale.data_ptr(), scale.shape)
        if key in self._kept:
            return self._kept[key][2]
        decoded = decode(weight, scale)
        size = decoded.numel() * decoded.element_size()
        if size <= self._budget:
            self._budget -= size
            self._kept[key] = (weight, scale, decoded)
        return decoded


def from_environment() -> DecodedWeights:
    """Budget from DSV4_CPU_WEIGHT_CACHE_MIB (MiB per process; default 1024, 0 turns it off).

    Raises ValueError for anything but a whole number.
    """
    text = os.environ.get("DSV4_CPU_WEIGHT_CACHE_MIB", str(DEFAULT_BUDGET_MIB))
    if not text.isdecimal():
        raise ValueError(f"DSV4_CPU_WEIGHT_CACHE_MIB={text!r} is not a number of MiB; 0 turns the cache off")
    return DecodedWeights(int(text) << 20)
