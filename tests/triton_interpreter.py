"""Triton's kernels under its interpreter, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kernels import dispatch
from tests.kernels.quick_interpreter import quick


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, ops on CPU tensors take the kernels of GPUs; TRITON_INTERPRET has been set before they were imported."""
    with quick(), patch.object(dispatch, "on_gpu", lambda t: True):
        yield
