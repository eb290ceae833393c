"""Quantized weights: 8-bit or packed 4-bit data with scales, multiplied as they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

E4M3_MAX = 448.0  # largest finite e4m3
# e2m1 values: a sign, two bits of exponent, one of mantissa.
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
INT4_ZERO = 8  # the code of 0 in int4 without zero points
PACKED_BLOCK = 32  # columns that four words of 4-bit codes hold
UE5M3_BIAS = 9
FP8_ROWS = 256  # of x, from which on `ScaledMatrix.fp8_rows` rounds them

Kind = Literal["e4m3", "e2m1", "int4"]


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix [R, K], or several [E, R, K], with a scale per row and group of columns.

    Column k belongs to group `(begin + k) // group`: a rank's part of a matrix may begin inside a group. An element is
    e4m3 or e2m1 times its scale (and its row's), or (int4 code - zero point) times its scale.

    Attributes:
        data: [..., R, K] float8_e4m3fn, or [..., R, K / 8] int32, see `pack`.
        scales: [..., G, R]. Rows are last, so that the scales of neighboring rows are read together. fp32 for e4m3;
            uint8 for e2m1, or for e4m3 in groups of 32: powers of two with bias 127 (UE8M0), and for e2m1 in groups of
            16 UE5M3, see `to_ue5m3`; bf16, fp16 or fp32 for int4.
        group: columns that share a scale: a multiple of 128, or 32 or 16 if packed or UE8M0.
        begin: columns of the first group before the first column; a multiple of 32 if packed.
        kind: type of an element.
        zeros: [..., G, R] uint8 zero points of int4; None: `INT4_ZERO`.
        row_scales: [..., R] fp32, a second scale; None: 1.
        fp8_rows: whether products with FP8_ROWS rows of x or more may round these to e4m3, with a scale per row and 128
            columns; for e4m3 alone. They are multiplied in their own dtype where no kernel is faster.
    """

    data: Tensor
    scales: Tensor
    group: int
    begin: int = 0
    kind: Kind = "e4m3"
    zeros: Tensor | None = None
    row_scales: Tensor | None = None
    fp8_rows: bool = False

    @property
    def packed(self) -> bool:
        """Whether eight elements share a word."""
        return self.kind != "e4m3"

    @property
    def wide_groups(self) -> bool:
        """Whether no 128 columns, from a group's first on, have more than one scale."""
        return self.group % 128 == 0 or self.scales.shape[-2] == 1

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.data.shape
        return *rows, columns * (8 if self.packed else 1)

    def __len__(self) -> int:
        return len(self.data)

    def rounds(self, rows: int) -> bool:
        """Returns whether products with so many rows of x may round them to e4m3."""
        return self.fp8_rows and rows >= FP8_ROWS

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def bytes(self) -> int:
        held = self.data, self.scales, self.zeros, self.row_scales
        return sum(t.numel() * t.itemsize for t in held if t is not None)

    def rows(self, begin: int, end: int) -> ScaledMatrix:
        return replace(
            self,
            data=self.data[..., begin:end, :],
            scales=self.scales[..., begin:end],
            zeros=None if self.zeros is None else self.zeros[..., begin:end],
            row_scales=None if self.row_scales is None else self.row_scales[..., begin:end],
        )

    def __getitem__(self, index: int | slice) -> ScaledMatrix:
        assert self.data.dim() == 3
        return replace(
            self,
            data=self.data[index],
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            row_scales=None if self.row_scales is None else self.row_scales[index],
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns [..., R, K], each element rounded once to `dtype`, or, with row scales, once before."""
        numbers, scales = unpack(self.data, self.kind) if self.packed else self.data, self.scales
        if scales.dtype == torch.uint8:
            scales = from_ue5m3(scales) if self.group == 16 else from_ue8m0(scales)
        zeros = None if self.zeros is None else self.zeros.mT
        return decode(numbers, scales.mT, self.kind, self.group, self.begin, zeros, self.row_scales).to(dtype)


def decode(
    numbers: Tensor,
    scales: Tensor,
    kind: Kind,
    group: int,
    begin: int = 0,
    zeros: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> Tensor:
    """Decodes a matrix, or several, to fp32 [..., R, K]; see `ScaledMatrix`.

    Args:
        numbers: [..., R, K] float8_e4m3fn, or 4-bit codes uint8.
        scales: [..., R, G], any type of plain numbers.
        zeros: [..., R, G] zero points of int4; None: `INT4_ZERO`.
        row_scales: [..., R].
    """
    columns = (begin + torch.arange(numbers.shape[-1], device=numbers.device)) // group
    if kind == "e4m3":
        values = numbers.float()
    elif kind == "e2m1":
        values = torch.tensor(E2M1, device=numbers.device)[numbers.int()]
    else:
        values = numbers.float() - (INT4_ZERO if zeros is None else zeros[..., columns].float())
    values = values * scales.float()[..., columns]
    return values if row_scales is None else values * row_scales[..., None]


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


def pack(codes: Tensor, kind: Kind) -> Tensor:
    """Packs 4-bit codes [..., R, K] uint8 -> [..., R, K / 8] int32, in the order in which tensor cores read them.

    Of 32 columns, word q has columns 8 p + 2 q + h as pair p, h = 0 in the low half, 1 in the high one: the registers
    of a thread q of four, with no shuffle. In a half, code p of int4 is at bits 4 p; e2m1's signs and magnitudes are
    where one shift and one mask bring a pair into bf16: 15 and 8..6, 12 and 5..3, 9 and 2..0. Pair 3 is at 11 and 10,
    14, 13 of the other half: a rotation by 6, which pair 2 takes, and a product with 2^3 + 2^8 + 2^14 bring it there.
    """
    pairs = codes.unflatten(-1, (-1, 4, 4, 2))
    halves = torch.zeros_like(pairs[..., 0, :, :], dtype=torch.int32)
    for p in range(4):
        code = pairs[..., p, :, :].int()
        if kind == "int4":
            halves |= code << 4 * p
        elif p < 3:
            halves |= (code >> 3 << 15 | (code & 7) << 6) >> 3 * p
        else:
            halves |= (code >> 3 << 11 | (code >> 2 & 1) << 10 | (code & 3) << 13).flip(-1)
    return (halves[..., 0] | halves[..., 1] << 16).flatten(-2)


def unpack(words: Tensor, kind: Kind) -> Tensor:
    """Inverts `pack`: [..., R, K / 8] int32 -> codes [..., R, K] uint8."""
    halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1).unflatten(-2, (-1, 4))
    pairs = []
    for p in range(4):
        if kind == "int4":
            pairs.append(halves >> 4 * p & 15)
        elif p < 3:
            code = halves << 3 * p
            pairs.append(code >> 12 & 8 | code >> 6 & 7)
        else:
            pairs.append((halves >> 8 & 8 | halves >> 8 & 4 | halves >> 13 & 3).flip(-1))
    return torch.stack(pairs, -3).flatten(-4).to(torch.uint8)


def to_ue5m3(scales: Tensor) -> Tensor:
    """Encodes positive e4m3, subnormals included, as uint8: five bits of exponent with bias 9, three of mantissa.

    Without subnormals, a shift and an addition make it bf16, and each of e4m3's values is exact. Zero has no code.
    """
    bits = scales.float().view(torch.int32)
    return ((bits >> 23) - 127 + UE5M3_BIAS << 3 | bits >> 20 & 7).to(torch.uint8)


def from_ue5m3(codes: Tensor) -> Tensor:
    """Inverts `to_ue5m3`: uint8 -> fp32."""
    codes = codes.int()
    return ((codes >> 3) + 127 - UE5M3_BIAS << 23 | (codes & 7) << 20).view(torch.float32)


def from_ue8m0(codes: Tensor) -> Tensor:
    """Decodes powers of two with bias 127, uint8 -> fp32."""
    return torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes.int() - 127)


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
