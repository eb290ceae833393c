"""expanded_prefill: kernel and reference against float64, over segments, chunks and rows that read nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.mla.expanded_prefill import expanded_prefill
from kernels.mla.reference import expanded_prefill as reference
from tests.kernels.oracle import low_precision

OPS = pytest.mark.parametrize("op", [expanded_prefill, reference], ids=["kernel", "reference"])
MANY = [0 if i % 11 == 3 else 70 if i % 50 == 7 else 5 * i % 14 for i in range(150)]
SHAPES: dict[str, tuple[list[int], list[int], int, tuple[int, int, int]]] = {
    "whole prompts": ([33, 1, 16], [33, 1, 16], 4, (32, 16, 32)),
    "late chunks": ([20, 140], [150, 141], 2, (128, 64, 128)),
    "an empty segment between": ([5, 0, 7], [9, 0, 70], 1, (16, 8, 24)),
    "before this piece of keys": ([40, 30], [12, 0], 3, (24, 8, 16)),
    "odd dims": ([17], [70], 3, (40, 24, 20)),
    "many segments": (MANY, MANY, 1, (16, 8, 16)),
}


def make(
    counts: list[int], lengths: list[int], heads: int, dims: tuple[int, int, int], dtype: torch.dtype, device: Any
) -> tuple[Tensor, ...]:
    """Queries at the ends of sequences; keys that nobody may read are NaN."""
    gen, (nope, rope, value) = torch.Generator().manual_seed(sum(counts)), dims
    room = max(lengths) + 5
    keys = torch.full((len(counts), room, heads, nope + value), torch.nan)
    ropes = torch.full((len(counts), room, rope + 8), torch.nan)[..., 8:]
    hi = []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        keys[i, :length] = torch.randn(length, heads, nope + value, generator=gen)
        ropes[i, :length] = torch.randn(length, rope, generator=gen)
        hi.append((torch.arange(count) + length - count + 1).clamp(min=0))
    q = torch.randn(sum(counts), heads, nope + rope, generator=gen)
    cu_q = torch.tensor([0, *counts, 0]).cumsum(0).int()  # and a segment of padding
    return (
        q.to(dtype).to(device), keys.to(dtype).to(device), ropes.to(dtype).to(device), cu_q.to(device),
        torch.cat(hi).int().to(device),
    )  # fmt: skip


def check(got: tuple[Tensor, Tensor], q: Tensor, keys: Tensor, ropes: Tensor, cu_q: Tensor, hi: Tensor) -> None:
    nope = q.shape[2] - ropes.shape[2]
    # Outputs are means of values of size 1, in fp32 of sums of up to 192 products. In 16 bits, weights and the output
    # are rounded, each by half a unit of 2^-8 (bf16): errors of some hundred weights add up like a random walk.
    atol = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[q.dtype]
    for i, (first, last) in enumerate(pairwise(cu_q.tolist()[:-1])):
        for n in range(first, last):
            length = int(hi[n])
            if not length:
                assert not got[0][n].any() and (got[1][n] == -torch.inf).all()
                continue
            k, v = keys[i, :length].double().split([nope, keys.shape[3] - nope], 2)
            scores = torch.einsum("hd,thd->ht", q[n, :, :nope].double(), k)
            scores = (scores + q[n, :, nope:].double() @ ropes[i, :length].double().T) * 0.1
            wanted = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(got[0][n].double(), wanted, atol=atol, rtol=0)
            torch.testing.assert_close(got[1][n].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-6)


@OPS
@pytest.mark.parametrize("shape", SHAPES)
def test_segments(op: Any, shape: str, device: torch.device) -> None:
    case = make(*SHAPES[shape], torch.float32, device)
    check(op(*case[:4], max(SHAPES[shape][0]), case[4], 0.1), *case)


FEW_BITS = {
    "split": ([150, 9], [300, 9], 2),
    "segments": ([300, 0, 129], [1500, 0, 129], 3),
    "a row more": ([257], [257], 1),
    "fewer rows than a program's": ([64, 40], [500, 40], 2),
    "many segments": ([2 * n for n in MANY], [2 * n for n in MANY], 2),
    "of a rank that keeps no head": ([300], [300], 0),
}


@pytest.mark.parametrize(("counts", "lengths", "heads"), FEW_BITS.values(), ids=FEW_BITS)
@low_precision(expanded_prefill, reference)
def test_few_bits(
    dtype: torch.dtype, op: Any, device: torch.device, counts: list[int], lengths: list[int], heads: int
) -> None:
    case = make(counts, lengths, heads, (128, 64, 128), dtype, device)
    check(op(*case[:4], max(counts), case[4], 0.1), *case)
