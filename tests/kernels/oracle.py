"""Paged caches full of traps, and attention over them in float64 by the textbook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.paged_keys import PagedKeys


@dataclass
class Case:
    """Queries of several sequences over a paged cache; what nobody may read is NaN or points nowhere sensible.

    Attributes:
        q: [N, Hq, D], sequence after sequence, counts[i] queries of sequence i.
        keys, values: the plain [S_i, Hkv, D] of each sequence, as the oracle reads them.
        lo, hi: [N] int32.
        sinks: [Hq] fp32, or None.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    counts: list[int]
    lo: Tensor
    hi: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def paged(self, B: int | None = None) -> PagedKeys:
        """Returns the kernels' input, with bounds [B, T] of `B` sequences' queries, or [N] of all."""
        lo, hi = (self.lo, self.hi) if B is None else (self.lo.view(B, -1), self.hi.view(B, -1))
        return PagedKeys(self.k_cache, self.v_cache, self.block_table, lo, hi, self.scale, self.sinks)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output [N, Hq, D] and natural-log LSE [N, Hq], float64; 0 and -inf where a query reads nothing.

        A sink is a column of scores beside those of the keys, whose weight goes nowhere.
        """
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        n = 0
        for count, keys, values in zip(self.counts, self.keys, self.values, strict=True):
            group = self.q.shape[1] // keys.shape[1]
            k = keys.double().cpu().repeat_interleave(group, 1)  # [S, Hq, D]
            v = values.double().cpu().repeat_interleave(group, 1)
            for _ in range(count):
                lo = int(self.lo[n])
                hi = max(lo, int(self.hi[n]))
                scores = torch.einsum("hd,shd->hs", self.q[n].double().cpu(), k[lo:hi]) * self.scale
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.double().cpu()[:, None]], 1)
                if scores.shape[1]:
                    lse[n] = scores.logsumexp(-1)
                    out[n] = torch.einsum("hs,shd->hd", scores.softmax(-1)[:, : hi - lo], v[lo:hi])
                n += 1
        return out, lse


def make_case(
    counts: list[int],
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    sinks: bool = False,
    reads: list[list[int]] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Sequences of `lengths` keys with `counts` causal queries at their end: the last one reads all, or its window.

    With `reads`, the queries of each sequence read as many of its first keys as that says.
    """
    gen = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    needed = [-(-length // page_size) for length in lengths]
    columns, pages = max([*needed, 1]) + 2, sum(needed) + 3
    order = torch.randperm(pages, generator=gen).tolist()
    # Pages are rows of a wider tensor, as the layers of one cache are, and unused slots are NaN.
    wide = torch.full((2, pages, 2, page_size, kv_heads, dim), torch.nan, dtype=dtype)
    k_cache, v_cache = wide[0, :, 1], wide[1, :, 1]
    table = torch.full((len(lengths), columns), 2**30, dtype=torch.int32)  # far outside: following it would fault
    keys, values, los, his = [], [], [], []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        k = torch.randn(length, kv_heads, dim, generator=gen).to(dtype)
        v = torch.randn(length, kv_heads, dim, generator=gen).to(dtype)
        keys.append(k)
        values.append(v)
        for page in range(needed[i]):
            where = order.pop()
            table[i, page] = where
            part = slice(page * page_size, min((page + 1) * page_size, length))
            k_cache[where, : part.stop - part.start] = k[part]
            v_cache[where, : part.stop - part.start] = v[part]
        hi = torch.tensor(reads[i]) if reads else (torch.arange(count) + length - count + 1).clamp(min=0)
        his.append(hi)
        los.append((hi - window).clamp(min=0) if window else torch.zeros_like(hi))
    total = sum(counts)
    q = torch.randn(total, q_heads, 2 * dim, generator=gen).to(dtype)[..., :dim]  # strided
    # Some far below every score, some far above, most among them.
    sink = torch.randn(q_heads, generator=gen) * 4 if sinks else None
    wide, table = wide.to(device), table.to(device)
    return Case(
        q.to(device), wide[0, :, 1], wide[1, :, 1], table, counts,
        torch.cat(los).int().to(device), torch.cat(his).int().to(device), keys, values,
        None if sink is None else sink.to(device),
    )  # fmt: skip


def low_precision(kernel: Any, reference: Any) -> pytest.MarkDecorator:
    """`parametrize` of both ops over bf16 and fp16; on a GPU alone where the interpreter multiplies bits of bf16."""
    return pytest.mark.parametrize(
        "op, dtype",
        [
            pytest.param(
                op, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.gpu] * (op is kernel and dtype is torch.bfloat16)
            )
            for name, op in (("kernel", kernel), ("reference", reference))
            for dtype in (torch.bfloat16, torch.float16)
        ],
    )


def check(out: Tensor, lse: Tensor, case: Case, expected: tuple[Tensor, Tensor] | None = None) -> None:
    """Compares with the oracle.

    Tolerances: fp32 sums of a few hundred terms of size 1 keep 1e-5 (2^-24 x sqrt(terms), and Triton's exp2 adds its
    own 2^-22). Below fp32 the weights are rounded to the dtype before the second product, large parts before they are
    merged, and the output once more, each by half a unit in the last place, 2^-9 for bf16 and 2^-12 for fp16, of values
    up to about 4. Two of the three count: a row as large as that is nearly one key's, whose weight is 1 and stays so.
    LSE stays fp32.
    """
    want, want_lse = expected or case.expected()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}[out.dtype]
    torch.testing.assert_close(out.double().cpu(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5, rtol=1e-6)
