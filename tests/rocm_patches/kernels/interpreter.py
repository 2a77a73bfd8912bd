"""Repairs Triton 3.6's interpreter where its numbers are wrong, for the tests only.

The interpreter keeps bf16 and fp8 values as raw integers and then computes with those integers: products, sums,
comparisons and casts come out wrong (test_interpreter.py pins each fault). Here every float cast goes through
torch (nearest even, as the hardware rounds) and every operation on small floats is done in fp32 on the real
values and rounded back. It patches private classes of one Triton version; another version is refused.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

VERSION = "3.6.0"

_SMALL = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {8: torch.uint8, 16: torch.uint16}
Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


def _values(handle: Handle) -> np.ndarray:
    """The numbers a handle stands for; small floats as fp32."""
    kind = _SMALL.get(handle.dtype.scalar)
    if kind is None:
        return handle.data
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return bits.view(kind).float().numpy()


def _handle(values: np.ndarray, dtype: Any) -> Handle:
    """A handle of `dtype` holding `values`, rounded to nearest even where it is small."""
    dtype = dtype.scalar
    kind = _SMALL.get(dtype)
    if values.dtype == np.bool_:
        return Handle(values, dtype)  # a comparison: Triton gives it its own type afterwards
    if kind is None:
        return Handle(values.astype(interpreter._get_np_dtype(dtype)), dtype)
    # astype copies: torch wants writable memory, and the interpreter's arrays may be views of broadcasts.
    rounded = torch.from_numpy(values.astype(np.float32)).to(kind)
    return Handle(rounded.view(_BITS[dtype.primitive_bitwidth]).numpy(), dtype)


def _is_small(*handles: Handle) -> bool:
    return any(h.dtype.scalar in _SMALL for h in handles)


def repair() -> None:
    """Patch the interpreter of this process. Raises RuntimeError for a Triton that this was not written for."""
    if (found := importlib.metadata.version("triton")) != VERSION:
        raise RuntimeError(
            f"this repair was written for triton {VERSION}, found {found}: check it against that"
        )
    stock = {name: getattr(Builder, name) for name in ("cast_impl", "binary_op", "unary_op", "ternary_op")}

    def cast(self: Builder, source: Handle, to: Any) -> Handle:
        if source.dtype.scalar in _SMALL or to.scalar in _SMALL:
            return _handle(_values(source), to)
        return stock["cast_impl"](self, source, to)

    def binary(self: Builder, left: Handle, right: Handle, op: Callable[..., np.ndarray]) -> Handle:
        if not _is_small(left, right):
            return stock["binary_op"](self, left, right, op)
        return _handle(op(_values(left), _values(right)), left.dtype)

    def unary(self: Builder, value: Handle, op: Callable[..., np.ndarray]) -> Handle:
        if not _is_small(value):
            return stock["unary_op"](self, value, op)
        return _handle(op(_values(value)), value.dtype)

    def ternary(self: Builder, a: Handle, b: Handle, c: Handle, op: Callable[..., np.ndarray]) -> Handle:
        if op is np.where or not _is_small(a, b, c):  # a selection moves bits
            return stock["ternary_op"](self, a, b, c, op)
        return _handle(op(_values(a), _values(b), _values(c)), c.dtype)

    def fma(self: Builder, a: Handle, b: Handle, c: Handle) -> Handle:
        return _handle(_values(a) * _values(b) + _values(c), c.dtype)

    def dot(self: Builder, a: Handle, b: Handle, c: Handle, *_: Any) -> Handle:
        left, right = (_values(x).astype(np.float32) for x in (a, b))
        return _handle(np.matmul(left, right) + _values(c), c.dtype)

    # A GPU's maximum drops a NaN; numpy's keeps it.
    pairs = {"minnumf": np.fmin, "maxnumf": np.fmax}
    for name, op in pairs.items():
        setattr(Builder, f"create_{name}", lambda self, a, b, op=op: self.binary_op(a, b, op))
    Builder.cast_impl = cast
    Builder.create_fp_to_fp = lambda self, source, to, rounding: self.cast_impl(source, to)
    Builder.binary_op = binary
    Builder.unary_op = unary
    Builder.ternary_op = ternary
    Builder.create_fma = fma
    Builder.create_dot = dot
    Builder.create_rsqrt = lambda self, x: self.unary_op(x, lambda v: 1 / np.sqrt(v))
    Builder.get_bf16 = lambda self, value: _handle(np.array([value], np.float32), tl.bfloat16)

    # The stock interpreter knows FNUZ e4m3 everywhere but in the table that names its types.
    stock_core = interpreter._patch_lang_core

    def core(module: Any, scope: Any) -> None:
        stock_core(module, scope)
        named = module.dtype.to_ir
        scope.set_attr(
            module.dtype,
            "to_ir",
            lambda self, builder: (
                builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else named(self, builder)
            ),
        )

    interpreter._patch_lang_core = core

    # Reductions work on the raw array as well; no kernel here reduces a small float, and none shall by accident.
    stock_reduce = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, operands: tuple[Any, ...]) -> Any:
        if any(x.dtype.scalar in _SMALL for x in operands):
            raise NotImplementedError(
                "the interpreter would reduce raw bits: convert to fp32 before a reduction"
            )
        return stock_reduce(self, operands)

    interpreter.ReduceOps.apply_impl = reduce

    # The interpreter patches a module of triton.language anew for every call of a device function from it; once
    # per launch is enough, and several times faster.
    stock_patch, patched = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        def __init__(self, inner: Any, key: frozenset[int]) -> None:
            self.inner, self.key = inner, key

        def restore(self) -> None:
            patched.discard(self.key)
            self.inner.restore()

    def patch(function: Any) -> Any:
        modules = (tl, tl.core)
        key = frozenset(id(m) for m in modules if any(m is value for value in function.__globals__.values()))
        if key in patched:
            return interpreter._LangPatchScope()
        patched.add(key)
        return Scope(stock_patch(function), key)

    interpreter._patch_lang = patch
