"""Quantized weights: e4m3 or e2m1 data with scales, multiplied as they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

E4M3_MAX = 448.0  # largest finite e4m3
# e2m1 values: a sign, two bits of exponent, one of mantissa.
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix [R, K], or several [E, R, K], with a scale per row and group of columns.

    Column k belongs to group `(begin + k) // group`: a rank's part of a matrix may begin inside a group.

    Attributes:
        data: [..., R, K] float8_e4m3fn, or [..., R, K / 2] uint8: two e2m1, the even column in the low bits.
        scales: [..., G, R] fp32, or uint8 for e2m1: powers of two with bias 127. Rows are last, so that the scales of
            neighboring rows are read together.
        group: columns that share a scale: a multiple of 128, or 32 for e2m1.
        begin: columns of the first group before the first column; even for e2m1.
    """

    data: Tensor
    scales: Tensor
    group: int
    begin: int = 0

    @property
    def packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.data.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.data.shape
        return *rows, columns * (2 if self.packed else 1)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.data, self.scales))

    def rows(self, begin: int, end: int) -> ScaledMatrix:
        return replace(self, data=self.data[..., begin:end, :], scales=self.scales[..., begin:end])

    def __getitem__(self, index: int | slice) -> ScaledMatrix:
        assert self.data.dim() == 3
        return replace(self, data=self.data[index], scales=self.scales[index])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns [..., R, K], each element rounded once to `dtype`."""
        if self.packed:
            pairs = torch.stack((self.data & 15, self.data >> 4), -1).flatten(-2)
            values = torch.tensor(E2M1, device=self.device)[pairs.int()]
            scales = torch.ldexp(torch.ones_like(self.scales, dtype=torch.float32), self.scales.int() - 127)
        else:
            values, scales = self.data.float(), self.scales
        group = (self.begin + torch.arange(self.shape[-1], device=self.device)) // self.group
        return (values * scales.mT[..., group]).to(dtype)


Matrix = Tensor | ScaledMatrix


def as_tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Returns a matrix, or several, as a tensor: dequantized to `dtype`, or unchanged."""
    return matrix.dequantize(dtype) if isinstance(matrix, ScaledMatrix) else matrix


def matrix_rows(matrix: Matrix, begin: int, end: int) -> Matrix:
    """Returns a view of rows of a matrix, or of each of several."""
    return matrix.rows(begin, end) if isinstance(matrix, ScaledMatrix) else matrix[..., begin:end, :]


def groups(begin: int, columns: int, group: int) -> int:
    """Returns how many groups a matrix touches whose first group begins `begin` columns before it."""
    return -(-(begin + columns) // group)


def quantize_fp8(weight: Tensor, block: tuple[int, int] = (128, 128)) -> ScaledMatrix:
    """Rounds a matrix [R, K], or each of [E, R, K], to e4m3 with block scales, as DeepSeek-V3 stores it.

    Source:
        DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
    """
    rows, columns = (-(-n // b) for n, b in zip(weight.shape[-2:], block, strict=True))
    padded = weight.new_zeros(*weight.shape[:-2], rows * block[0], columns * block[1], dtype=torch.float32)
    padded[..., : weight.shape[-2], : weight.shape[-1]] = weight
    blocks = padded.unflatten(-2, (rows, block[0])).unflatten(-1, (columns, block[1]))  # [..., rows, b, columns, b]
    max_abs = blocks.abs().amax((-3, -1))
    scales = torch.where(max_abs > 0, max_abs / E4M3_MAX, torch.ones_like(max_abs))
    data = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    data = data[..., : weight.shape[-2], : weight.shape[-1]].contiguous().to(torch.float8_e4m3fn)
    each = scales.repeat_interleave(block[0], -2)[..., : weight.shape[-2], :]
    return ScaledMatrix(data, each.mT.contiguous(), block[1])
