"""Speeds up Triton's interpreter, whose time goes into types rather than values.

Results are bit-identical, except that rounding to e4m3 is corrected. Each change says what it avoids; all
are undone at the end of the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


@contextmanager
def quick() -> Iterator[None]:
    """Patches the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        # Patching the language at each call of a device function takes as long as the call.
        patch_for = interpreter._patch_lang

        @cache
        def patched_for(fn: Any) -> interpreter._LangPatchScope:
            patch_for(fn)
            return interpreter._LangPatchScope()  # restores nothing

        patch.setattr(interpreter, "_patch_lang", patched_for)
        # A 64-bit check of each integer operation, whose result is dropped unless assertions are on.
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        # Each lookup of a type builds a table of all types.
        numpy_type = cache(interpreter._get_np_dtype)
        pointers = np.dtype(np.uint64)
        patch.setattr(interpreter, "_get_np_dtype", lambda t: pointers if t.scalar.is_ptr() else numpy_type(t.scalar))
        # Checks that calls are inside a kernel, and that each result has its type's item size.
        patch.setattr(interpreter, "_patch_attr", _call_at_once)
        patch.setattr(interpreter.TensorHandle, "__post_init__", lambda self: None)
        _share_types(patch)
        _decide_once(patch)
        _round_to_e4m3(patch)
        yield


def _round_to_e4m3(patch: pytest.MonkeyPatch) -> None:
    """Rounds to e4m3 as GPUs do: the interpreter loses a carry into the exponent, and truncates subnormals."""
    convert = interpreter._convert_float

    def rounded(x: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if to_type != core.float8e4nv or from_type not in (core.float32, core.float16):
            return convert(x, from_type, to_type, rounding)
        return torch.from_numpy(np.ascontiguousarray(x)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", rounded)


def _call_at_once(obj: Any, name: str, member: Any, builder: Any, scope: interpreter._LangPatchScope) -> None:
    function = inspect.unwrap(member)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **options)

    scope.set_attr(obj, name, call)


def _decide_once(patch: pytest.MonkeyPatch) -> None:
    """Caches the common type of two operands, and scalars as tensors; numpy broadcasts data itself."""
    decide = tl.semantic.TritonSemantic.binary_op_type_checking_impl
    decided: dict[Any, list[Any]] = {}

    def kind(side: Any) -> Any:
        if not isinstance(side, core.tensor):
            return side, type(side)
        return id(side.type) if side.type.is_block() else side.type.name  # block types are shared

    def sides(self: Any, left: Any, right: Any, *options: Any, **more: Any) -> Any:
        key = kind(left), kind(right), options, *more.items()
        if (become := decided.get(key)) is None:
            both = decide(self, left, right, *options, **more)
            decided[key] = [
                t.type if isinstance(side, core.tensor) else t for side, t in zip((left, right), both, strict=True)
            ]
            return both
        return [fit(self, side, wanted) for side, wanted in zip((left, right), become, strict=True)]

    def fit(self: Any, side: Any, wanted: Any) -> Any:
        if isinstance(wanted, core.tensor):
            return wanted
        if side.type is wanted:
            return side
        if side.dtype.name != wanted.scalar.name:
            side = self.cast(side, wanted.scalar)
        return core.tensor(side.handle, wanted)

    patch.setattr(tl.semantic.TritonSemantic, "binary_op_type_checking_impl", sides)


def _share_types(patch: pytest.MonkeyPatch) -> None:
    blocks: dict[Any, Any] = {}
    make = core.block_type.__init__

    def block(cls: Any, element: Any, shape: Any) -> Any:
        key = (str(element), getattr(element, "address_space", 0), *map(core._unwrap_if_constexpr, shape))
        if (found := blocks.get(key)) is None:
            made: Any = object.__new__(cls)
            make(made, element, shape)
            sizes = [core.constexpr(size) for size in made.shape]
            made.of_tensors = core.tuple(sizes), core.constexpr(made.numel)
            found = blocks.setdefault(key, made)  # atomic: ranks are threads
        return found

    patch.setattr(core.block_type, "__new__", block)
    patch.setattr(core.block_type, "__init__", lambda self, element, shape: None)
    scalar = core.tuple([]), core.constexpr(1)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else scalar

    patch.setattr(core.tensor, "__init__", tensor)

    broadcast = tl.semantic.TritonSemantic.broadcast_impl_value
    together: dict[Any, list[Any]] = {}  # common types of two blocks

    def broadcast_together(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        if not (left.type.is_block() and right.type.is_block()):
            return broadcast(self, left, right)
        key = id(left.type), id(right.type)
        if (become := together.get(key)) is None:
            both = broadcast(self, left, right)
            together[key] = [t.type for t in both]
            return both
        return [spread(side, wanted) for side, wanted in zip((left, right), become, strict=True)]

    def spread(side: Any, wanted: Any) -> Any:
        if side.type is wanted:
            return side
        data = np.broadcast_to(side.handle.data, [int(size) for size in wanted.shape])
        return core.tensor(interpreter.TensorHandle(data, side.handle.dtype.scalar), wanted)

    patch.setattr(tl.semantic.TritonSemantic, "broadcast_impl_value", broadcast_together)
