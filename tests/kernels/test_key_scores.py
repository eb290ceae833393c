"""What verification leaves of each key beside attention: kernel and reference against float64."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
import torch

from helix.layout import HelixLayout
from helix.worker.keeps import dtype_name, score_planes
from kernels.attention.flash_decode import decode_tile, flash_decode
from kernels.attention.reference import flash_decode as reference
from kernels.paged_keys import KeyScores
from tests.kernels.oracle import Case, check, make_case
from tests.pairs import params

SHAPES: dict[str, dict[str, Any]] = {
    "plain": dict(counts=[3, 3, 3], lengths=[40, 3, 17]),
    "one-query": dict(counts=[1, 1], lengths=[90, 5]),
    "group-7": dict(counts=[5, 5], lengths=[70, 0], heads=(14, 2), dim=80, page_size=48),
    "pages-of-1": dict(counts=[4, 4], lengths=[37, 9], heads=(6, 2), dim=96, page_size=1),
    "64-rows": dict(counts=[8, 8], lengths=[101, 40], heads=(8, 1), dim=128, page_size=64),
    "84-rows": dict(counts=[12, 12], lengths=[141, 30], heads=(7, 1), dim=128, page_size=128),
    "pages-of-100-two-tiles": dict(counts=[20], lengths=[133], heads=(8, 1), dim=96, page_size=100),
    "sinks": dict(counts=[2, 2], lengths=[75, 9], heads=(8, 2), dim=128, sinks=True),
    # A group of drafts that passes on to a rank which held nothing: its first queries read no key there.
    "first-queries-without-keys": dict(counts=[4, 4, 4], lengths=[2, 1, 40], heads=(6, 2), dim=64),
    "first-tile-without-keys": dict(counts=[12], lengths=[5], heads=(8, 2), dim=64),
}
OPS = {"kernel": flash_decode, "reference": reference}


def planes_for(case: Case, rows: str) -> KeyScores:
    """Planes of a layer among others; pages of scores are others than those of the keys, and hold no number."""
    T, (page_size, heads) = case.counts[0], case.k_cache.shape[1:3]
    count = score_planes(T, case.q.shape[1] // heads, case.q.shape[2], dtype_name(case.q.dtype))
    B, columns = case.block_table.shape
    pages = B * columns
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).view(B, columns).int()
    planes = torch.full((2, count, pages, heads, page_size), torch.nan, dtype=torch.float16, device=case.q.device)
    return KeyScores(planes[1], table.to(case.q.device), rows)


def drop_drafts(case: Case, dropped: int) -> None:
    """The last queries of the first sequence are no tokens: they read nothing."""
    if dropped:
        rows = slice(case.counts[0] - dropped, case.counts[0])
        case.hi[rows] = case.lo[rows] = 0


def expected(case: Case, b: int, rows: str) -> torch.Tensor:
    """[Hkv, n] float64: of the keys that a query reads the best, or the mean over the queries that count, base 2."""
    T, keys = case.counts[b], case.keys[b].double()
    queries = range(b * T, (b + 1) * T)
    live = [n for n in queries if case.lo[n] < case.hi[n]]
    heads = keys.shape[1]
    seen = keys[: max((int(case.hi[n]) for n in live), default=0)]
    if rows == "any":
        q = case.q[queries.start : queries.stop].double().cpu().unflatten(1, (heads, -1))  # [T, Hkv, group, D]
        scale = case.scale * math.log2(math.e) / (T * q.shape[2])
        tile = decode_tile(T * q.shape[2], q.shape[3], case.q.dtype)["BLOCK_M"]
        each = torch.einsum("thgd,nhd->hntg", q, seen)
        counts = torch.tensor([n in live for n in queries])[:, None].expand(each.shape)
        bests = [
            part.masked_fill(~mask, -torch.inf).amax(2).nan_to_num(neginf=0)  # none may count in a tile
            for part, mask in zip(each.flatten(2).split(tile, 2), counts.flatten(2).split(tile, 2), strict=True)
        ]
        return torch.stack(bests).sum(0) * scale
    total = torch.zeros(heads, len(seen), dtype=torch.float64)
    for n in {live[0], live[-1]} if live else ():
        q = case.q[n].double().cpu().view(heads, -1, keys.shape[-1]).mean(1)
        total += torch.einsum("hd,nhd->hn", q, seen) * case.scale * math.log2(math.e) / T
    return total


def check_scores(case: Case, scores: KeyScores) -> None:
    page_size = case.k_cache.shape[1]
    for b in range(len(case.counts)):
        wanted = expected(case, b, scores.rows)
        places = torch.arange(wanted.shape[-1])
        pages = scores.table[b].cpu()[places // page_size].long()
        found = scores.planes.cpu()[:, pages, :, places % page_size].double()  # [n, planes, Hkv]
        found = found.permute(1, 2, 0)
        assert found.isfinite().all()
        # fp16 keeps 2^-11 of what each plane holds, and sums in fp32 (of products of low precision exactly) hold on to
        # 1e-5. Queries whose sum stands for many rows are two numbers of low precision, which hold on to 5e-5.
        sizes, found = found.abs().sum(0), found.sum(0)
        assert ((found - wanted).abs() <= 2**-10 * sizes + 1e-4).all(), (found - wanted).abs().max()
        held = case.keys[b].shape[0]
        after = torch.arange(held, scores.table.shape[1] * page_size)
        rest = scores.planes.cpu()[:, scores.table[b].cpu()[after // page_size].long(), :, after % page_size]
        assert rest.isnan().all(), "scores of keys that nobody has"


def check_op(op: Any, case: Case, rows: str, **options: Any) -> None:
    """Attention with scores is attention; queries that read nothing may be NaN; scores are right."""
    scores = planes_for(case, rows)
    B = len(case.counts)
    live = case.lo < case.hi
    plain = op(case.q.unflatten(0, (B, -1)), case.paged(B), **options)
    case.q[~live] = torch.nan
    out, lse = op(case.q.unflatten(0, (B, -1)), case.paged(B), scores=scores, **options)
    if case.q.is_cuda:  # compiled beside scores, sums may be of another order: the last digit of out, 1e-5 of fp32
        digit = max(1e-5, torch.finfo(out.dtype).eps)
        torch.testing.assert_close(out, plain[0], atol=digit, rtol=digit)
        torch.testing.assert_close(lse, plain[1], atol=1e-5, rtol=1e-6)
    else:
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    empty = out.flatten(0, 1)[~live]
    assert torch.equal(empty, torch.zeros_like(empty)), "what reads nothing finds nothing, also among whole tiles"
    case.q[~live] = 0
    check(out.flatten(0, 1), lse.flatten(0, 1), case)
    check_scores(case, scores)


@pytest.mark.parametrize("shape, rows, op", params([*product(SHAPES, ["ends", "any"], OPS)]))
def test_scores(shape: str, rows: str, op: str, device: torch.device) -> None:
    case = make_case(**SHAPES[shape], device=device)
    if not shape.startswith("first"):
        drop_drafts(case, case.counts[0] // 2 if shape.endswith("two-tiles") else min(2, case.counts[0] - 1))
    check_op(OPS[op], case, rows, **({"sms": 3} if op == "kernel" else {}))


HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256)


def sharded_case(seed: int, n: int, device: torch.device) -> Case:
    """Groups of drafts of three sequences on one rank of a layout: shape by `seed`, lengths and bounds by `n` too."""
    most, most_rows = (40, 40) if device.type == "cpu" else (3000, 130)  # tokens before a group, rows of a KV head
    rng = random.Random(seed)
    kv_heads, group = rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 5, 7, 8, 16))
    T = rng.randint(1, min(32, most_rows // group))
    dim, page_size = rng.choice(HEAD_DIMS), rng.choice((16, 32, 48, 64, 100, 128))
    dtype = torch.float32 if device.type == "cpu" else rng.choice((torch.float32, torch.bfloat16, torch.float16))
    rng = random.Random(f"{seed} {n}")
    layout = HelixLayout.create("helix", rng.choice((2, 3, 8)), 1)
    append_block, rank = rng.randint(1, 40), rng.randrange(layout.kvp)
    reads = []
    for _ in range(3):
        start = rng.randrange(layout.kvp)
        # Mostly such that the rank's first keys are the group's own.
        first = (rank - start) % layout.kvp * append_block
        before = max(0, first - rng.randint(0, T)) if rng.random() < 0.6 else rng.randint(0, most)
        tokens = rng.randint(1, T)  # of the group, the rest are no drafts
        hi = [layout.local_length(before + t + 1, rank, append_block, start) for t in range(tokens)]
        reads.append(hi + [0] * (T - tokens))
    lengths = [max(hi) for hi in reads]
    heads = kv_heads * group, kv_heads
    return make_case(
        [T] * 3, lengths, heads=heads, dim=dim, page_size=page_size, dtype=dtype, reads=reads, device=device, seed=seed
    )


@pytest.mark.parametrize("rows", ["ends", "any"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.gpu) for n in range(4, 60))])
def test_groups_that_straddle_append_blocks(seed: int, rows: str, device: torch.device) -> None:
    for n in range(1 if device.type == "cpu" else 10):
        case = sharded_case(seed, n, device)
        check_op(flash_decode, case, rows)


@pytest.mark.parametrize("sms", [1, 2, 7, 50])
def test_splits(sms: int, device: torch.device) -> None:
    case = make_case([3, 3], [290, 70], heads=(6, 2), dim=128, page_size=16, device=device)
    scores = planes_for(case, "ends")
    flash_decode(case.q.unflatten(0, (2, -1)), case.paged(2), scores=scores, sms=sms)
    check_scores(case, scores)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", ["ends", "any"])
@pytest.mark.parametrize("shape", ["64-rows", "84-rows", "sinks"])
def test_low_precision(shape: str, rows: str, dtype: torch.dtype, device: torch.device) -> None:
    """Tiles of up to 128 rows, whose edges alone have masks."""
    case = make_case(**SHAPES[shape], dtype=dtype, device=device)
    scores = planes_for(case, rows)
    B = len(case.counts)
    out, lse = flash_decode(case.q.unflatten(0, (B, -1)), case.paged(B), scores=scores, sms=2)
    check(out.flatten(0, 1), lse.flatten(0, 1), case)
    check_scores(case, scores)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["ends", "any"])
@pytest.mark.parametrize(
    "heads, dim, count", [((28, 4), 128, 8), ((32, 8), 128, 5), ((16, 2), 64, 8), ((8, 1), 128, 12)]
)
def test_long(heads: tuple[int, int], dim: int, count: int, rows: str) -> None:
    case = make_case(
        [count] * 3, [9000, 12, 1333], heads=heads, dim=dim, page_size=128, dtype=torch.bfloat16, device="cuda"
    )
    scores = planes_for(case, rows)
    out, lse = flash_decode(case.q.unflatten(0, (3, -1)), case.paged(3), scores=scores)
    check(out.flatten(0, 1), lse.flatten(0, 1), case)
    check_scores(case, scores)
