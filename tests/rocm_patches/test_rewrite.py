"""Functions with a few words changed: what comes out behaves like the original but for them."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import pytest

from rocm_patches.registry import PatchError
from rocm_patches.rewrite import rewrite

SOURCE = '''
import functools

FACTOR = 2
calls = []

def note(f):
    @functools.wraps(f)
    def noting(*args):
        calls.append(f.__name__)
        return f(*args)
    return noting

@note
def scaled(x, y=1):
    """Doc."""
    if x < 0:
        raise ValueError("negative")
    return x * FACTOR + y

class Box:
    def size(self, n):
        return n + 1

    @staticmethod
    def free(n):
        return n - 1

class Kernel:
    def __init__(self, fn):
        self.fn = fn

@Kernel
def kernel(x):
    return x * FACTOR

def closing(n):
    def inner():
        return n
    return inner
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "somebody.py"
    file.write_text(SOURCE)
    made = types.ModuleType("somebody")
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "somebody", made)
    exec(compile(SOURCE, str(file), "exec"), vars(made))  # noqa: S102
    return made


def test_a_function_with_its_decorator(module: Any) -> None:
    changed = rewrite(("+ y", "- y"))(module.scaled)
    assert (module.scaled(3, 1), changed(3, 1)) == (7, 5)
    assert module.calls == ["scaled", "scaled"]
    module.FACTOR = 10  # it lives in the module, as the original does
    assert changed(3, 1) == 29
    assert module.scaled(3, 1) == 31


def test_a_method_and_a_static_method(module: Any) -> None:
    changed = rewrite(("n + 1", "n + 2"))(module.Box.size)
    assert changed(None, 1) == 3 and changed.__qualname__ == "Box.size"
    assert rewrite(("n - 1", "n - 2"))(module.Box.free)(1) == -1


def test_a_kernel_object_is_made_anew(module: Any) -> None:
    changed = rewrite(("x * FACTOR", "x * FACTOR + 1"))(module.kernel)
    assert type(changed) is module.Kernel and changed.fn(3) == 7 and module.kernel.fn(3) == 6


def test_its_source_can_be_read(module: Any) -> None:
    """As Triton does, and as a traceback does."""
    changed = rewrite(("+ y", "- y"))(module.scaled)
    assert "FACTOR - y" in inspect.getsource(inspect.unwrap(changed))
    linecache.checkcache()
    with pytest.raises(ValueError, match="negative") as raised:
        changed(-1)
    text = "".join(traceback.format_exception(raised.value))
    assert "rocm_patches rewrite of somebody.scaled" in text and 'raise ValueError("negative")' in text


@pytest.mark.parametrize(("old", "count"), [("absent", 0), ("x", 3)])
def test_an_edit_must_match_once(module: Any, old: str, count: int) -> None:
    with pytest.raises(PatchError, match=rf"somebody.scaled: '{old}' occurs {count} times"):
        rewrite((old, "z"))(module.scaled)


def test_a_closure_is_refused(module: Any) -> None:
    with pytest.raises(PatchError, match="closes over n"):
        rewrite(("return n", "return 2"))(module.closing(1))


def test_wrapping_is_kept_apart(module: Any) -> None:
    """The decorators in the text are applied again; wrappers put on from outside are not."""
    wrapped = functools.wraps(module.scaled)(lambda *args: "outside")
    assert rewrite(("+ y", "- y"))(wrapped)(3, 1) == 5
