"""The PTX that converts packed weights, evaluated on a CPU, against their definition."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import packed_sm90
from kernels.scaled import ScaledMatrix, from_ue5m3, from_ue8m0, pack

MASK = 0xFFFFFFFF


def both_halves(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Applies an operation to the bf16 halves of words; fp32 holds its result before the rounding to bf16."""

    def apply(*words: Tensor) -> Tensor:
        halves = []
        for shift in (0, 16):
            given = [(w >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16).float() for w in words]
            halves.append(operation(*given).bfloat16().view(torch.int16).long() & 0xFFFF)
        return halves[0] | halves[1] << 16

    return apply


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & MASK,
    "shr.b32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda a, b, n: (b << n | a >> 32 - n) & MASK,
    "mul.lo.u32": lambda a, b: a * b & MASK,
    "sub.u32": lambda a, b: a - b & MASK,
    "mul.rn.bf16x2": both_halves(lambda a, b: a * b),
    "sub.rn.bf16x2": both_halves(lambda a, b: a - b),
    "fma.rn.bf16x2": both_halves(lambda a, b, c: a * b + c),
}


def run(code: str, *given: Tensor) -> list[Tensor]:
    """Evaluates code on words and int32 operands -> eight bf16 outputs."""
    values = {f"${8 + i}": operand.long() & MASK for i, operand in enumerate(given)}

    def read(name: str) -> Tensor:
        return torch.tensor(int(name, 0)) if name[0].isdigit() else values[name]

    for line in re.split(r"[;\n]+", code.strip("{}")):
        operation, _, rest = line.strip().partition(" ")
        operands = re.findall(r"[^\s,{}]+", rest)
        if operation == "mov.b32" and rest.startswith("{"):
            low, high, of = operands
            values[low], values[high] = read(of) & 0xFFFF, read(of) >> 16
        elif operation == "mov.b32":
            to, *of = operands
            values[to] = read(of[0]) | read(of[1]) << 16 if len(of) == 2 else read(of[0])
        elif operation and operation != ".reg":
            to, *of = operands
            values[to] = OPERATIONS[operation](*map(read, of))
    return [values[f"${i}"].to(torch.int32).to(torch.int16).view(torch.bfloat16) for i in range(8)]


def converted(code: str, matrix: ScaledMatrix, *more: Tensor) -> Tensor:
    """Converts a matrix with operands per word, and returns its columns in order."""
    outputs = run(code, matrix.data, *more)
    pairs = torch.stack([torch.stack(outputs[2 * p : 2 * p + 2], -1) for p in range(4)], 1)  # [R, p, word, h]
    return pairs.unflatten(2, (-1, 4)).transpose(1, 2).flatten(1)


def matrix_of(kind: str, scales: Tensor, group: int, zeros: Tensor | None = None) -> ScaledMatrix:
    codes = torch.randint(16, (scales.shape[1], 512), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes[0] = torch.arange(512) % 16  # all codes
    codes[1] = torch.arange(512) // 32 % 16  # in all places
    return ScaledMatrix(pack(codes, kind), scales, group, kind=kind, zeros=zeros)


def per_word(bits: Tensor) -> Tensor:
    """Spreads [G, R] of groups of 32 to words [R, 4 G]."""
    return bits.mT.repeat_interleave(4, 1)


@pytest.mark.parametrize("group", [16, 32])
def test_e2m1(group: int) -> None:
    R, G = 129, 512 // group
    low, high = (67, 193) if group == 32 else (0, 143)  # 2^-60 to 2^65, 2^-9 to 448
    codes = torch.randint(low, high, (G, R), generator=torch.Generator().manual_seed(1))
    codes = codes.to(torch.uint8)
    matrix = matrix_of("e2m1", codes, group)
    factors = codes.int() * (16 if group == 16 else 128) + (0x5A00 if group == 16 else 0x1F00)
    by_group = [factors[i :: 32 // group] for i in (0, 32 // group - 1)]
    found = converted(packed_sm90.E2M1_TO_BF16.value, matrix, *(per_word(by) for by in by_group))
    wanted = (from_ue5m3(codes) if group == 16 else from_ue8m0(codes)).double().mT.repeat_interleave(group, 1)
    unscaled = ScaledMatrix(matrix.data, torch.full((16, R), 127, dtype=torch.uint8), 32, kind="e2m1").dequantize()
    assert torch.equal(found.double() * packed_sm90.E2M1_LIFT.value, unscaled.double() * wanted)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_int4(is_scaled: bool, has_zeros: bool) -> None:
    """Scaled weights are what a dequantized matrix has in bf16, bit for bit."""
    gen = torch.Generator().manual_seed(2)
    scales = (10 ** (torch.rand(16, 130, generator=gen) * 6 - 5)).bfloat16()
    scales[:, ::7] *= -1
    zeros = torch.randint(16, (16, 130), generator=gen, dtype=torch.uint8) if has_zeros else None
    matrix = matrix_of("int4", scales if is_scaled else torch.ones_like(scales), 32, zeros)
    code = {
        (False, False): packed_sm90.INT4_TO_BF16, (False, True): packed_sm90.INT4_ZEROS_TO_BF16,
        (True, False): packed_sm90.INT4_TO_SCALED, (True, True): packed_sm90.INT4_ZEROS_TO_SCALED,
    }[is_scaled, has_zeros].value  # fmt: skip
    more = [per_word((scales.view(torch.int16).int() & 0xFFFF) + 0x1F00)] if is_scaled else []
    more += [per_word(zeros.int())] if zeros is not None else []
    found = converted(code, matrix, *more).float() * packed_sm90.INT4_LIFT.value
    assert torch.equal(found, matrix.dequantize(torch.bfloat16).float())
