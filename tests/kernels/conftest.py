"""The device of kernel tests: the GPU, or Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from triton import knobs

from kernels import dispatch
from tests.kernels.quick_interpreter import quick


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Speeds up the interpreter."""
    with quick() if knobs.runtime.interpret else nullcontext():  # compiled kernels need Triton's own types
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Returns the GPU if there is one; else the CPU, with ops sent to their Triton kernels."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(dispatch, "on_gpu", lambda t: True)
    return torch.device("cpu")
