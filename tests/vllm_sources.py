"""vLLM releases as source files, by way of tools/vllm_sources.py: `make test` has put them into the cache."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def fetch(release: str) -> Path:
    """The folder that holds the package `vllm` of a release."""
    root = tool("vllm_sources").fetch(release)
    assert isinstance(root, Path)
    return root


def triton() -> Path:
    """The folder that holds the package `triton`, to be put on the end of sys.path."""
    root = tool("vllm_sources").triton()
    assert isinstance(root, Path)
    return root
