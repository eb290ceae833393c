"""Triton's kernels under its interpreter, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter

from kernels import dispatch


@contextmanager
def language_patched_once() -> Iterator[None]:
    """Or the interpreter patches Triton's language at each call of a device function: as long again as the call."""
    patch_for = interpreter._patch_lang

    @cache
    def patched_for(fn: Any) -> interpreter._LangPatchScope:
        patch_for(fn)
        return interpreter._LangPatchScope()  # which restores nothing

    with patch.object(interpreter, "_patch_lang", patched_for):
        yield


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, ops on CPU tensors take the kernels of GPUs; TRITON_INTERPRET has been set before they were imported."""
    with language_patched_once(), patch.object(dispatch, "on_gpu", lambda t: True):
        yield
