"""vLLM's own kernels for the same operators, for the benchmarks: loaded from an unpacked or installed vLLM, without
running vLLM. In: its directory. Out: the functions that gfx942 runs for DeepSeek-V4 where AITER does not take over.

Only the few files below are executed; every other `vllm.*` module that they import is an empty stand-in. Nothing
of them is copied here. What is pretended: gfx942, and AITER absent.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILES = (
    "model_executor/kernels/mhc/torch.py",
    "model_executor/kernels/mhc/triton.py",
    "models/deepseek_v4/common/ops/fused_compress_quant_cache.py",
    "models/deepseek_v4/common/ops/fused_indexer_q.py",
    "models/deepseek_v4/common/ops/save_partial_states.py",
    "v1/attention/ops/rocm_aiter_mla_sparse.py",
)


class Nothing:
    """Stands for any name of a module that is not loaded: can be called, subclassed, indexed, used as decorator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class Platform(Nothing):
    def is_rocm(self) -> bool:
        return True

    def is_cuda(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_fp8_fnuz(self) -> bool:
        return False

    def fp8_dtype(self) -> Any:
        import torch

        return torch.float8_e4m3fn


class StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives FILES from `root` and stand-ins for the rest of `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {"vllm." + f.removesuffix(".py").replace("/", "."): root / f for f in FILES}

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        if name == "vllm" or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        import triton
        import triton.language as tl

        module = StandIn(spec.name)
        module.__path__ = []
        if spec.name == "vllm.triton_utils":
            module.__dict__.update(tl=tl, triton=triton, HAS_TRITON=True)
        elif spec.name == "vllm.platforms":
            module.__dict__["current_platform"] = Platform()
        elif spec.name == "vllm.platforms.rocm":
            module.__dict__.update(_ON_GFX942=True, _ON_GFX950=False)
        elif spec.name == "vllm.model_executor.layers.quantization.utils.fp8_utils":
            # A wo_a that is bf16 already: what vLLM keeps after the first forward.
            module.__dict__["get_fp8_block_weight_scale"] = lambda layer: None
        elif spec.name == "vllm.utils.math_utils":
            module.__dict__.update(
                cdiv=lambda a, b: -(-a // b),
                next_power_of_2=triton.next_power_of_2,
                round_up=lambda a, b: -(-a // b) * b,
            )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load(root: Path) -> types.SimpleNamespace:
    """The modules of FILES, by their last name. `root` is the directory `vllm/` of an unpacked wheel.

    Raises FileNotFoundError with the missing file."""
    for name in FILES:
        if not (root / name).exists():
            raise FileNotFoundError(
                f"{root / name} does not exist: --vllm takes the vllm/ directory of an unpacked wheel"
            )
    sys.meta_path.insert(0, Finder(root))
    names = ["vllm." + f.removesuffix(".py").replace("/", ".") for f in FILES]
    loaded = {n.split(".")[-1]: importlib.import_module(n) for n in names}
    found = types.SimpleNamespace(**loaded)
    found.mhc_torch = importlib.import_module("vllm.model_executor.kernels.mhc.torch")
    found.mhc_triton = importlib.import_module("vllm.model_executor.kernels.mhc.triton")
    return found
