"""Times small-batch projections against cuBLAS: part of `helix bench kernels`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from benchmarks.cases import cases as listed
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import ROTATED, seconds
from kernels.attention.kv_append import kv_append
from kernels.dense.linear import linear
from kernels.dense.qkv_append import qkv_append
from kernels.dense.silu_mul import silu_mul
from kernels.scaled import Kind, ScaledMatrix, groups, quantize_fp8


@dataclass(frozen=True)
class Matrix:
    """A rank's weight [rows, columns]; if gated, `rows` more for the gate above it."""

    name: str
    rows: int
    columns: int
    gated: bool = False


MATRICES = [Matrix(*case) for case in listed("linear")]
FP8_MATRICES = [*MATRICES, *(Matrix(*case) for case in listed("linear-fp8"))]
PACKED_MATRICES = [Matrix(*case) for case in listed("linear-packed")]
FORMATS: dict[str, tuple[Kind, int]] = {
    "e4m3": ("e4m3", 128), "mxfp4": ("e2m1", 32), "nvfp4": ("e2m1", 16), "int4-32": ("int4", 32),
    "int4-128": ("int4", 128),
}  # fmt: skip
ON_CPU = [Matrix("tiny gate+up", 64, 96, gated=True), Matrix("QKV", 80, 96)]
ROWS = (1, 4, 8, 16)
FP8_ROWS = (1, 2, 4, 8, 16, 32, 64)
PACKED_ROWS = (1, 8, 16, 32, 64, 128, 512, 2048, 8192)
CHUNK = 8192  # rows of a prefill
HEAD_DIM = 128
LARGE = 50e6  # bytes in bf16
SATURATED = 4.69e12  # bytes/s; an H200's read ceiling


def measure(ctx: BenchContext, matrix: Matrix, rows: int) -> Iterator[Row]:
    """Measures a matrix alone, and QKV also with its append."""
    yield measure_matrix(matrix, rows, ctx.device)
    if matrix.name.endswith("QKV"):
        yield measure_append(matrix, rows, ctx.device)


def measure_matrix(matrix: Matrix, rows: int, device: torch.device) -> Row:
    """Times ours and the library's, gate included, in microseconds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights, x = _operands(matrix, rows, device, dtype)
    copies = len(weights)

    def theirs(i: int) -> torch.Tensor:
        y = F.linear(x, weights[i])
        return silu_mul(y) if matrix.gated else y

    error = (linear(x, weights[0], gated=matrix.gated).float() - theirs(0).float()).norm() / theirs(0).float().norm()
    # Both round to bf16 once, gates three times: units of 2^-9 of their own value.
    assert error < 2e-2, f"linear is off by {float(error):.1e} of its norm at {matrix}"
    return {
        "kind": "linear",
        "matrix": _name(matrix),
        "rows": rows,
        "us": seconds(lambda i: linear(x, weights[i], gated=matrix.gated), copies, device) * 1e6,
        "cublas_us": seconds(theirs, copies, device) * 1e6,
        "bar_us": _target_us(weights[0]),
    }


def measure_fp8(ctx: BenchContext, matrix: Matrix, rows: int) -> Iterator[Row]:
    """Times the same weights in bf16, and in e4m3 with a scale per 128 columns, in microseconds."""
    device = ctx.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights, x = _operands(matrix, rows, device, dtype)
    whole = weights[0]
    copies = -(-ROTATED // (whole.numel())) if device.type == "cuda" else 1
    few = quantize_fp8(whole)
    scaled = [few, *(replace(few, data=few.data.clone(), scales=few.scales.clone()) for _ in range(copies - 1))]
    wanted = linear(x, few.dequantize(dtype), gated=matrix.gated).float()
    error = float((linear(x, few, gated=matrix.gated).float() - wanted).norm() / wanted.norm())
    # The library's weights are rounded to bf16, ours are not; both round results, and gates three times.
    assert error < 2e-2, f"linear is off by {error:.1e} of its norm at {matrix} in e4m3"
    us = seconds(lambda i: linear(x, weights[i], gated=matrix.gated), len(weights), device) * 1e6
    fp8_us = seconds(lambda i: linear(x, scaled[i], gated=matrix.gated), copies, device) * 1e6
    saved = whole.numel() * whole.itemsize - few.bytes
    large = whole.numel() * whole.itemsize >= LARGE
    bar_us = (1.05 if rows >= CHUNK else 0.62) * us if large or rows >= CHUNK else us - 0.9 * saved / SATURATED * 1e6
    yield {"kind": "linear-fp8", "matrix": _name(matrix), "rows": rows, "us": us, "fp8_us": fp8_us, "bar_us": bar_us}


def measure_packed(ctx: BenchContext, matrix: Matrix, rows: int) -> Iterator[Row]:
    """Times a matrix in bf16 and in each of `FORMATS`, in microseconds, with the time to read its bytes."""
    device = ctx.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights, x = _operands(matrix, rows, device, dtype)
    height, width = weights[0].shape
    bf16_us = seconds(partial(_run, x, weights, matrix.gated), len(weights), device) * 1e6
    for name, form in FORMATS.items():
        first = random_weight(height, width, *form, device)
        wanted = linear(x, first.dequantize(dtype), gated=matrix.gated).float()
        error = float((linear(x, first, gated=matrix.gated).float() - wanted).norm() / wanted.norm())
        # As in `measure_fp8`.
        assert error < 2e-2, f"linear is off by {error:.1e} of its norm at {matrix} in {name}"
        copies = -(-ROTATED // first.bytes) if device.type == "cuda" else 1
        scaled = [first, *(random_weight(height, width, *form, device) for _ in range(copies - 1))]
        us = seconds(partial(_run, x, scaled, matrix.gated), copies, device) * 1e6
        bytes_us = first.bytes / SATURATED * 1e6
        bar_us = 1.15 * bytes_us if rows <= 16 else 1.3 * bytes_us if rows <= 64 else 1.1 * bf16_us
        yield {
            "kind": "linear-packed", "matrix": _name(matrix), "format": name, "rows": rows, "us": us,
            "bf16_us": bf16_us, "bytes_us": bytes_us, "bar_us": bar_us,
        }  # fmt: skip


def _run(x: torch.Tensor, weights: Sequence[torch.Tensor | ScaledMatrix], gated: bool, i: int) -> torch.Tensor:
    return linear(x, weights[i], gated=gated)


def random_weight(rows: int, columns: int, kind: Kind, group: int, device: torch.device) -> ScaledMatrix:
    """Draws random weights, scaled so that outputs have the magnitude of inputs."""
    shape, size = (groups(0, columns, group), rows), columns**-0.5
    if kind == "e4m3":
        data = torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)
        return ScaledMatrix(data, (0.5 + torch.rand(shape, device=device)) * size, group)
    data = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), device=device, dtype=torch.int32)
    if kind == "int4":
        return ScaledMatrix(data, ((0.5 + torch.rand(shape, device=device)) * (size / 5)).bfloat16(), group, kind=kind)
    if group == 32:  # powers of two
        scales = torch.randint(126, 128, shape, device=device) - round(math.log2(columns) / 2) - 1
        return ScaledMatrix(data, scales.to(torch.uint8), group, kind=kind)
    row_scales = torch.full((rows,), size / 200, device=device)
    scales = torch.randint(112, 128, shape, device=device).to(torch.uint8)  # 32 to 120
    return ScaledMatrix(data, scales, group, kind=kind, row_scales=row_scales)


def measure_append(matrix: Matrix, rows: int, device: torch.device) -> Row:
    """Times projection, rotation and append in one launch and in two, in microseconds."""
    dtype, D = torch.bfloat16 if device.type == "cuda" else torch.float32, HEAD_DIM if device.type == "cuda" else 16
    weights, x = _operands(matrix, rows, device, dtype)
    angle = torch.rand(rows, D // 2, device=device)
    cos, sin, slots = angle.cos().to(dtype), angle.sin().to(dtype), torch.arange(rows, device=device) * 64
    keys, values, other_keys, other_values = torch.zeros(4, rows, 64, 1, D, device=device, dtype=dtype)

    def ours(i: int) -> torch.Tensor:
        return qkv_append(x, weights[i], None, cos, sin, keys, values, slots)

    def apart(i: int) -> torch.Tensor:
        return kv_append(linear(x, weights[i]).view(rows, -1, D), cos, sin, other_keys, other_values, slots)

    for mine, theirs in ((ours(0), apart(0)), (keys, other_keys), (values, other_values)):
        error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        # Different order of summation, rounded to bf16 before and after the rotation.
        assert error < 1e-2, f"qkv_append is off by {error:.1e} of its norm at {matrix}"
    times = {f"{name}us": seconds(run, len(weights), device) * 1e6 for name, run in (("", ours), ("apart_", apart))}
    return {"kind": "append", "matrix": _name(matrix), "rows": rows, **times, "bar_us": _target_us(weights[0])}


def _operands(
    matrix: Matrix, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    height = matrix.rows * (2 if matrix.gated else 1)
    copies = -(-ROTATED // (height * matrix.columns * dtype.itemsize)) if device.type == "cuda" else 1
    scale = matrix.columns**-0.5
    weights = [torch.randn(height, matrix.columns, device=device, dtype=dtype) * scale for _ in range(copies)]
    return weights, torch.randn(rows, matrix.columns, device=device, dtype=dtype)


def _name(matrix: Matrix) -> str:
    return f"{matrix.name} ({matrix.rows * (2 if matrix.gated else 1)} x {matrix.columns})"


def _target_us(weight: torch.Tensor) -> float:
    return weight.numel() * weight.itemsize / 4.3e12 * 1e6 + 2.5


def cases(ctx: BenchContext) -> Iterable[tuple[Matrix, int]]:
    """Returns every matrix with every number of rows."""
    return product(MATRICES if ctx.gpu else ON_CPU, ROWS)


def fp8_cases(ctx: BenchContext) -> Iterator[tuple[Matrix, int]]:
    """Yields every matrix with few rows; whole matrices also with a prefill's."""
    for matrix in FP8_MATRICES if ctx.gpu else ON_CPU:
        for rows in FP8_ROWS if ctx.gpu else (1, 6):
            yield matrix, rows
        if ctx.gpu and matrix.name.startswith("whole"):
            yield matrix, CHUNK


def packed_cases(ctx: BenchContext) -> Iterable[tuple[Matrix, int]]:
    """Returns whole matrices with a step's rows and a prompt's."""
    return product(PACKED_MATRICES if ctx.gpu else ON_CPU[:1], PACKED_ROWS if ctx.gpu else (1, 6))
