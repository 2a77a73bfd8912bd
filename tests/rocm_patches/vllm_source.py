"""The installed vLLM as text and syntax trees, so that tests can hold our names against its own.

vLLM is not imported: that would take seconds and change this process.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def root() -> Path:
    """Directory of the installed `vllm` package."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def tree_of(module: str) -> ast.Module:
    """Syntax tree of a module by its dotted name."""
    path = root().joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text())


def trees_that_mention(text: str) -> Iterator[tuple[Path, ast.Module]]:
    """Syntax trees of the files that hold `text`."""
    for path in sorted(root().rglob("*.py")):
        source = path.read_text()
        if text in source:
            yield path, ast.parse(source)
