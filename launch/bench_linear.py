"""Times small-batch projections beside the library's: part of `python -m launch.bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from kernels.linear import linear
from kernels.silu_mul import silu_mul
from launch.bench_kernels import ROTATED, seconds


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, columns] of a rank; gated: the gate's rows and as many others above them."""

    name: str
    rows: int
    columns: int
    gated: bool = False


MATRICES = [  # on 8 ranks, tpa 4 or 8 in attention
    Matrix("Qwen2.5-7B QKV", 1152, 3584),
    Matrix("Qwen2.5-7B output", 3584, 448),
    Matrix("Qwen2.5-7B gate+up", 2368, 3584, gated=True),
    Matrix("Qwen2.5-7B down", 3584, 2368),
    Matrix("Qwen2.5-7B head", 19008, 3584),
    Matrix("Llama-3.1-8B QKV", 768, 4096),
    Matrix("Llama-3.1-8B output", 4096, 512),
    Matrix("Llama-3.1-8B gate+up", 1792, 4096, gated=True),
    Matrix("Llama-3.1-8B down", 4096, 1792),
    Matrix("Llama-3.1-70B QKV", 1280, 8192),
    Matrix("Llama-3.1-70B output", 8192, 1024),
    Matrix("Llama-3.1-70B gate+up", 3584, 8192, gated=True),
    Matrix("Llama-3.1-70B down", 8192, 3584),
]
ROWS = (1, 4, 8, 16)


def measure(matrix: Matrix, rows: int, device: torch.device) -> dict[str, Any]:
    """Ours and the library's, gate included, in microseconds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    height = matrix.rows * (2 if matrix.gated else 1)
    size = height * matrix.columns * dtype.itemsize
    copies = -(-ROTATED // size) if device.type == "cuda" else 1
    scale = matrix.columns**-0.5
    weights = [torch.randn(height, matrix.columns, device=device, dtype=dtype) * scale for _ in range(copies)]
    x = torch.randn(rows, matrix.columns, device=device, dtype=dtype)

    def theirs(i: int) -> torch.Tensor:
        y = F.linear(x, weights[i])
        return silu_mul(y) if matrix.gated else y

    error = (linear(x, weights[0], gated=matrix.gated).float() - theirs(0).float()).norm() / theirs(0).float().norm()
    # Both round to bf16 once, gates three times: units of 2^-9 of their own value.
    assert error < 2e-2, f"linear is off by {float(error):.1e} of its norm at {matrix}"
    return {
        "kind": "linear",
        "matrix": f"{matrix.name} ({height} x {matrix.columns})",
        "rows": rows,
        "us": seconds(lambda i: linear(x, weights[i], gated=matrix.gated), copies, device) * 1e6,
        "cublas_us": seconds(theirs, copies, device) * 1e6,
        "bar_us": size / 4.3e12 * 1e6 + 2.5,
    }


def run(device: torch.device) -> Iterator[dict[str, Any]]:
    """All matrices (the smallest alone on a CPU)."""
    matrices = MATRICES if device.type == "cuda" else [Matrix("tiny", 64, 96, gated=True)]
    rows = []
    for matrix, n in product(matrices, ROWS):
        rows.append(measure(matrix, n, device))
        yield rows[-1]
    table = Table("matrix", "rows", "ours us", "library us", "bar us")
    for r in rows:
        table.add_row(r["matrix"], str(r["rows"]), f"{r['us']:.1f}", f"{r['cublas_us']:.1f}", f"{r['bar_us']:.1f}")
    Console(width=110).print(table)
