"""Tensors for compile-only launches: views of one zeroed memory that is never touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.scaled import Kind, ScaledMatrix, groups

BF16, FP32, FP64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
MEMORY = torch.from_numpy(np.zeros(3 << 30, dtype=np.uint8))  # pages are not allocated before they are read
HOPPER, OLDER = (9, 0), (8, 0)


class Launch(NamedTuple):
    """A call of an op.

    Attributes:
        capability: compute capability that the op sees when it selects a kernel; all are compiled for sm_90.
    """

    name: str
    capability: tuple[int, int]
    run: Callable[[], Any]


def launch(name: str, op: Callable[..., Any], *given: Any, capability: tuple[int, int] = HOPPER, **more: Any) -> Launch:
    """Makes a launch."""
    return Launch(name, capability, partial(op, *given, **more))


def general(name: str, op: Callable[..., Any], *given: Any, **more: Any) -> Launch:
    """Makes a launch as on older GPUs."""
    return launch(name, op, *given, capability=OLDER, **more)


def numbers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Returns a tensor of this shape."""
    return MEMORY[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def fp32(*shape: int) -> Tensor:
    """Returns an fp32 tensor."""
    return numbers(*shape, dtype=FP32)


def i32(*shape: int) -> Tensor:
    """Returns an int32 tensor."""
    return numbers(*shape, dtype=torch.int32)


def i64(*shape: int) -> Tensor:
    """Returns an int64 tensor."""
    return numbers(*shape, dtype=torch.int64)


def flags(*shape: int) -> Tensor:
    """Returns a bool tensor."""
    return numbers(*shape, dtype=torch.bool)


def scaled(
    *shape: int, group: int = 128, begin: int = 0, kind: Kind = "e4m3", zeros: bool = False, fp8_rows: bool = False
) -> ScaledMatrix:
    """Returns matrices in e4m3, MXFP4, NVFP4 (groups of 16), or int4 with scales in bf16."""
    *experts, rows, columns = shape
    grid = *experts, groups(begin, columns, group), rows
    if kind == "e4m3":
        return ScaledMatrix(numbers(*shape, dtype=E4M3), fp32(*grid), group, begin, fp8_rows=fp8_rows)
    data = numbers(*experts, rows, columns // 8, dtype=torch.int32)
    scales = numbers(*grid, dtype=torch.uint8 if kind == "e2m1" else BF16)
    row_scales = fp32(*experts, rows) if group == 16 else None
    return ScaledMatrix(
        data, scales, group, begin, kind, numbers(*grid, dtype=torch.uint8) if zeros else None, row_scales
    )
