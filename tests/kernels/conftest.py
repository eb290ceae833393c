"""Where kernels run in these tests: on the GPU, or under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from kernels import dispatch


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """Or the interpreter patches Triton's language at each call of a device function: as long again as the call."""
    patch_for = interpreter._patch_lang

    @cache
    def patched_for(fn: Any) -> interpreter._LangPatchScope:
        patch_for(fn)
        return interpreter._LangPatchScope()  # which restores nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched_for)
        patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU where there is one; else the CPU, with the ops sent to their Triton kernels all the same."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(dispatch, "on_gpu", lambda t: True)
    return torch.device("cpu")
