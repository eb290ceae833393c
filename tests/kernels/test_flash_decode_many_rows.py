"""Verification of 65 to 128 rows a KV head: attention and scores of keys, where groups of rows straddle two halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import flash_decode_many_rows_sm90
from kernels.attention.flash_decode import flash_decode
from tests.kernels.oracle import check, make_case
from tests.kernels.test_flash_decode import run
from tests.kernels.test_key_scores import check_op, check_scores, drop_drafts, planes_for

# The 64th row is within a query's group but for groups of 8 and 16: half of its heads are attended by other warps.
SHAPES: dict[str, dict[str, Any]] = {
    "10-of-7": dict(counts=[10, 10, 10], lengths=[700, 10, 129], heads=(14, 2), page_size=64),
    "12-of-7": dict(counts=[12] * 4, lengths=[500, 12, 1000, 64], heads=(7, 1), page_size=128),
    "18-of-7": dict(counts=[18, 18], lengths=[333, 3000], heads=(7, 1), page_size=64),
    "13-of-5": dict(counts=[13, 13], lengths=[301, 50], heads=(10, 2), page_size=192),
    "16-of-8": dict(counts=[16, 16], lengths=[777, 16], heads=(8, 1), page_size=128),
    "25-of-3": dict(counts=[25, 25], lengths=[640, 91], heads=(3, 1), page_size=64),
    # A group of drafts that passes on to a rank which held nothing: its first queries read no key there.
    "first-queries-without-keys": dict(counts=[12, 12, 12], lengths=[5, 1, 90], heads=(7, 1), page_size=64),
    "40-sequences": dict(counts=[12] * 40, lengths=[*range(12, 412, 10)], heads=(7, 1), page_size=64),
}
ONLY_ATTENTION: dict[str, dict[str, Any]] = {
    "window": dict(counts=[10, 10], lengths=[690, 12], heads=(20, 2), page_size=64, window=150),
    "sinks": dict(counts=[16, 16], lengths=[257, 20], heads=(16, 2), page_size=64, sinks=True),
    "sinks-window": dict(counts=[12, 12], lengths=[900, 77], heads=(7, 1), page_size=128, sinks=True, window=70),
    "one-query-of-72": dict(counts=[1, 1, 1], lengths=[200, 0, 64], heads=(72, 1), page_size=64),
    "nothing": dict(counts=[12, 12], lengths=[0, 0], heads=(7, 1), page_size=64),
}
DTYPES = [torch.float16, torch.bfloat16]


def fits(case: Any) -> bool:
    """Tell whether the case is one of the kernel for Hopper; it is on every GPU of this kind."""
    B = len(case.counts)
    on_hopper = case.q.is_cuda and torch.cuda.get_device_capability()[0] == 9
    return not on_hopper or flash_decode_many_rows_sm90.fits(case.q.unflatten(0, (B, -1)), case.paged(B))


@pytest.mark.gpu  # the interpreter runs the general kernel: tests/kernels/test_flash_decode.py
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sms", [1, 3, None])
@pytest.mark.parametrize("shape", [*SHAPES, *ONLY_ATTENTION])
def test_attention(shape: str, sms: int | None, dtype: torch.dtype) -> None:
    case = make_case(**(SHAPES | ONLY_ATTENTION)[shape], dim=128, dtype=dtype, device="cuda")
    assert fits(case)
    first, second = run(flash_decode, case, sms=sms), run(flash_decode, case, sms=sms)
    check(*first, case)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["ends", "any"])
@pytest.mark.parametrize("dropped", [0, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores(shape: str, dropped: int, rows: str, dtype: torch.dtype) -> None:
    """Attention with scores is attention; queries that read nothing may be NaN; scores are those of all live rows."""
    case = make_case(**SHAPES[shape], dim=128, dtype=dtype, device="cuda")
    if not shape.startswith("first"):
        drop_drafts(case, dropped)
    assert fits(case)
    check_op(flash_decode, case, rows, sms=3)


@pytest.mark.parametrize("rows", ["ends", "any"])
@pytest.mark.parametrize("planted", ["the first half alone", "the second half alone"])
def test_scores_of_half_of_the_rows_are_caught(planted: str, rows: str, device: torch.device) -> None:
    case = make_case([12], [80], heads=(7, 1), page_size=64, dim=128, dtype=torch.float16, device=device)
    scores = planes_for(case, rows)
    q = case.q[None].clone()
    if planted == "the first half alone":  # 64 rows, and what is left of the tenth query
        q[:, 9:] = q[:, :1]
    else:
        q[:, :10] = q[:, 11:]
    flash_decode(q, case.paged(1), scores=scores, sms=2)
    with pytest.raises(AssertionError):
        check_scores(case, scores)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["", "ends", "any"])
def test_one_graph_serves_every_length(rows: str) -> None:
    """Runs begin and end within items, on all SMs; early, as in a step."""
    case = make_case(
        [12] * 3, [9000, 12, 1333], heads=(14, 2), dim=128, page_size=64, dtype=torch.bfloat16, device="cuda"
    )
    q, keys, scores = case.q.unflatten(0, (3, -1)), case.paged(3), planes_for(case, rows) if rows else None
    flash_decode(q, keys, scores=scores, early=True)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_decode(q, keys, scores=scores, early=True)
    last = torch.arange(12, device="cuda", dtype=torch.int32) - 11
    for lengths in ([9000, 12, 1333], [12, 0, 64], [4096, 5, 700]):
        hi = (torch.tensor(lengths, device="cuda", dtype=torch.int32)[:, None] + last).clamp(min=0)
        keys.hi.copy_(hi)
        case.hi = hi.flatten()
        graph.replay()
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last pages of a cache of 2^32 elements hold what is read."""
    pages, page_size, dim = (1 << 32) // (64 * 128), 64, 128
    k_cache = torch.empty(pages, page_size, 1, dim, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.empty_like(k_cache)
    case = make_case([12], [100], heads=(7, 1), dim=dim, page_size=page_size, dtype=torch.bfloat16, device="cuda")
    for i in range(2):
        old = int(case.block_table[0, i])
        k_cache[pages - 1 - i], v_cache[pages - 1 - i] = case.k_cache[old], case.v_cache[old]
        case.block_table[0, i] = pages - 1 - i
    case.k_cache, case.v_cache = k_cache, v_cache
    assert fits(case)
    check(*run(flash_decode, case), case)


def test_other_shapes_are_left_to_the_general_kernel(device: torch.device) -> None:
    case = make_case([12], [100], heads=(7, 1), dim=128, page_size=64, dtype=torch.float16, device=device)
    q, keys = case.q[None], case.paged(1)
    for rows in (q[:, :9], torch.cat([q, q], 1)):
        assert not flash_decode_many_rows_sm90.fits(rows, keys)
    assert not flash_decode_many_rows_sm90.fits(q.float(), keys)
    assert not flash_decode_many_rows_sm90.fits(q, replace(keys, table=keys.table[:, None]))
