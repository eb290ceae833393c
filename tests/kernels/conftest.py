"""Device of kernels in these tests: the GPU, or Triton's interpreter on CPU tensors."""

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
    with quick() if knobs.runtime.interpret else nullcontext():  # what is compiled makes its types differently
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU where there is one; else the CPU, with the ops sent to their Triton kernels all the same."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(dispatch, "on_gpu", lambda t: True)
    return torch.device("cpu")
