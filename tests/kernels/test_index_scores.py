"""index_scores: kernel and reference against float64, for decode steps, verified groups and prompt chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.indexer.choose import PLANES
from kernels.indexer.reference import index_scores as reference
from kernels.indexer.reference import ordered
from kernels.indexer.scores import index_scores
from kernels.scaled_keys import rounded

OPS = pytest.mark.parametrize("op", [index_scores, reference], ids=["kernel", "reference"])


def make(
    counts: list[int], lengths: list[int], heads: int, width: int, page_size: int, dtype: torch.dtype, device: Any
) -> tuple[Tensor, ...]:
    """Queries at the ends of sequences over pages in no order; unused slots are NaN, unused pages far outside."""
    gen = torch.Generator().manual_seed(heads)
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=gen).int()
    cache = torch.full((len(order), 2, page_size, width), torch.nan)[:, 1]
    tables = torch.full((len(lengths), max(needed) + 2), 2**30, dtype=torch.int32)
    hi = []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[i, : needed[i]] = order[sum(needed[:i]) : sum(needed[: i + 1])]
        for j in range(length):
            cache[tables[i, j // page_size], j % page_size] = torch.randn(width, generator=gen)
        hi.append((torch.arange(count) + length - count + 1).clamp(min=0))
    N = sum(counts)
    q = torch.randn(N, heads * width + 8, generator=gen)[:, 8:].unflatten(1, (heads, width))
    weights = torch.randn(N, heads + 3, generator=gen)[:, 3:]
    wide = cache.to(dtype).to(device)
    return q.to(dtype).to(device), weights.to(device), wide, tables.to(device), torch.cat(hi).int().to(device)


def check(
    counts: list[int],
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    tables: Tensor,
    hi: Tensor,
    got: Tensor,
    shrunk: int = 1,
) -> None:
    """Compares scores, or those divided by `shrunk`, with float64."""
    n, page_size = 0, cache.shape[1]
    for i, count in enumerate(counts):
        for _ in range(count):
            at = torch.arange(int(hi[n]))
            keys = cache.cpu()[tables[i].cpu()[at // page_size].long(), at % page_size].double()
            products = (keys @ q[n].double().cpu().T).relu()
            want = products @ weights[n].double().cpu() / shrunk
            # Products of up to 128 terms of size 1, of 64 heads, in fp32: sqrt(128 * 64) roundings of 2^-24 of
            # partial sums up to 60, at most.
            torch.testing.assert_close(got[n, : len(at)].double().cpu(), want, atol=3e-4, rtol=0)
            assert got[n, len(at) :].isnan().all(), "scores of keys that the query may not read"
            n += 1


@OPS
@pytest.mark.parametrize(
    "each, lengths, heads, width, page_size",
    [
        (1, [300, 0, 7], 4, 16, 16),
        (5, [130, 64, 5], 6, 24, 64),
        (3, [200], 32, 128, 128),
        (17, [90, 17], 64, 32, 1),
        (2, [33, 300], 1, 8, 7),
        (5, [130, 64, 3], 16, 24, 64),  # in two products each
        (6, [90, 0], 12, 16, 16),
        (9, [70], 5, 8, 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_of_a_decode_step(
    op: Any, each: int, lengths: list[int], heads: int, width: int, page_size: int, dtype: torch.dtype, device: Any
) -> None:
    counts = [each] * len(lengths)
    q, weights, cache, tables, hi = make(counts, lengths, heads, width, page_size, dtype, device)
    got = torch.full((len(q), max(lengths) + 40), torch.nan, device=device)
    op(q, weights, cache, tables, hi, None, each, got)
    check(counts, q, weights, cache, tables, hi, got)


@OPS
@pytest.mark.parametrize("each, heads, width, page_size", [(1, 32, 128, 64), (5, 6, 24, 7), (6, 64, 32, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_in_e4m3(
    op: Any, each: int, heads: int, width: int, page_size: int, dtype: torch.dtype, device: Any
) -> None:
    """Numbers times a power of two are exact in fp16 here; pages of keys are strided, those of scales are not."""
    lengths = [130, 5, 0]
    q, weights, wide, tables, hi = make([each] * 3, lengths, heads, width, page_size, torch.float32, device)
    few, scales = rounded(wide)
    scales *= 2.0 ** (torch.arange(page_size, device=device) % 3)  # of its own for each slot
    cache = torch.full((len(wide), 2, page_size, width), torch.nan, device=device).to(torch.float8_e4m3fn)[:, 1]
    cache.copy_(few)
    got = torch.full((len(q), 170), torch.nan, device=device)
    op(q.to(dtype), weights, cache, tables, hi, None, each, got, scales)
    check([each] * 3, q.to(dtype), weights, few.float() * scales[..., None], tables, hi, got / 4, 4)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("heads, page_size", [(1, 7), (2, 16), (6, 16), (32, 128), (64, 1)])
def test_single_queries_count_first_digits(
    op: Any, heads: int, page_size: int, scaled: bool, dtype: torch.dtype, device: Any
) -> None:
    """Counts are of the very scores that are written, NaN and zeros of either sign too, and are added."""
    lengths = [300, 0, 7, 130]
    q, weights, cache, tables, hi = make([1] * 4, lengths, heads, 16, page_size, dtype, device)
    cache[tables[3, 0]], q[2] = -0.0, torch.nan
    cache, *scales = rounded(cache) if scaled else (cache,)
    got = torch.full((4, 320), torch.nan, device=device)
    for cu_q in (None, torch.arange(5, device=device).int()):
        numbers = torch.full((PLANES, 6, 256), 5, dtype=torch.int32, device=device)[:, 1:5]  # of some rows
        op(q, weights, cache, tables, hi, cu_q, 1, got, *(scales or [None]), numbers)
        codes = [ordered(got[n, :length]) >> 24 for n, length in enumerate(lengths)]
        assert torch.equal(numbers[0] - 5, torch.stack([code.bincount(minlength=256).int() for code in codes]))
        assert numbers[0, 1].eq(5).all() and numbers[0, 2, 255] == 12 and (numbers[1:] == 5).all()


@OPS
def test_prompt_chunks(op: Any, device: torch.device) -> None:
    """A sequence may have no query in a part of a chunk."""
    counts, lengths = [19, 0, 1, 33], [150, 40, 3, 33]
    q, weights, cache, tables, hi = make(counts, lengths, 5, 24, 16, torch.float32, device)
    cu_q = torch.tensor([0, *counts], device=device).cumsum(0).int()
    got = torch.full((len(q), 160), torch.nan, device=device)
    op(q, weights, cache, tables, hi, cu_q, 33, got)
    check(counts, q, weights, cache, tables, hi, got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("heads, rows", [(32, 5), (32, 6), (32, 8), (32, 9), (64, 3), (64, 5)])
def test_scores_are_the_same_bit_for_bit_alone_and_in_a_group(
    heads: int, rows: int, scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Verification has to choose what plain decoding chooses."""
    q, weights, cache, tables, hi = make([rows], [500], heads, 128, 64, dtype, device)
    cache, *scales = rounded(cache) if scaled else (cache,)
    together = torch.full((rows, 512), torch.nan, device=device)
    alone = together.clone()
    index_scores(q, weights, cache, tables, hi, None, rows, together, *scales)
    for n in range(rows):
        at = slice(n, n + 1)
        index_scores(q[at], weights[at], cache, tables, hi[at], None, 1, alone[at], *scales)
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())


def test_a_rectifier_over_the_sum_is_caught(device: torch.device) -> None:
    q, weights, cache, tables, hi = make([1], [40], 4, 16, 16, torch.float32, device)
    got = torch.full((1, 64), torch.nan, device=device)
    index_scores(q, weights.abs().neg(), cache, tables, hi, None, 1, got)
    with pytest.raises(AssertionError):
        check([1], q, weights.abs().neg(), cache, tables, hi, got.relu())


@pytest.mark.gpu
def test_pages_beyond_2_to_the_31_elements() -> None:
    pages = (1 << 32) // (64 * 128) + 1
    cache = torch.zeros(pages, 64, 128, dtype=torch.bfloat16, device="cuda")
    cache[-1] = 1
    q = torch.ones(1, 32, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[0, pages - 1]], dtype=torch.int32, device="cuda")
    got = torch.full((1, 128), torch.nan, device="cuda")
    hi = torch.tensor([128], dtype=torch.int32, device="cuda")
    index_scores(q, torch.ones(1, 32, device="cuda"), cache, table, hi, None, 1, got)
    assert got[0, :64].eq(0).all() and got[0, 64:].eq(32 * 128).all()


@OPS
def test_nan_surfaces(op: Any, device: torch.device) -> None:
    q, weights, cache, tables, hi = make([2], [40], 4, 16, 16, torch.float32, device)
    cache[tables[0, 1], 3, 5] = torch.nan
    got = torch.zeros(2, 64, device=device)
    op(q, weights, cache, tables, hi, None, 2, got)
    assert got.isnan().nonzero().tolist() == [[0, 19], [1, 19]]
