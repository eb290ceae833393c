"""Rounds rows of activations to e4m3, with a scale per row and 128 columns: one e4m3 number an element, or two.

Scales are powers of two, so that scaling rounds nothing. Two numbers are an element rounded to e4m3, and what is left:
together they equal a bf16 element unless it is smaller than 2^-9 of the largest of its 128 columns; then they are off
by up to 2^-18 of that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import quantize_rows as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.scaled_keys import reciprocal, scale_bits

COLUMNS = 128  # that share a scale


class QuantizedRows(NamedTuple):
    """Rows in e4m3.

    Attributes:
        data: [planes, N, K'] float8_e4m3fn, K' columns in whole blocks of 128; zeros before and after the K of x.
        scales: [K' / 128, N] fp32, powers of two.
    """

    data: torch.Tensor
    scales: torch.Tensor


@triton.jit(do_not_specialize=["N"])
def _quantize_rows_kernel(
    x, data, scales, count, x_n, N, K: tl.constexpr, BEGIN: tl.constexpr, BLOCKS: tl.constexpr, PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    live = n < N if count is None else n < tl.load(count)
    if tl.max(live.to(tl.int32), 0) > 0:
        b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
        c = b[:, None] * 128 + tl.arange(0, 128)[None, :]
        k = c - BEGIN
        inside = live[:, None, None] & ((k >= 0) & (k < K))[None, :, :]
        values = tl.load(x + (n * x_n)[:, None, None] + k[None, :, :], mask=inside, other=0.0).to(tl.float32)
        bits = scale_bits(tl.max(tl.abs(values), 2))
        scale = bits.to(tl.float32, bitcast=True)
        values *= reciprocal(bits)[:, :, None]
        high = values.to(tl.float8e4nv)
        stored = live[:, None, None] & (b < BLOCKS)[None, :, None]
        at = data + (n * (BLOCKS * 128))[:, None, None] + c[None, :, :]
        tl.store(at, high, mask=stored)
        if PLANES == 2:
            plane = tl.cast(N, tl.int64) * (BLOCKS * 128)
            tl.store(at + plane, (values - high.to(tl.float32)).to(tl.float8e4nv), mask=stored)
        at = scales + n[:, None] + b.to(tl.int64)[None, :] * N
        tl.store(at, scale, mask=live[:, None] & (b < BLOCKS)[None, :])


def quantize_rows(x: torch.Tensor, planes: int, begin: int = 0, count: torch.Tensor | None = None) -> QuantizedRows:
    """Rounds x [N, K] to e4m3.

    Args:
        planes: e4m3 numbers per element.
        begin: columns of the first block before the first column.
        count: [1] int32, rows to round, N at most; None: all. The others are undefined.
    """
    assert x.stride(1) == 1
    if not dispatch.on_gpu(x):
        return QuantizedRows(*reference(x, planes, begin))
    (N, K), blocks = x.shape, -(-(begin + x.shape[1]) // COLUMNS)
    rows = QuantizedRows(
        torch.empty(planes, N, blocks * COLUMNS, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(blocks, N, dtype=torch.float32, device=x.device),
    )
    tile = dict(BLOCK_N=4, BLOCK_B=min(8, triton.next_power_of_2(blocks)), num_warps=4)
    _quantize_rows_kernel[triton.cdiv(N, tile["BLOCK_N"]), triton.cdiv(blocks, tile["BLOCK_B"])](
        x, *rows, count, x.stride(0), N, K=K, BEGIN=begin, BLOCKS=blocks, PLANES=planes, **tile, **pdl_options(x)
    )  # fmt: skip
    return rows
