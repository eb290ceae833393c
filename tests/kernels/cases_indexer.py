"""Cases of indexer scores, for decode steps, verification and prompts."""

from __future__ import annotations

from typing import Any

import torch

from kernels.indexer.scores import index_scores
from kernels.scaled_keys import quantize_fp8
from tests.kernels.suite import KERNEL, Call, Op

F32_F16 = torch.float32, torch.float16


def make_scores(
    *, counts: list[int], lengths: list[int], heads: int, width: int, page_size: int, device: torch.device,
    dtype: torch.dtype = torch.float32, few: bool = False, chunks: bool = False, far: bool = False, nan: bool = False,
) -> Call:  # fmt: skip
    """Makes queries at the ends of sequences over shuffled pages; unused slots are NaN, unused pages out of range.

    With `few`, keys are in e4m3; value pages are strided, scale pages are not. Entries without a score keep 7.
    """
    gen = torch.Generator().manual_seed(heads)
    needed = [-(-length // page_size) for length in lengths]
    pages = sum(needed) + 3
    order = torch.randperm(pages, generator=gen).int()
    cache = torch.full((pages, 2, page_size, width), torch.nan)[:, 1]
    tables = torch.full((len(lengths), max(needed) + 2), 2**30, dtype=torch.int32)
    his = []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[i, : needed[i]] = order[sum(needed[:i]) : sum(needed[: i + 1])]
        at = torch.arange(length)
        cache[tables[i, at // page_size].long(), at % page_size] = torch.randn(length, width, generator=gen)
        his.append((torch.arange(count) + length - count + 1).clamp(min=0))
    if nan:  # in the 20th key of the first sequence
        cache[tables[0, 1].long(), 19 - page_size, 5] = torch.nan
    N, hi = sum(counts), torch.cat(his).int()
    q = torch.randn(N, heads * width + 8, generator=gen)[:, 8:].unflatten(1, (heads, width)).to(dtype)
    weights = torch.randn(N, heads + 3, generator=gen)[:, 3:]
    scales = None
    if few:
        numbers, scales = quantize_fp8(cache)
        scales *= 2.0 ** (torch.arange(page_size) % 3)  # different for each slot
        cache = torch.full((pages, 2, page_size, width), torch.nan).to(torch.float8_e4m3fn)[:, 1]
        cache.copy_(numbers)
    else:
        cache = cache.to(dtype)
    keys = cache.double() * (1 if scales is None else scales.double()[..., None])
    scores = torch.full((N, max(lengths) + 40), 7.0, dtype=torch.float64)
    query_ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    for n, i in enumerate(query_ids.tolist()):
        at = torch.arange(int(hi[n]))
        products = (keys[tables[i, at // page_size].long(), at % page_size] @ q[n].double().T).relu()
        scores[n, : len(at)] = products @ weights[n].double()
    # fp32 sums of up to 128 terms of size 1, over 64 heads: at most sqrt(128 * 64) roundings of 2^-24 of partial sums
    # up to 60; four times as large with scales.
    max_error = 3e-4 * (4 if few else 1)
    if far:  # in a cache of 2^32 elements
        begin = (1 << 32) // cache[0].numel() + 1
        whole = torch.empty(begin + pages, page_size, width, dtype=dtype, device=device)
        whole[begin:] = cache.to(device)
        cache, tables = whole, tables + begin
    cu_q = torch.tensor([0, *counts]).cumsum(0).int().to(device) if chunks else None
    given = dict(
        q=q.to(device), weights=weights.to(device), cache=cache.to(device), tables=tables.to(device),
        hi=hi.to(device), cu_q=cu_q, max_q=max(counts), scores=torch.full_like(scores, 7.0).float().to(device),
        scales=None if scales is None else scales.to(device),
    )  # fmt: skip
    return Call(given, {"scores": (scores, max_error)})


def rectified_sum(case: Call) -> None:
    """Plants a fault that equals a rectifier over the sum of heads instead of each: negates the weights' signs."""
    case.given["weights"] = case.given["weights"].abs()


ONE = dict(counts=[1], lengths=[40], heads=4, width=16, page_size=16)
SCORES = Op("index_scores", make_scores, index_scores, mistakes={"weights": (ONE, rectified_sum)})


def steps(*shapes: tuple[int, list[int], int, int, int]) -> dict[str, dict[str, Any]]:
    """Returns decode shapes by name."""
    return {
        f"{each}-each-of-{len(lengths)}-heads-{heads}-width-{width}-page-{page}": dict(
            counts=[each] * len(lengths), lengths=lengths, heads=heads, width=width, page_size=page
        )
        for each, lengths, heads, width, page in shapes
    }


STEPS = steps(
    (1, [300, 0, 7], 4, 16, 16),
    (5, [130, 64, 5], 6, 24, 64),
    (3, [200], 32, 128, 128),
    (17, [90, 17], 64, 32, 1),
    (2, [33, 300], 1, 8, 7),
    (5, [130, 64, 3], 16, 24, 64),  # in two GEMMs each
    (6, [90, 0], 12, 16, 16),
    (9, [70], 5, 8, 16),
)
FEW = steps((1, [130, 5, 0], 32, 128, 64), (5, [130, 5, 0], 6, 24, 7), (6, [130, 5, 0], 64, 32, 16))
CHUNKS = dict(counts=[19, 0, 1, 33], lengths=[150, 40, 3, 33], heads=5, width=24, page_size=16, chunks=True)
OPS = [SCORES]
ROWS = [
    *SCORES.rows(STEPS, dtype=F32_F16),
    *SCORES.rows(FEW, few=(True,), dtype=F32_F16),
    *SCORES.rows({"chunks": CHUNKS}),  # a sequence may have no query in a part of a chunk
    *SCORES.rows({"nan": ONE | dict(counts=[2], nan=True)}),
    *SCORES.rows(
        {"one": dict(counts=[1], lengths=[128], heads=32, width=128, page_size=64)}, which=KERNEL, gpu=True, gb=30,
        dtype=(torch.bfloat16,), far=(True,),
    ),
]  # fmt: skip
