"""Runs Triton kernels in its interpreter, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kernels import dispatch
from tests.kernels.quick_interpreter import quick


@contextmanager
def interpreted() -> Iterator[None]:
    """Makes ops on CPU tensors use GPU kernels; TRITON_INTERPRET must be set before they are imported."""
    with quick(), patch.object(dispatch, "on_gpu", lambda t: True):
        yield
