"""flash_prefill: kernel and reference against float64, over segments, chunks, windows and empty shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import flash_prefill_sm90, split_prefill
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.paged_tiles import tile_shape
from kernels.attention.reference import flash_prefill as reference
from kernels.attention.split_prefill import split_count
from kernels.paged_keys import PagedKeys
from tests.kernels.oracle import Case, check, low_precision, make_case

MANY = [0 if i % 11 == 3 else 40 if i % 50 == 7 else 5 * i % 14 for i in range(150)]
SHAPES = {
    "whole-prompts": dict(counts=[33, 1, 16], lengths=[33, 1, 16]),
    "late-chunks": dict(counts=[20, 40], lengths=[150, 41], page_size=48),
    "empty-segment-between": dict(counts=[5, 0, 7], lengths=[9, 0, 70]),
    "shard-shorter-than-chunk": dict(counts=[40, 30], lengths=[12, 30]),
    "empty-shard": dict(counts=[30], lengths=[0]),
    "group-7": dict(counts=[19, 40], lengths=[64, 40], heads=(14, 2), dim=80, page_size=1),
    "group-16": dict(counts=[20], lengths=[31], heads=(16, 1), dim=128),
    "window": dict(counts=[70, 9], lengths=[150, 9], window=23, page_size=100),
    "sinks": dict(counts=[20, 3, 5], lengths=[150, 0, 5], heads=(6, 2), sinks=True),
    "sinks-window": dict(counts=[70, 9], lengths=[150, 4], window=23, page_size=100, sinks=True),
    "dim-256": dict(counts=[17], lengths=[70], heads=(2, 2), dim=256),
    "dim-8": dict(counts=[20], lengths=[20], heads=(5, 1), dim=8),
    # Tiles are counted through all segments, 64 of them at a time.
    "many-segments": dict(counts=MANY, lengths=MANY, heads=(4, 1), dim=16),
}


def run(op: Any, case: Case, blocks: bool = False, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q = torch.tensor([0, *case.counts], device=case.q.device).cumsum(0).int()
    longest = max(len(keys) for keys in case.keys)
    keys = in_blocks(case.paged()) if blocks else case.paged()
    return op(case.q, keys, cu_q, max(case.counts), longest, **options)


def in_blocks(keys: PagedKeys) -> PagedKeys:
    """The same keys and values, of each page a block for each head."""
    blocks = torch.stack((keys.k, keys.v), 1).permute(0, 3, 1, 2, 4).contiguous()  # [pages, Hkv, 2, page_size, D]
    k, v = (x.transpose(1, 2) for x in blocks.unbind(2))
    return replace(keys, k=k, v=v)


def split_into(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(split_prefill, "split_count", lambda items, tiles, slots: splits)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_case(**SHAPES[shape])
    check(*run(reference, case), case)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [False, True])
def test_kernel(shape: str, blocks: bool, device: torch.device) -> None:
    case = make_case(**SHAPES[shape], device=device)
    check(*run(flash_prefill, case, blocks), case)


@pytest.mark.parametrize("shape", SHAPES)
def test_split_keys(shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys shared by programs, more of them than tiles of keys at times: a sink counts once, no key twice."""
    split_into(monkeypatch, 3)
    case = make_case(**SHAPES[shape], device=device)
    check(*run(flash_prefill, case), case)


@pytest.mark.parametrize(
    "items, tiles, slots, at_most",
    [
        (56, 4096, 132, 1.05),  # 256 queries of 28 / 4 heads behind 512K keys
        (24, 512, 132, 1.10),  # 100 queries behind 64K
        (24, 4096, 132, 1.03),
        (2, 8192, 132, 1.10),
        (224, 512, 132, 1.08),  # 1,024 queries
        (1792, 512, 132, 1.05),  # 8,192
    ],
)
def test_splits_leave_few_programs_idle(items: int, tiles: int, slots: int, at_most: float) -> None:
    """Tiles of keys that the busiest slot gets, beside an even share of all."""
    splits = split_count(items, tiles, slots)
    busiest = -(-items * splits // slots) * -(-tiles // splits)
    assert busiest <= at_most * items * tiles / slots


@pytest.mark.parametrize("items, tiles, slots", [(24, 2, 132), (24, 0, 132), (132, 4096, 132), (264, 64, 132)])
def test_no_splits_where_none_pay(items: int, tiles: int, slots: int) -> None:
    assert split_count(items, tiles, slots) == 1


@pytest.mark.parametrize("shape", ["group-7", "whole-prompts", "dim-256"])
def test_splits_are_chosen_for_the_tiles_that_run(
    shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile more than was counted would be a round more of programs."""
    seen: list[int] = []
    monkeypatch.setattr(split_prefill, "split_count", lambda items, tiles, slots: seen.append(items) or 1)
    case = make_case(**SHAPES[shape], device=device)
    run(flash_prefill, case)
    q_heads, kv_heads = case.q.shape[1], case.k_cache.shape[2]
    block = tile_shape(max(case.counts) * q_heads // kv_heads, 64, case.q.shape[2], case.q.dtype)["BLOCK_M"]
    tiles = sum(-(-count * q_heads // kv_heads // block) for count in case.counts) * kv_heads
    assert [tiles] <= seen <= [tiles + (len(case.counts) - 1) * kv_heads]


@low_precision(flash_prefill, reference)
def test_low_precision(dtype: torch.dtype, op: Any, device: torch.device) -> None:
    case = make_case([40, 9], [75, 9], heads=(8, 2), dim=128, dtype=dtype, device=device)
    check(*run(op, case), case)


def test_round_robin_bounds(device: torch.device) -> None:
    """Bounds that stand still for a block of queries and then jump, as a rank of a larger kvp sees them."""
    case = make_case([60], [40], device=device)
    steps = torch.arange(60) // 8
    case.hi = (steps // 2 * 8 + 4).clamp(max=40).int().to(device)
    case.lo = (case.hi - 16).clamp(min=0)
    check(*run(flash_prefill, case), case)


def test_writes_where_told(device: torch.device) -> None:
    case = make_case([7, 4], [20, 0], device=device)
    out = torch.full((11, 6, 64), torch.nan, device=device)
    lse = torch.full((11, 6), torch.nan, device=device)
    run(flash_prefill, case, out=out[:, 1:5], lse=lse[:, 1:5])
    check(out[:, 1:5], lse[:, 1:5], case)
    assert out[:, [0, 5]].isnan().all() and lse[:, [0, 5]].isnan().all()


def test_a_future_key_is_caught() -> None:
    case = make_case([20], [20])
    expected = case.expected()
    case.hi[4] += 1
    out, lse = run(reference, case)
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, dim", [((32, 8), 128), ((28, 4), 128), ((8, 1), 64), ((4, 2), 256)])
@pytest.mark.parametrize("sinks", [False, True])
def test_long(dtype: torch.dtype, heads: tuple[int, int], dim: int, sinks: bool) -> None:
    shape: dict[str, Any] = dict(heads=heads, dim=dim, page_size=64, dtype=dtype, sinks=sinks, device="cuda")
    case = make_case([300, 129], [3000, 129], **shape)
    check(*run(flash_prefill, case), case)


# Hopper's kernel, at sizes around those of its tiles: 64 rows a group, 128 a program, 128 keys of two pieces.
ODD = dict(counts=[1, 17, 63, 65, 129, 300], lengths=[301, 18, 63, 60, 513, 600])
LONG = {
    **{f"{q}-over-{kv}": dict(heads=(q, kv), **ODD) for q, kv in ((4, 4), (14, 2), (8, 1), (16, 1))},
    **{f"window-{w}": dict(counts=[200, 90], lengths=[900, 91], heads=(14, 2), window=w) for w in (1, 64, 130, 257)},
    "many-segments": dict(counts=[10 * n for n in MANY], lengths=[10 * n for n in MANY], heads=(4, 2)),
    "one-tile-each": dict(counts=[1] * 9, lengths=[1, 63, 64, 65, 127, 128, 129, 191, 192]),
    "empty-segment-between": dict(counts=[40, 0, 9], lengths=[70, 0, 75], heads=(14, 2)),
    "empty-shard": dict(counts=[140, 150], lengths=[0, 9], heads=(8, 1)),
    "shard-shorter-than-chunk": dict(counts=[400, 130], lengths=[70, 129], heads=(8, 1)),
    "sinks": dict(counts=[300, 129, 5], lengths=[3000, 129, 0], heads=(28, 4), sinks=True),
    "sinks-window": dict(counts=[200, 90], lengths=[900, 91], heads=(14, 2), window=23, sinks=True),
    "page-128": dict(counts=[200, 3], lengths=[700, 3], heads=(14, 2), page_size=128),
    "page-192": dict(counts=[200, 3], lengths=[700, 3], heads=(14, 2), page_size=192, window=150),
    "fp16": dict(counts=[300, 65], lengths=[900, 65], heads=(14, 2), dtype=torch.float16),
}
LONG |= {f"{name}-dim-256": dict(dim=256) | shape for name, shape in LONG.items()}  # tiles of 64 keys


@pytest.mark.gpu
@pytest.mark.parametrize("splits, blocks", [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("shape", LONG)
def test_hopper(shape: str, splits: int, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into outputs full of NaN, and bitwise the same when repeated."""
    monkeypatch.setattr(flash_prefill_sm90, "MIN_ROWS", 1)
    monkeypatch.setattr(flash_prefill_sm90, "OF_KEYS", 0)
    split_into(monkeypatch, splits)
    case = make_case(**dict(dim=128, page_size=64, dtype=torch.bfloat16, device="cuda") | LONG[shape])
    keys = in_blocks(case.paged()) if blocks else case.paged()
    assert flash_prefill_sm90.fits(case.q, keys, max(case.counts), max(len(keys) for keys in case.keys))
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device="cuda")
    lse = torch.full(case.q.shape[:2], torch.nan, device="cuda")
    check(*run(flash_prefill, case, blocks, out=out, lse=lse), case)
    first, first_lse = out.clone(), lse.clone()
    for _ in range(5):
        run(flash_prefill, case, blocks, out=out, lse=lse)
        assert torch.equal(first, out) and torch.equal(first_lse, lse)


@pytest.mark.gpu
def test_long_chunks_take_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = flash_prefill_sm90.launch
    monkeypatch.setattr(flash_prefill_sm90, "launch", lambda *args: (launched.append(args), launch(*args)))
    for queries in (767, 768):
        case = make_case([queries], [1600], heads=(32, 8), dim=128, page_size=64, dtype=torch.bfloat16, device="cuda")
        check(*run(flash_prefill, case), case)
    assert [len(args[0]) for args in launched] == [768]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1 << 30, 1], ids=["triton", "hopper"])
def test_offsets_beyond_2_to_the_31(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pages of caches of 2^32 elements hold what is read."""
    monkeypatch.setattr(flash_prefill_sm90, "MIN_ROWS", rows)
    monkeypatch.setattr(flash_prefill_sm90, "OF_KEYS", 0)
    case = make_case([100], [1200], heads=(1, 1), dim=128, page_size=64, dtype=torch.bfloat16, device="cuda")
    pages = (1 << 32) // (64 * 128) + 1
    k_cache, v_cache = (torch.empty(pages, 64, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for i in range(-(-1200 // 64)):
        k_cache[pages - 1 - i] = case.k_cache[int(case.block_table[0, i])]
        v_cache[pages - 1 - i] = case.v_cache[int(case.block_table[0, i])]
        case.block_table[0, i] = pages - 1 - i
    case.k_cache, case.v_cache = k_cache, v_cache
    check(*run(flash_prefill, case), case)


@pytest.mark.parametrize(
    "change, fits",
    [
        ({}, True),
        ({"dtype": torch.float16, "page_size": 192}, True),
        ({"max_q": 6143}, False),
        ({"max_k": 1535}, False),
        ({"max_q": 100, "max_k": 16 << 10}, True),
        ({"max_q": 100, "max_k": (16 << 10) - 1}, False),
        ({"max_q": 32, "max_k": 16 << 10}, False),  # a program of one group reads the keys once as well
        ({"dim": 64}, False),
        ({"dim": 256}, True),
        ({"dtype": torch.float32}, False),
        ({"page_size": 96}, False),
        ({"scale": 0.0}, False),
        ({"scale": -1.0}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
        ({"kv_heads": 1}, False),  # of two: the slots of the rest lie between
        ({"blocks": True}, True),
    ],
    ids=str,
)
def test_shapes_of_the_kernel_for_hopper(change: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = dict(max_q=6144, max_k=1536, scale=0.1, kv_heads=2, capability=(9, 0), blocks=False)
    given |= dict(dim=128, dtype=torch.bfloat16, page_size=64) | change
    names = "max_q", "max_k", "scale", "kv_heads", "capability", "blocks"
    max_q, max_k, scale, kv_heads, capability, blocks = (given.pop(name) for name in names)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = make_case([2], [3], heads=(4, 2), **given)
    keys = replace(case.paged(), k=case.k_cache[:, :, :kv_heads], v=case.v_cache[:, :, :kv_heads], scale=scale)
    assert flash_prefill_sm90.fits(case.q, in_blocks(keys) if blocks else keys, max_q, max_k) == fits
