"""Cases of projections, also with e4m3 weights, and of elementwise ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.dense import linear_e4m3, linear_fp8_sm90, linear_packed_sm90, linear_sm90
from kernels.dense.embedding import embedding
from kernels.dense.gate_mul import gate_mul
from kernels.dense.linear import fits_sm90, linear
from kernels.dense.quantize_rows import quantize_rows
from kernels.dense.reference import rounded_rows
from kernels.dense.rms_norm import rms_norm
from kernels.dense.silu_mul import silu_mul
from kernels.mla.per_head_linear import MAX_ROWS, per_head_linear
from kernels.scaled import ScaledMatrix, groups
from tests.kernels.cases_experts import poisoned
from tests.kernels.cases_experts import scaled as scaled_like
from tests.kernels.suite import FEW_BITS, FLOATS, KERNEL, Call, Mode, Op, shapes_of

F32_F16 = torch.float32, torch.float16
F32_BF16 = torch.float32, torch.bfloat16
REFERENCE = ("reference",)


def gate(y: Tensor) -> Tensor:
    """Returns silu(gate) * up of the two halves."""
    first, up = y.chunk(2, -1)
    return first / (1 + (-first).exp()) * up


# ---- projections


def make_linear(
    *, N: int, R: int, K: int, device: torch.device, biased: bool = False, gated: bool = False, exact: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Call:  # fmt: skip
    """Makes arguments of `linear`: x strided, NaN after the weight."""
    gen = torch.Generator().manual_seed(K)
    x = torch.randn(N, 2 * K, generator=gen).to(device, dtype)[:, :K]
    rows = 2 * R if gated else R
    wide = torch.full((rows + 8, K), torch.nan).to(device, dtype)
    wide[:rows] = torch.randn(rows, K, generator=gen).div(K**0.5).to(device, dtype)
    bias = torch.randn(rows, generator=gen).to(device, dtype) if biased else None
    y = x.double() @ wide[:rows].double().T + (0 if bias is None else bias.double())
    # fp32: sums of up to 1,100 terms of size 1 / sqrt(K); products of 16-bit numbers are exact. Below: a rounding of
    # values up to 4 (sums in fp32 of up to 8,192 terms are far closer), and for the gate the roundings of both factors
    # and of their product, up to 16.
    eps = 0.0 if exact else torch.finfo(dtype).eps
    given = dict(x=x, weight=wide[:rows], bias=bias, gated=gated, exact=exact)
    wanted = {"0": (gate(y) if gated else y, max(2e-5, (16 if gated else 4) * eps))}
    return Call(given, wanted, torch.float32 if exact else dtype)


def scaled(rows: int, columns: int, begin: int | None, device: Any, seed: int = 0) -> ScaledMatrix:
    """Makes a matrix with scales from 1e-6 to 1e2, and NaN after its rows; `begin` None: one scale per row."""
    generator = torch.Generator().manual_seed(seed)
    group, begin = (columns, 0) if begin is None else (128, begin)
    data = torch.full((rows + 4, columns), torch.nan)
    data[:rows] = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448)
    count = groups(begin, columns, group)
    scales = 10 ** (torch.rand(count, rows, generator=generator) * 8 - 6)
    return ScaledMatrix(data.to(device, torch.float8_e4m3fn)[:rows], scales.to(device), group, begin)


def make_scaled(
    *, N: int, R: int, K: int, device: torch.device, begin: int | None = None, form: tuple[str, int] | None = None,
    biased: bool = False, gated: bool = False,
    exact: bool = False, dtype: torch.dtype = torch.float32, unpacked: bool = False, seed: int = 0,
    fp8_rows: bool = False,
) -> Call:  # fmt: skip
    """Makes arguments with quantized weights; `unpacked` ones may be rounded to the dtype.

    Args:
        form: the weights' type and columns per group, as `tests.kernels.cases_experts.make_experts` has them.
    """
    gen = torch.Generator().manual_seed(K)
    x = torch.randn(N, 2 * K, generator=gen).to(device, dtype)[:, :K]
    rows = 2 * R if gated else R
    if form is None:
        weight = scaled(rows, K, begin, device, seed)
    else:
        weight = scaled_like(torch.empty(1, rows, K, device=device), *form, begin or 0, seed)[0]
    if dtype is torch.float16:
        weight.scales.clamp_(max=1e-3)  # keeps results below 65,504
    bias = torch.randn(len(weight), generator=gen).to(device, dtype) if biased else None
    whole = weight.dequantize(torch.float64)
    weight = replace(weight, fp8_rows=fp8_rows)
    rounded = rounded_rows(x, weight, N).double()
    y, size = rounded @ whole.T, rounded.abs() @ whole.T.abs()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if gated:
        y, (a, b) = gate(y), size.chunk(2, 1)
        size = a * b + a + b
    # fp32 sums are off by a few ulps of their terms' sizes; results are rounded.
    eps = 0.0 if exact or dtype is torch.float32 else torch.finfo(dtype).eps
    # Tensor cores align 32 products in e4m3 to the largest, and cut them at 2^-13 of it: an eighth of their sizes.
    max_error = size * (32 / 8 * 2**-13 if fp8_rows else 2e-6) + ((12 if unpacked else 3) * size + y.abs()) * eps
    given = dict(x=x, weight=weight, bias=bias, gated=gated, exact=exact)
    return Call(given, {"0": (y, max_error)}, torch.float32 if exact else dtype)


def on_hopper(x: Tensor, weight: Any, bias: Tensor | None, gated: bool, exact: bool, split: int) -> Tensor:
    """Runs `linear` with `split` programs that share K, or of packed weights all that is to be done.

    They have so little shared memory that stages are reused.
    """
    out = torch.full((len(x), len(weight) // (2 if gated else 1)), torch.nan, dtype=x.dtype, device=x.device)
    if isinstance(weight, Tensor):
        linear_sm90.launch(x, weight, bias, out, gated, split, 40)
    elif weight.packed:
        linear_packed_sm90.launch(x, weight, bias, out, gated, split, 40)
    else:
        linear_fp8_sm90.launch(x, weight, bias, out, gated, split, 40)
    return out


def fits_e4m3(case: Call) -> bool:
    """Whether cuBLAS's product with rows in e4m3 supports a case."""
    return linear_e4m3.fits(case.given["x"], case.given["weight"])


def fits_hopper(case: Call) -> bool:
    """Whether the SM90 kernel supports a case, 128 rows at a time."""
    x, weight, (wanted, _) = case.given["x"], case.given["weight"], case.wanted["0"]
    return all(fits_sm90(part, weight, wanted.shape[1] if case.given["gated"] else None) for part in x.split(128))


SHAPES = shapes_of(
    (1, 40, 64), (5, 33, 100), (4, 7, 511), (3, 64, 48), (17, 8, 32), (1, 9, 1100), (2, 1, 16), (6, 33, 528),
    names="N R K",
)  # fmt: skip
NOTHING = shapes_of((2, 3, 0), (0, 3, 4), (2, 0, 4), names="N R K")
ON_HOPPER = shapes_of(
    (2, 65, 64), (5, 33, 528), (8, 640, 448), (16, 70, 1040), (31, 130, 368), (17, 257, 2368), (9, 1, 8192),
    names="N R K",
)  # fmt: skip
# Ragged groups, cuts inside them, one scale per row, and more columns than a program's threads load at once.
SCALED = shapes_of(
    (1, 40, 256, 0), (1, 9, 1100, 96), (2, 33, 300, 64), (3, 64, 144, 100), (4, 7, 511, 16), (7, 50, 400, 64),
    (16, 65, 128, 0), (33, 130, 272, 112), (100, 96, 520, 0), (1, 24, 200, None), (5, 24, 200, None), (1, 8, 48, 80),
    names="N R K begin",
)  # fmt: skip
SCALED_ON_HOPPER = shapes_of(
    (1, 72, 528, 64), (2, 72, 64, 0), (5, 40, 528, 64), (8, 640, 448, 0), (16, 72, 1040, 112), (31, 136, 368, 48),
    (17, 264, 2368, None), (9, 8, 8192, 16), (33, 200, 400, 96), (64, 136, 1792, 0), (65, 72, 528, 64),
    (100, 264, 2368, None), (128, 136, 400, 0),
    names="N R K begin",
)  # fmt: skip
# As published, with zero points, cuts inside groups, one group, and more columns than a block.
PACKED = shapes_of(
    (1, 40, 256, 0, ("e2m1", 32)), (5, 33, 288, 0, ("e2m1", 16)), (20, 64, 96, 0, ("e2m1", 16)),
    (4, 40, 320, 32, ("int4", 128)), (16, 72, 224, 96, ("int4-zeros", 128)), (33, 40, 160, 0, ("int4", 32)),
    (100, 96, 512, 64, ("int4-zeros", 128)), (3, 24, 192, 0, ("int4-zeros", 192)), (7, 40, 96, 0, ("e4m3", 32)),
    (70, 40, 256, 0, ("e2m1", 16)),
    names="N R K begin form",
)  # fmt: skip
# One to many tiles, ragged ones, all tiles' shapes, cuts inside groups, and groups of less and more than a step.
PACKED_ON_HOPPER = shapes_of(
    (1, 80, 544, 0, ("e2m1", 32)), (2, 16, 64, 0, ("e2m1", 16)), (5, 400, 1056, 0, ("e2m1", 16)),
    (8, 1344, 448, 0, ("e2m1", 32)), (16, 144, 8192, 0, ("e2m1", 16)), (17, 272, 2368, 0, ("e2m1", 32)),
    (33, 208, 416, 0, ("e2m1", 16)), (64, 528, 1792, 0, ("e2m1", 32)), (65, 80, 544, 0, ("e2m1", 32)),
    (128, 272, 416, 0, ("e2m1", 16)),
    (3, 80, 544, 96, ("int4", 128)), (16, 272, 1056, 64, ("int4-zeros", 128)), (4, 80, 768, 128, ("int4", 384)),
    (7, 144, 512, 0, ("int4-zeros", 512)), (40, 528, 1024, 32, ("int4-zeros", 256)), (100, 80, 544, 0, ("int4", 544)),
    names="N R K begin form",
)  # fmt: skip
# More rows than a launch takes.
TWICE_ON_HOPPER = shapes_of(
    (129, 136, 400, 0, ("e4m3", 128)), (192, 72, 528, 64, ("e4m3", 128)), (160, 80, 544, 0, ("e2m1", 32)),
    (129, 272, 416, 0, ("e2m1", 16)), (192, 80, 544, 0, ("int4", 544)),
    names="N R K begin form",
)  # fmt: skip
# Weights that are rounded: they equal a dequantized matrix's.
ROUNDED_ON_HOPPER = shapes_of(
    (1, 80, 544, 0, ("int4", 32)), (8, 400, 1056, 32, ("int4-zeros", 64)), (16, 144, 4096, 0, ("int4-zeros", 32)),
    (32, 272, 416, 0, ("int4", 64)), (64, 272, 2368, 32, ("int4-zeros", 64)), (128, 144, 416, 0, ("int4-zeros", 32)),
    names="N R K begin form",
)  # fmt: skip
# Programs with part of a tile, with one, and with several.
PROGRAMS = {f"programs-{n}": Mode({"split": n}) for n in (1, 2, 3, 7, 40)}
# Rows that fill no tile, and such that are aligned; one group and several.
E4M3_ROWS = shapes_of(
    (256, 272, 128, 0), (300, 528, 256, 0), (401, 256, 1024, 0), (1003, 16, 384, 0), (2100, 1040, 640, 0),
    names="N R K begin",
)  # fmt: skip
NAN_MEMORY = Mode(settings={"torch.empty": poisoned})
# Matrices are unpacked one after the other into the same memory.
UNPACKED = {"": Mode(settings={"kernels.dense.linear_scaled.MANY": 5})}


def splits_of(shapes: dict[str, dict[str, Any]], splits: Any) -> Iterator[tuple[dict[str, Any], dict[str, Mode]]]:
    """Yields each shape with its splits of K."""
    for name, shape in shapes.items():
        yield {name: shape}, {f"split-{n}": Mode({"split": n}) for n in splits(**shape)}


def slices(N: int, R: int, K: int) -> list[int]:
    """Returns the splits whose slices begin at 16 bytes."""
    return [split for split in (1, 2, 4, 8) if K % (16 * split) == 0]


def runs(N: int, R: int, K: int, begin: int | None) -> list[int]:
    """Returns splits into runs of steps, one per program."""
    return [n for n in (1, 2, 3, 5, 8, 16) if n <= -(-(K + (begin or 0)) // (256 if N <= 16 else 128))]


def row_doubled(case: Call) -> None:
    """Doubles a row of the weight."""
    case.given["weight"][9] *= 2


def scales_rolled(case: Call, dim: int) -> None:
    """Takes the scales of the next group or row."""
    case.given["weight"] = replace(case.given["weight"], scales=case.given["weight"].scales.roll(1, dim))


def groups_later(case: Call) -> None:
    """Shifts groups by a column."""
    case.given["weight"] = replace(case.given["weight"], begin=case.given["weight"].begin + 1)


LINEAR = Op("linear", make_linear, linear, mistakes={"another-row": (dict(N=1, R=16, K=64), row_doubled)})
LINEAR_ON_HOPPER = Op("linear-on-hopper", make_linear, on_hopper, needs_hopper=True)
LINEAR_SCALED = Op(
    "linear_scaled", make_scaled, linear,
    mistakes={
        f"{name}-{N}": (dict(N=N, R=40, K=300, begin=64), change)
        for N in (1, 4, 20)
        for name, change in (
            ("group", partial(scales_rolled, dim=0)), ("row", partial(scales_rolled, dim=1)), ("begin", groups_later)
        )
    },
)  # fmt: skip
LINEAR_SCALED_ON_HOPPER = Op("linear_scaled-on-hopper", make_scaled, on_hopper, needs_hopper=True)
LINEAR_ROWS = [
    *LINEAR.rows(SHAPES, pairs=True, biased=(False, True), gated=(False, True), dtype=FLOATS),
    *LINEAR.rows(SHAPES, pairs=True, exact=(True,), dtype=FLOATS),
    *LINEAR.rows(NOTHING, gated=(True,)),
    *LINEAR.rows(
        ON_HOPPER, which=KERNEL, gpu=True, hopper=fits_hopper, biased=(False, True), gated=(False, True), dtype=FEW_BITS
    ),
    *(
        row
        for shape, modes in splits_of(ON_HOPPER, slices)
        for row in LINEAR_ON_HOPPER.rows(
            shape, which=KERNEL, gpu=True, modes=modes, biased=(False, True), gated=(False, True), dtype=FEW_BITS
        )
    ),
    # In slices or, if these would not begin at 16 bytes, in runs of steps; leaves no partial sums.
    *LINEAR_ON_HOPPER.rows(
        shapes_of((16, 70, 1680), (18, 257, 2368), (5, 40, 1040), names="N R K"), which=KERNEL, gpu=True, repeats=2,
        modes={f"split-{n}": Mode({"split": n}) for n in (2, 3, 5, 6, 7)}, biased=(True,), gated=(False, True),
        dtype=(torch.bfloat16,),
    ),
    *(
        row
        for biased, gated in ((False, False), (True, False), (True, True))
        for row in LINEAR_SCALED.rows(SCALED, pairs=True, biased=(biased,), gated=(gated,))
    ),
    *LINEAR_SCALED.rows(SCALED, which=KERNEL, biased=(True,), gated=(False, True), dtype=(torch.bfloat16,)),
    *LINEAR_SCALED.rows(
        SCALED, which=REFERENCE, pairs=True, biased=(False, True), gated=(False, True), dtype=(torch.bfloat16,),
        unpacked=(True,),
    ),
    *LINEAR_SCALED.rows(SCALED, which=KERNEL, exact=(True,), dtype=F32_BF16),
    *LINEAR_SCALED.rows(
        shapes_of((7, 40, 300, 64), (7, 33, 130, None), names="N R K begin"), which=KERNEL, modes=UNPACKED,
        gated=(False, True), dtype=F32_BF16, unpacked=(True,), seed=(0, 1),
    ),
    *LINEAR_SCALED.rows(PACKED, pairs=True, biased=(False, True), gated=(False, True)),
    *LINEAR_SCALED.rows(
        PACKED, which=KERNEL, biased=(True,), gated=(False, True), dtype=(torch.bfloat16,), unpacked=(True,)
    ),
    *LINEAR_SCALED.rows(PACKED, which=KERNEL, modes=UNPACKED, dtype=F32_BF16, unpacked=(True,)),
    *LINEAR_SCALED.rows(
        SCALED_ON_HOPPER, which=KERNEL, gpu=True, hopper=fits_hopper, biased=(True,), gated=(False, True),
        dtype=FEW_BITS,
    ),
    *LINEAR_SCALED.rows(
        TWICE_ON_HOPPER, which=KERNEL, gpu=True, hopper=fits_hopper, biased=(True,), gated=(False, True),
        modes={"": Mode(settings={"kernels.dense.linear.SPLIT_ELEMENTS": 1})}, dtype=(torch.bfloat16,),
    ),
    *(
        row
        for shapes, unpacked in ((PACKED_ON_HOPPER, False), (ROUNDED_ON_HOPPER, True))
        for op, how in (
            (LINEAR_SCALED, dict(hopper=fits_hopper)), (LINEAR_SCALED_ON_HOPPER, dict(modes=PROGRAMS, repeats=2)),
        )
        for row in op.rows(
            shapes, which=KERNEL, gpu=True, biased=(True,), gated=(False, True), dtype=(torch.bfloat16,),
            unpacked=(unpacked,), **how,
        )
    ),
    *(
        row
        for shape, modes in splits_of(SCALED_ON_HOPPER, runs)
        for row in LINEAR_SCALED_ON_HOPPER.rows(
            shape, which=KERNEL, gpu=True, modes=modes, biased=(True,), gated=(False, True), dtype=FEW_BITS
        )
    ),
    *LINEAR_SCALED.rows(
        E4M3_ROWS, which=KERNEL, gpu=True, hopper=fits_e4m3, repeats=3, modes={"": NAN_MEMORY}, biased=(False, True),
        gated=(False, True), dtype=(torch.bfloat16,), fp8_rows=(True,),
    ),
    *LINEAR_SCALED.rows(E4M3_ROWS, which=REFERENCE, gated=(False, True), fp8_rows=(True,)),
]  # fmt: skip

# ---- rows in e4m3


def make_rows(*, N: int, K: int, planes: int, device: torch.device, begin: int = 0, dtype: torch.dtype) -> Call:
    """Makes rows of several sizes, one of them zero, to be rounded to e4m3 and back."""
    gen = torch.Generator().manual_seed(K)
    x = torch.full((N, K + 8), torch.nan)[:, :K]
    x.copy_(torch.randn(N, K, generator=gen) * 10.0 ** torch.randint(-20, 20, (N, 1), generator=gen))
    x[N // 2] = 0
    x[0, ::3] *= 2.0**-12
    x = x.to(device, dtype)
    padded = torch.nn.functional.pad(x.double(), (begin, -(begin + K) % 128)).unflatten(1, (-1, 128))
    largest = padded.abs().amax(2).repeat_interleave(128, 1)[:, begin : begin + K]
    # Scales are above 1 / 448 and at most 1 / 224 of the largest, and e4m3 ends at 2^-9 of them. One number is off by
    # 2^-4, two by 2^-4 of what the first left: nothing of eight bits, unless the last is below 2^-9 of the scale.
    least = largest / 224 * 2**-10
    two = torch.where(x.double().abs() >= largest / 896, 0.0, least) if dtype == torch.bfloat16 else x.abs() * 2**-8
    max_error = (x.abs() * 2**-4 if planes == 1 else two).maximum(least if planes == 1 else two)
    if planes == 2 and dtype != torch.bfloat16:
        max_error = max_error.maximum(least)

    def call(function: Any, x: Tensor) -> Tensor:
        rows = function(x, planes, begin)
        found = (rows.data.double() * rows.scales.mT.double().repeat_interleave(128, 1)).sum(0)
        assert not found[:, :begin].any() and not found[:, begin + K :].any()
        return found[:, begin : begin + K]

    return Call(dict(x=x), {"0": (x, max_error)}, torch.float64, call)


QUANTIZE = Op("quantize_rows", make_rows, quantize_rows)

# ---- each head's own matrix


def make_per_head(
    *, N: int, heads: int, wide: int, narrow: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Call:
    """Makes arguments: x from wider heads, W_UV as a transposed view of kv_b_proj, and an output inside other heads."""
    gen = torch.Generator().manual_seed(N + heads)
    x = torch.randn(N, heads, wide + 3, generator=gen).to(dtype).to(device)[..., 3:]
    weight = torch.randn(heads, 5 + narrow, wide, generator=gen).to(dtype).to(device)[:, 5:].mT
    out = torch.full((N, heads, narrow + 7), torch.nan, dtype=dtype, device=device)[..., :narrow]
    y = torch.einsum("nha,hab->nhb", x.double(), weight.double())
    # fp32: sums of at most 100 products of values up to 4, each rounded by 2^-24. bf16: one rounding of the result,
    # 2^-9 of values up to 6 sqrt(512).
    max_error = 100 * 16 * 2**-24 if dtype == torch.float32 else 6 * 512**0.5 * 2**-9
    return Call(dict(x=x, weight=weight, out=out), {"out": (y, max_error), "0": (y, max_error)}, dtype)


def use_another_head(case: Call) -> None:
    """Takes another head's matrix."""
    case.given["weight"] = case.given["weight"].roll(1, 0)


PER_HEAD = Op(
    "per_head_linear", make_per_head, per_head_linear,
    mistakes={"of-another-head": (dict(N=2, heads=3, wide=16, narrow=16), use_another_head)},
)  # fmt: skip

# ---- elementwise

# Of values up to about 8: fp32 sums of a thousand terms; below it the roundings named in the ops, half a unit each.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3 * 8 * 2**-11, torch.bfloat16: 3 * 8 * 2**-8}


def strided(N: int, width: int, dtype: torch.dtype, gen: torch.Generator, nan: bool, device: torch.device) -> Tensor:
    """Makes rows of a wider matrix, optionally with NaN in the second one."""
    x = torch.randn(N, width + 3, generator=gen).to(dtype).to(device)[:, :width]
    if nan:
        x[1, 3] = torch.nan
    return x


def make_norm(
    *, N: int, H: int, device: torch.device, adds: bool = False, dtype: torch.dtype = torch.float32, nan: bool = False
) -> Call:
    """Makes arguments of a norm."""
    gen = torch.Generator().manual_seed(H)
    x = strided(N, H, dtype, gen, nan, device)
    residual = torch.randn(N, H, generator=gen).to(dtype).to(device) if adds else None
    weight = torch.randn(H, generator=gen).to(dtype).to(device)
    total = x if residual is None else x + residual
    wide = total.double()
    y = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    given = dict(x=x, weight=weight, eps=1e-5, residual=residual)
    return Call(given, {"0": (y, TOLERANCE[dtype]), "1": (total, 0.0)}, dtype)


def make_gated(
    *, N: int, F: int, device: torch.device, gates: int | None = None, dtype: torch.dtype = torch.float32,
    nan: bool = False, clamp_at: float | None = None, function: str = "sigmoid",
) -> Call:  # fmt: skip
    """Makes arguments of `silu_mul`, or, with the number of gates, of `gate_mul`."""
    gen = torch.Generator().manual_seed(F)
    if gates is None:
        gate_up = strided(N, 2 * F, dtype, gen, nan, device)
        wanted = gate(gate_up.double())
        if clamp_at is not None:
            left, up = gate_up.double().chunk(2, 1)
            wanted = torch.nn.functional.silu(left).clamp(max=clamp_at) * up.clamp(-clamp_at, clamp_at)
        return Call(dict(gate_up=gate_up, clamp_at=clamp_at), {"0": (wanted, TOLERANCE[dtype])}, dtype)
    x, other = strided(N, F, dtype, gen, nan, device), strided(N, gates, dtype, gen, False, device)
    factor = other.double().sigmoid() if function == "sigmoid" else other.double().exp().log1p()
    wanted = x.double() * factor.repeat_interleave(F // max(gates, 1), 1) if F else x.double()
    return Call(dict(x=x, gate=other, function=function), {"0": (wanted, TOLERANCE[dtype])}, dtype)


def make_embedding(*, V: int, H: int, device: torch.device) -> Call:
    """Makes arguments of an embedding shard that begins at token 5."""
    weight, tokens = torch.randn(V, H), torch.tensor([5, 100, 7, 4, 14, 15])
    mine = (tokens >= 5) & (tokens < 5 + V)
    rows = torch.zeros(6, H)
    rows[mine] = weight[tokens[mine] - 5]
    return Call(dict(tokens=tokens.to(device), weight=weight.to(device), first=5), {"0": (rows, 0.0)})


def residual_forgotten(case: Call) -> None:
    """Drops the residual."""
    case.given["residual"] = None


NORM = Op(
    "rms_norm", make_norm, rms_norm,
    mistakes={"residual-forgotten": (dict(N=2, H=64, adds=True), residual_forgotten)},
)  # fmt: skip
SILU = Op("silu_mul", make_gated, silu_mul)
GATE = Op("gate_mul", make_gated, gate_mul)
EMBEDDING = Op("embedding", make_embedding, embedding)

OPS = [LINEAR, LINEAR_SCALED, PER_HEAD, NORM]
ROWS = [
    *LINEAR_ROWS,
    *QUANTIZE.rows(
        shapes_of((7, 1000, 0), (4, 130, 96), (1, 128, 0), (9, 48, 112), names="N K begin"), planes=(1, 2),
        dtype=F32_BF16,
    ),
    *PER_HEAD.rows(
        shapes_of(
            (1, 4, 40, 24), (3, 1, 16, 130), (16, 5, 100, 33), (0, 2, 8, 8), (2, 0, 8, 8), names="N heads wide narrow"
        )
    ),
    *PER_HEAD.rows(
        shapes_of((4, 512, 128), (32, 512, 128), (16, 128, 512), (3, 512, 192), names="heads wide narrow"),
        which=KERNEL, gpu=True, N=(1, 8, MAX_ROWS, MAX_ROWS + 1, 64), dtype=(torch.bfloat16,),
    ),
    *NORM.rows(shapes_of((1, 64), (5, 72), (3, 1000), (2, 4096), names="N H"), adds=(False, True), dtype=F32_F16),
    *SILU.rows(shapes_of((1, 64), (5, 97), (3, 1500), (2, 0), names="N F"), clamp_at=(None, 0.5), dtype=F32_F16),
    *GATE.rows(
        shapes_of((1, 64, 64), (5, 97, 1), (5, 96, 4), (3, 1500, 1500), (2, 0, 0), (2, 0, 1), names="N F gates"),
        function=("sigmoid", "softplus"), dtype=F32_F16,
    ),
    *NORM.rows({"nan": dict(N=2, H=16, nan=True)}),
    *SILU.rows({"nan": dict(N=2, F=8, nan=True)}),
    *SILU.rows({"nan-clamped": dict(N=2, F=8, nan=True, clamp_at=0.5)}),
    *GATE.rows({"nan": dict(N=2, F=8, gates=1, nan=True)}),
    *EMBEDDING.rows(shapes_of((10, 6), (3, 1500), (0, 8), names="V H")),
]  # fmt: skip
