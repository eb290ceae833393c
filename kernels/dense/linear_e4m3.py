"""Projections of many rows, rounded to e4m3, with an e4m3 matrix on Hopper: W8A8, by cuBLAS's product of scaled blocks.

Our kernel of grouped rows took 1.06 to 1.28 of its time (`benchmarks/LOG.md`).

Source:
    DeepSeek-V3 (arXiv:2412.19437), section 3.3.2: sums in fp32 per 128 columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dense.quantize_rows import COLUMNS, quantize_rows
from kernels.dense.silu_mul import silu_mul
from kernels.scaled import ScaledMatrix

ROWS = 16  # of x, in whole multiples: cuBLAS refuses columns of scales that are not aligned
HAS_BLOCKS = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) >= (12, 9)


def fits(x: torch.Tensor, weight: ScaledMatrix) -> bool:
    """Returns whether x [N, K] is to be rounded, and `linear` supports it.

    A matrix needs groups of 128 columns, the first and the last of them whole, and a multiple of 16 rows; others are
    multiplied in bf16, as without rounding.
    """
    R, K = weight.shape
    return (
        HAS_BLOCKS
        and weight.rounds(len(x))
        and x.dtype == torch.bfloat16
        and weight.kind == "e4m3"
        and weight.group == COLUMNS
        and K > 0
        and K % COLUMNS == weight.begin == R % 16 == 0
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (weight.data, weight.scales))
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def linear(x: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Runs `kernels.dense.linear.linear` in x's dtype; requires `fits`."""
    N = len(x)
    rows = quantize_rows(F.pad(x, (0, 0, 0, -N % ROWS)) if N % ROWS else x, 1)
    y = torch._scaled_mm(rows.data[0], weight.data.T, rows.scales.T, weight.scales, out_dtype=x.dtype)[:N]
    if bias is not None:
        y += bias
    return silu_mul(y) if gated else y
