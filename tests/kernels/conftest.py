"""Where kernels run in these tests: on the GPU, or under Triton's interpreter on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from kernels import routing


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU where there is one; else the CPU, with the ops sent to their Triton kernels all the same."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(routing, "on_gpu", lambda t: True)
    return torch.device("cpu")
