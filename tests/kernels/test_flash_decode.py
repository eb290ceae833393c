"""flash_decode: kernel and reference against float64, over shapes, pages, bounds and splits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.attention.flash_decode as kernel
from kernels.attention.flash_decode import decode_parts, flash_decode
from kernels.attention.reference import flash_decode as reference
from kernels.attention.split_kv import UnmergedAttention
from kernels.paged_keys import PagedKeys
from tests.kernels.oracle import Case, check, low_precision, make_case

SHAPES = {
    "plain": dict(counts=[1, 1, 1], lengths=[40, 1, 17]),
    "empty-shards": dict(counts=[1, 1, 1], lengths=[0, 33, 0]),
    "all-empty": dict(counts=[1, 1], lengths=[0, 0]),
    "group-7": dict(counts=[1, 1], lengths=[70, 5], heads=(7, 1), dim=80, page_size=48),
    "group-16-verify-3": dict(counts=[3, 3], lengths=[66, 3], heads=(16, 1), dim=64, page_size=100),
    "group-3-page-1": dict(counts=[2, 2], lengths=[37, 2], heads=(6, 2), dim=96, page_size=1),
    "mha-verify-8": dict(counts=[8, 8], lengths=[129, 8], heads=(2, 2)),
    "verify-32": dict(counts=[32], lengths=[50], heads=(4, 1), dim=16, page_size=16),
    "dim-256": dict(counts=[1], lengths=[65], heads=(2, 1), dim=256, page_size=64),
    "dim-8": dict(counts=[1], lengths=[20], heads=(5, 1), dim=8),
    "window": dict(counts=[1, 1, 1], lengths=[90, 20, 7], window=19),
    "window-verify": dict(counts=[4, 4], lengths=[90, 21], window=10, page_size=48),
    "sinks": dict(counts=[1, 1, 1], lengths=[130, 0, 17], heads=(14, 2), sinks=True),
    "sinks-window-verify": dict(counts=[4, 4], lengths=[90, 2], heads=(6, 2), window=10, page_size=48, sinks=True),
    "fewer-keys-than-queries": dict(counts=[4, 4], lengths=[2, 40]),
}


def run(op: Any, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    B = len(case.counts)
    out, lse = op(case.q.unflatten(0, (B, -1)), case.paged(B), **options)
    return out.flatten(0, 1), lse.flatten(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_case(**SHAPES[shape])
    check(*run(reference, case), case)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, device: torch.device) -> None:
    case = make_case(**SHAPES[shape], device=device)
    check(*run(flash_decode, case), case)


@pytest.mark.parametrize("sms", [1, 2, 7, 50])
@pytest.mark.parametrize("shape", ["plain", "group-16-verify-3", "window-verify", "empty-shards", "sinks"])
def test_sms(shape: str, sms: int, device: torch.device) -> None:
    case = make_case(**SHAPES[shape], device=device)
    check(*run(flash_decode, case, sms=sms), case)


def test_two_programs_on_each_multiprocessor(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(**SHAPES["plain"], dtype=torch.float16, device=device)
    if device.type == "cpu":
        monkeypatch.setattr(kernel, "sm_count", lambda device: 8)
    B, count = len(case.counts), kernel.sm_count(device)
    for sms in (None, count - 4):
        parts = decode_parts(case.q.unflatten(0, (B, -1)), case.paged(B), sms=sms)
        assert isinstance(parts, UnmergedAttention) and parts.programs == 2 * (sms or count)
        check(*parts.merge(), case)


@pytest.mark.parametrize("count, length, sms", [(1, 1500, 52), (1, 1490, 40), (2, 1100, 37), (17, 900, 36)])
def test_more_parts_than_one_go_merges(count: int, length: int, sms: int, device: torch.device) -> None:
    """A long sequence beside a short one, items that begin inside a run, and several query tiles."""
    case = make_case([count, count], [length, 100], heads=(4, 2), device=device)
    check(*run(flash_decode, case, sms=sms), case)


MANY = {
    "65": dict(counts=[13, 13], lengths=[301, 5], heads=(5, 1), dim=128),
    "96-pages-of-100": dict(counts=[12], lengths=[333], heads=(8, 1), dim=96, page_size=100),
    "100-window": dict(counts=[10, 10], lengths=[390, 0], heads=(10, 1), dim=64, page_size=64, window=150),
    "128-sinks": dict(counts=[16], lengths=[257], heads=(16, 2), dim=128, page_size=64, sinks=True),
    "group-of-72": dict(counts=[1, 1], lengths=[200, 64], heads=(72, 1), dim=128, page_size=64),
    "256": dict(counts=[32], lengths=[290], heads=(8, 1), dim=128),
    "72-dim-256": dict(counts=[9], lengths=[150], heads=(8, 1), dim=256, page_size=64),
}


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", MANY)
def test_many_rows(shape: str, dtype: torch.dtype, device: torch.device) -> None:
    """More rows a KV head than 64: tiles of 128, and masks where a tile of keys is not read whole (not of fp32)."""
    case = make_case(**MANY[shape], dtype=dtype, device=device)
    check(*run(flash_decode, case, sms=2), case)


@pytest.mark.parametrize("sinks", [False, True])
@low_precision(flash_decode, reference)
def test_low_precision(dtype: torch.dtype, op: Any, sinks: bool, device: torch.device) -> None:
    case = make_case([2, 2], [75, 9], heads=(8, 2), dim=128, dtype=dtype, sinks=sinks, device=device)
    check(*run(op, case), case)


def test_writes_where_told_and_nothing_else(device: torch.device) -> None:
    case = make_case([1, 1], [40, 0], device=device)
    out = torch.full((2, 1, 8, 64), torch.nan, device=device)
    lse = torch.full((2, 1, 8), torch.nan, device=device)
    check(*run(flash_decode, case, out=out[:, :, 2:6], lse=lse[:, :, 2:6], sms=3), case)
    check(out[:, 0, 2:6], lse[:, 0, 2:6], case)
    for rest in (out[:, :, :2], out[:, :, 6:], lse[:, :, :2], lse[:, :, 6:]):
        assert rest.isnan().all()


def test_nan_in_a_key_that_is_read_surfaces(device: torch.device) -> None:
    case = make_case([1], [20], device=device)
    page = int(case.block_table[0, 0])
    case.k_cache[page, 3] = torch.nan
    assert run(flash_decode, case)[0].isnan().any()


def test_repeats_bitwise(device: torch.device) -> None:
    case = make_case([3, 3], [90, 31], device=device)
    first, second = run(flash_decode, case, sms=5), run(flash_decode, case, sms=5)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("planted", ["one key left out", "one key too many", "scale", "lse", "sink"])
def test_planted_errors_are_caught(planted: str) -> None:
    case = make_case([1, 1], [40, 23], sinks=planted == "sink")
    expected = case.expected()
    if planted == "one key left out":
        case.hi[0] -= 1
    if planted == "one key too many":
        case.lo[1] = 0
        case.hi[1] -= 1
    if planted == "sink":  # once more
        case.sinks += math.log(2)
    out, lse = run(reference, case)
    if planted == "scale":
        out, lse = reference(case.q.unflatten(0, (2, -1)), replace(case.paged(2), scale=1.001 * case.scale))
        out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    if planted == "lse":
        lse = lse + 1e-3
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)


def tables_of_heads(case: Case, gen: torch.Generator) -> tuple[PagedKeys, tuple[torch.Tensor, torch.Tensor]]:
    """Some of a sequence's pages for each KV head, in order, the last one among them; and attention over these alone.

    A page that no head of a sequence reads holds NaN.
    """
    B, (page_size, kv_heads) = len(case.counts), case.k_cache.shape[1:3]
    counts = [-(-len(keys) // page_size) for keys in case.keys]
    table = torch.full((B, kv_heads, max(counts) + 1), -1, dtype=torch.int32)
    hi = torch.zeros(B, 1, dtype=torch.int32)
    out, lse = torch.zeros(case.q.shape, dtype=torch.float64), torch.full(case.q.shape[:2], -torch.inf).double()
    group = case.q.shape[1] // kv_heads
    for b, (keys, values, pages) in enumerate(zip(case.keys, case.values, counts, strict=True)):
        read = torch.rand(kv_heads, pages, generator=gen) < 0.5
        read[:, -1:] = True
        columns = int(read.sum(1).max()) if pages else 0
        hi[b] = max(0, columns * page_size - (-len(keys) % page_size))
        for h in range(kv_heads):
            chosen = read[h].nonzero()[:, 0]
            # Pages that are none stand anywhere before the last one.
            places = torch.randperm(max(columns - 1, 0), generator=gen)[: max(len(chosen) - 1, 0)].sort().values
            places = torch.cat([places, torch.tensor([columns - 1])])[: len(chosen)]
            table[b, h, places] = case.block_table[b, chosen].cpu()
            at = torch.cat(
                [torch.arange(p * page_size, min((p + 1) * page_size, len(keys))) for p in chosen] or [chosen]
            )
            for q_head in range(h * group, (h + 1) * group):
                scores = keys[at, h].double() @ case.q[b, q_head].double().cpu() * case.scale
                if len(at):
                    lse[b, q_head] = scores.logsumexp(0)
                    out[b, q_head] = scores.softmax(0) @ values[at, h].double()
        for page in (~read.any(0)).nonzero()[:, 0]:
            case.k_cache[case.block_table[b, page].long()] = torch.nan
            case.v_cache[case.block_table[b, page].long()] = torch.nan
    device = case.q.device
    lo = torch.zeros_like(hi)
    keys = PagedKeys(case.k_cache, case.v_cache, table.to(device), lo.to(device), hi.to(device), case.scale)
    return keys, (out, lse)


@pytest.mark.parametrize("op", [flash_decode, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("page_size", [16, 48, 128, 1])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (6, 6)])
def test_tables_of_heads(op: Any, heads: tuple[int, int], page_size: int, device: torch.device) -> None:
    """Each KV head reads pages of its own; entries below 0, wherever they stand, are no pages."""
    case = make_case([1, 1, 1], [331, 0, 47], heads=heads, page_size=page_size, device=device, seed=page_size)
    keys, expected = tables_of_heads(case, torch.Generator().manual_seed(page_size))
    options = {"sms": 3} if op is flash_decode else {}
    out, lse = op(case.q[:, None], keys, **options)
    check(out[:, 0], lse[:, 0], case, expected)


@pytest.mark.parametrize("op", [flash_decode, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("page_size", [16, 48])
def test_all_pages_for_each_head_are_the_table_bit_for_bit(op: Any, page_size: int, device: torch.device) -> None:
    case = make_case([1, 1, 1], [331, 0, 47], heads=(6, 2), page_size=page_size, device=device)
    keys, options = case.paged(3), {"sms": 3} if op is flash_decode else {}
    each = replace(keys, table=keys.table[:, None].expand(-1, 2, -1).contiguous())
    for mine, theirs in zip(op(case.q[:, None], each, **options), op(case.q[:, None], keys, **options), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
def test_one_graph_serves_every_length() -> None:
    case = make_case([1, 1, 1], [700, 3, 250], heads=(8, 2), dim=128, device="cuda")
    B = 3
    q, keys = case.q.unflatten(0, (B, -1)), case.paged(B)
    hi = keys.hi
    flash_decode(q, keys)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_decode(q, keys)
    for bounds in ([700, 3, 250], [1, 0, 64], [512, 2, 0]):
        hi.copy_(torch.tensor(bounds, device="cuda")[:, None])
        case.hi = hi.flatten().clone()
        graph.replay()
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "heads, dim, count", [((32, 8), 128, 1), ((28, 4), 128, 8), ((8, 1), 64, 32), ((16, 2), 256, 4)]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_long(dtype: torch.dtype, heads: tuple[int, int], dim: int, count: int, sinks: bool) -> None:
    shape: dict[str, Any] = dict(heads=heads, dim=dim, page_size=64, dtype=dtype, sinks=sinks, device="cuda")
    case = make_case([count] * 3, [5000, 0, 333], **shape)
    check(*run(flash_decode, case), case)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last pages of a cache of 2^32 elements hold what is read."""
    pages, page_size, dim = (1 << 32) // (64 * 128), 64, 128
    k_cache = torch.empty(pages, page_size, 1, dim, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.empty_like(k_cache)
    case = make_case([1], [100], heads=(4, 1), dim=dim, page_size=page_size, dtype=torch.bfloat16, device="cuda")
    for i in range(2):
        old = int(case.block_table[0, i])
        k_cache[pages - 1 - i], v_cache[pages - 1 - i] = case.k_cache[old], case.v_cache[old]
        case.block_table[0, i] = pages - 1 - i
    case.k_cache, case.v_cache = k_cache, v_cache
    check(*run(flash_decode, case), case)
