"""What is tested, in which order: the references, the Triton kernels, the patched operators of vLLM. In: a torch
device. Out: measurements.

To add a suite: a function that takes the device and yields `Measurement`s, and a line in SUITES. One that cannot run
on a device yields nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator

import torch

from rocm_patches.registry import Measurement


def _there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


Suite = Callable[[torch.device], Iterable[Measurement]]


def references(device: torch.device) -> Iterable[Measurement]:
    from rocm_patches.selftest import references

    return references.measurements(device)


def kernels(device: torch.device) -> Iterator[Measurement]:
    """Every Triton kernel of this bundle on a GPU; the worst output of all cases of an operator."""
    if device.type != "cuda" or not _there("triton", "rocm_patches.kernels"):
        return
    from rocm_patches.kernels import selftest

    for operator, cases in selftest.ALL.items():
        worst: Measurement | None = None
        for case in cases(CASES_PER_KERNEL, SEED):
            for found in case(device):
                share = found.error / found.limit if found.limit else found.error
                if worst is None or not share <= worst.error:
                    worst = Measurement(
                        f"kernel {operator} (of its tolerances)", "-", share, 1 if found.limit else 0
                    )
        if worst is not None:
            yield worst


def patched(device: torch.device) -> Iterator[Measurement]:
    """The patches of this platform that bring a measurement of their own; they import vLLM."""
    if device.type == "cpu" or not _there("vllm"):
        return
    from rocm_patches import plugin

    plugin.register()
    applier = plugin.applier()
    for patch in applier.selection.patches if applier else ():
        if patch.self_test is not None:
            yield from patch.self_test(str(device))


CASES_PER_KERNEL = 12
SEED = 0
SUITES: dict[str, Suite] = {"references": references, "kernels": kernels, "patched operators": patched}
