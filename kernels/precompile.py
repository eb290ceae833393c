"""Parallel precompilation of kernels, instead of one by one at first launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode, knobs
from triton.runtime.jit import JITFunction

EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}
_contexts = 0  # active `precompile` contexts: ranks may be threads


def is_precompiling() -> bool:
    """Returns whether kernels are being compiled, not launched.

    Code that chooses a kernel by size then compiles all that other sizes may need.
    """
    return _contexts > 0


@contextmanager
def precompile() -> Iterator[None]:
    """Compiles Triton kernels within the context instead of launching them, on this process's share of the cores.

    Their outputs stay unwritten; new tensors are zero, which is a valid index. Everything else runs. All kernels are
    compiled when the context ends. Most of a compilation releases the GIL (Triton 3.6 and 3.7).

    Raises:
        Exception: the compiler's.
    """
    global _contexts
    launch = JITFunction.run

    def prepare(self: JITFunction, *args: Any, **options: Any) -> Any:
        return launch(self, *args, **options | {"warmup": True})

    share = len(os.sched_getaffinity(0)) // max(torch.cuda.device_count(), 1)  # one process per GPU
    with ThreadPoolExecutor(max(share, 1)) as threads, _FinalizeOnce(threads):
        JITFunction.run = prepare
        _contexts += 1
        try:
            with _ZeroInit():
                yield
        finally:
            _contexts -= 1
            JITFunction.run = launch


def on_compilation(callback: Callable[[str], None] | None) -> None:
    """Calls `callback` with the name and argument types of each kernel that is compiled or loaded from now on."""

    def hook(*, fn: Any, repr: str, **details: Any) -> None:
        callback(f"{fn.name} {repr}")  # type: ignore[misc]

    knobs.runtime.jit_post_compile_hook = None if callback is None else hook


class _FinalizeOnce(AsyncCompileMode):
    """Finalizes a kernel once: Triton 3.6 would look it up at each launch until all are compiled."""

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)  # registers it as the compiled kernel
        return kernel


class _ZeroInit(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return result.zero_() if func.overloadpacket in EMPTY else result
