"""A function or Triton kernel of vLLM with a few words changed: for defects that sit in the middle of a long
text. In: the original object and the edits. Out: an object made from the edited source, living in the same
module. Each edit must match exactly once; the registry has checked before that the source is a known one.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from rocm_patches.registry import PatchError

Edit = tuple[str, str]


def edited(source: str, edits: tuple[Edit, ...], name: str) -> str:
    """The source with every (old, new) pair replaced. Raises PatchError unless each `old` occurs once."""
    for old, new in edits:
        if (count := source.count(old)) != 1:
            raise PatchError(f"{name}: {old!r} occurs {count} times in its source instead of once")
        source = source.replace(old, new)
    return source


def rewrite(*edits: Edit) -> Callable[[Any], Any]:
    """A `Target.replace` that makes these edits.

    Takes plain functions, methods (their plain function) and Triton kernels, decorators included; not
    functions that close over variables or use `super()`, for which it raises PatchError.
    """

    def replace(original: Any) -> Any:
        function = inspect.unwrap(getattr(original, "fn", original))
        name = f"{function.__module__}.{function.__qualname__}"
        if function.__code__.co_freevars:
            raise PatchError(f"{name} closes over {', '.join(function.__code__.co_freevars)}")
        source = edited(textwrap.dedent(inspect.getsource(function)), edits, name)
        # Its own file name: tracebacks, and Triton, which compiles from text, then show what really runs.
        file = f"<rocm_patches rewrite of {name}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = len(source), None, lines, file
        made: dict[str, Any] = {}
        # `from __future__ import annotations` of the original's module, if it has that.
        flags = function.__code__.co_flags & 0x1000000
        code = compile(source, file, "exec", flags=flags, dont_inherit=True)
        exec(code, vars(sys.modules[function.__module__]), made)  # noqa: S102 (vLLM's own text, edited)
        replacement = made[function.__name__]
        if isinstance(replacement, classmethod | staticmethod):  # the registry puts that on again
            replacement = replacement.__func__
        getattr(replacement, "fn", replacement).__qualname__ = function.__qualname__
        return replacement

    replace.edits = edits  # type: ignore[attr-defined]
    return replace
