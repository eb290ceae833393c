"""select_blocks: kernel and reference against a choice made one page at a time."""

from __future__ import annotations

import random
import sys
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.sparse.reference import block_scores
from kernels.sparse.reference import select_blocks as reference
from kernels.sparse.select_blocks import TILE, select_blocks
from tests.kernels.interleaving import Streams

MODULE = sys.modules[select_blocks.__module__]
OPS = pytest.mark.parametrize("op", [select_blocks, reference], ids=["kernel", "reference"])

CHOICES: dict[str, dict[str, Any]] = {
    "plain": dict(ranges=[(1, 20, 24), (1, 1, 1), (0, 0, 0)], topk=4),
    "fewer-than-chosen": dict(ranges=[(1, 4, 5), (2, 3, 6)], topk=8),
    "many-tiles": dict(ranges=[(1, 300, 303), (3, 9, 11)], topk=4, heads=(7, 1), dim=80),
    "tiles-and-edges": dict(ranges=[(31, 290, 291), (33, 256, 256)], topk=5, heads=(6, 2)),
    "drafts": dict(ranges=[(1, 180, 183), (1, 180, 184), (1, 181, 184), (1, 7, 9), (1, 7, 9), (1, 8, 9)], queries=3,
                   topk=4, heads=(10, 2)),
    "nothing-to-choose": dict(ranges=[(5, 5, 5), (0, 0, 3)], topk=2),
    "one": dict(ranges=[(1, 100, 103)], topk=1),
    "none": dict(ranges=[(1, 100, 103), (2, 2, 3)], topk=0),
    "thousands": dict(ranges=[(1, 1300, 1303), (3, 1027, 1027)], topk=3, heads=(2, 1), dim=16),
}  # fmt: skip
# Of equal scores the earlier pages are chosen.
SHAPES = CHOICES | {f"ties-{name}": CHOICES[name] | dict(ties=True) for name in ("many-tiles", "drafts", "one")}


def case(shape: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    s = dict(queries=1, heads=(4, 2), dim=32, ties=False) | shape
    gen = torch.Generator().manual_seed(3)
    N, (q_heads, heads), dim = len(s["ranges"]), s["heads"], s["dim"]
    B, columns = N // s["queries"], max(held for *_, held in s["ranges"]) + 2
    q = torch.randn(N, q_heads, 2 * dim, generator=gen).to(dtype)[..., :dim]
    table = torch.randperm(B * columns, generator=gen).view(B, columns).int()
    bounds = torch.randn(B * columns, heads, 2, dim, generator=gen).sort(2, descending=True).values.to(dtype)
    if s["ties"]:
        bounds, q = bounds[:1].round().expand_as(bounds).clone(), q.round()  # sums of whole numbers are exact
    for b in range(B):  # what is no candidate of any query is NaN
        rows = s["ranges"][b * s["queries"] : (b + 1) * s["queries"]]
        used = torch.zeros(columns, dtype=torch.bool)
        for first, last, _ in rows:
            used[first:last] = True
        bounds[table[b, ~used].long()] = torch.nan
    ranges = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*s["ranges"], strict=True))
    first, last, pages = ranges
    width = max(first + s["topk"] + held - last for first, last, held in s["ranges"]) + 1
    return dict(
        q=q.to(device), bounds=bounds.to(device), block_table=table.to(device), first=first, last=last, pages=pages,
        topk=s["topk"], width=width, page_counts=torch.zeros(2, dtype=torch.int64, device=device),
    )  # fmt: skip


def check(found: torch.Tensor, c: dict[str, Any]) -> None:
    """Page by page, or part by part, in float64, whose choices are those of fp32 where scores are not within 1e-5."""
    q, bounds, tables = c["q"].double().cpu(), c["bounds"].double().cpu(), c["block_table"].cpu()
    heads, parts = bounds.shape[1], bounds.shape[2] if bounds.dim() == 5 else 1
    group, T = q.shape[1] // heads, len(q) // len(tables)
    for n, h in product(range(len(q)), range(heads)):
        row = (tables[n // T] if parts == 1 else tables[n, h]).tolist()
        numbers = [page * parts + part for page in row for part in range(parts)]
        first, last, pages = (int(c[x][n]) for x in ("first", "last", "pages"))
        scores = []
        for number in numbers[first:last]:
            one, two = bounds[number, h] if parts == 1 else bounds[number // parts, h, number % parts]
            each = q[n, h * group : (h + 1) * group]
            products = torch.maximum(each * one, each * two)
            scores.append(float(products.sum(1).max()))
        best = sorted(range(last - first), key=lambda j: (-scores[j], j))[: c["topk"]]
        read = [*range(first), *(first + j for j in sorted(best)), *range(last, pages)]
        assert found[n, h, : len(read)].tolist() == [numbers[j] for j in read], (n, h)
    reads = c["pages"] - (c["last"] - c["first"] - c["topk"]).clamp(min=0)
    assert c["page_counts"].tolist() == [heads * int(reads.sum()), heads * len(reads)]
    c["page_counts"].zero_()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pages are enough for a choice of tiles before that of pages."""
    monkeypatch.setattr(MODULE, "LANES", 64)


@OPS
@pytest.mark.parametrize("shape", SHAPES)
def test_choices(shape: str, op: Any, device: torch.device) -> None:
    c = case(SHAPES[shape], device)
    check(op(**c), c)


def parts_case(parts: int, queries: int, device: torch.device) -> dict[str, Any]:
    """Tables of each query and KV head; bounds of parts that are no candidates, and of pages in no table, are NaN."""
    gen = torch.Generator().manual_seed(4)
    heads, dim, ranges = 2, 32, [(1, 29, 34), (2, 9, 12), (0, 0, 3), (1, 2, 2)]
    ranges = [(first * parts, last * parts, held * parts) for first, last, held in ranges for _ in range(queries)]
    N, columns = len(ranges), 36
    table = torch.stack([torch.randperm(4 * columns, generator=gen)[:columns] for _ in range(N * heads)])
    table = table.view(N, heads, columns).int()
    full = torch.randn(4 * columns, heads, parts, 2, dim, generator=gen).sort(3, descending=True).values
    bounds = torch.full_like(full, torch.nan)
    for n, (first, last, _) in enumerate(ranges):
        for h in range(heads):
            pages = table[n, h, first // parts : last // parts].long()
            bounds[pages, h] = full[pages, h]
    first, last, pages = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*ranges, strict=True))
    q = torch.randn(N, 3 * heads, 2 * dim, generator=gen)[..., :dim]
    return dict(
        q=q.to(device), bounds=bounds.to(device), block_table=table.to(device), first=first, last=last, pages=pages,
        topk=7, width=8 * parts + 8, page_counts=torch.zeros(2, dtype=torch.int64, device=device),
    )  # fmt: skip


@OPS
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("parts, lanes", [(8, 1024), (8, 64), (4, 1024), (2, 64)])
def test_parts(
    parts: int, lanes: int, queries: int, op: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "LANES", lanes)
    c = parts_case(parts, queries, device)
    for _ in range(2):
        check(op(**c), c)


def stretches_of(begin: int, end: int, k: int) -> list[tuple[int, int, int]]:
    """Stretches of at most two tiles, and their shares of the k."""
    tiles = sorted({j // TILE for j in range(begin, end)})
    count = -(-len(tiles) // 2)
    each = -(-len(tiles) // count)
    found, given = [], 0
    for at in range(0, len(tiles), each):
        pages = [j for j in range(begin, end) if j // TILE in tiles[at : at + each]]
        until = (pages[-1] + 1 - begin) * k // (end - begin)
        found.append((pages[0], pages[-1] + 1, until - given))
        given = until
    return found


@OPS
@pytest.mark.parametrize("shape", ["plain", "many-tiles", "tiles-and-edges", "drafts", "thousands", "one"])
def test_stretches(shape: str, op: Any, device: torch.device) -> None:
    """Each stretch gives the best of its own."""
    c = case(SHAPES[shape], device)
    c["topk"], c["width"] = 11, c["width"] + 11
    how: dict[str, Any] = {"stretches": True} if op is select_blocks else {"stretch": 64}
    for _ in range(2):
        found = op(**c, **how).cpu()
        for n in range(len(c["q"])):
            first, last, pages = (int(c[x][n]) for x in ("first", "last", "pages"))
            row = c["block_table"][n // (len(c["q"]) // len(c["block_table"]))].cpu()
            scores = block_scores(c["q"][n].double().cpu(), c["bounds"][row.long().to(device)].double().cpu())
            for h, head_scores in enumerate(scores.tolist()):
                read = [*range(first)]
                for begin, end, k in stretches_of(first, last, min(11, last - first)) if first < last else []:
                    read += sorted(sorted(range(begin, end), key=lambda j: (-head_scores[j], j))[:k])
                read += range(last, pages)
                assert len(read) == pages - max(0, last - first - 11)
                assert found[n, h, : len(read)].tolist() == row[read].tolist(), (n, h)


@pytest.mark.parametrize(
    "lanes, sms, shape",
    [*product([256, 512], [None], ["many-tiles", "drafts", "tiles-and-edges"]), *product([64], [2, 9], ["many-tiles"])],
)
def test_looks_and_programs(
    lanes: int, sms: int | None, shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one look; of items cut among programs. What one launch leaves behind does not reach the next."""
    monkeypatch.setattr(MODULE, "LANES", lanes)
    c = case(SHAPES[shape], device)
    for _ in range(2):
        check(select_blocks(**c, sms=sms), c)


@OPS
def test_no_number_is_the_highest_score(op: Any, device: torch.device) -> None:
    c = case(SHAPES["many-tiles"], device)
    page = int(c["block_table"][0, 5 * TILE + 3])
    c["bounds"][page] = torch.nan
    assert page in op(**c)[0, 0].tolist()


SCORED = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 1.0, torch.inf, -torch.inf, torch.nan]), st.floats(1, 1.001)
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scores=st.lists(SCORED, min_size=1, max_size=150), topk=st.integers(1, 9), begin=st.integers(0, 40))
def test_any_scores(device: torch.device, scores: list[float], topk: int, begin: int) -> None:
    """Numbers far apart and close together, equal ones, none at all: scores that are a number of each page."""
    n = begin + len(scores)
    bounds = torch.zeros(n, 1, 2, 16)
    bounds[begin:, 0, 0, 0] = torch.tensor(scores)
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    ranges = (torch.tensor([x], dtype=torch.int32, device=device) for x in (begin, n, n))
    table = torch.arange(n, dtype=torch.int32, device=device)[None]
    given = q.to(device), bounds.to(device), table, *ranges, topk, begin + topk
    page_counts = torch.zeros(2, dtype=torch.int64, device=device)
    reads = begin + min(topk, len(scores))
    found, wanted = (op(*given, page_counts)[0, 0, :reads].tolist() for op in (select_blocks, reference))
    assert found == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, queries", [((28, 4), 1), ((8, 1), 5), ((32, 8), 1)])
def test_long(heads: tuple[int, int], queries: int, dtype: torch.dtype) -> None:
    """Against the reference on the GPU, by scores: the order of sums differs, and so may the last of the chosen."""
    ranges = [(1, 8188, 8192)] * queries + [(1, 999, 1003)] * queries + [(1, 3, 5)] * queries
    shape = dict(ranges=ranges, queries=queries, topk=32, heads=heads, dim=128)
    c = case(shape, torch.device("cuda"), dtype)
    found, wanted = select_blocks(**c), reference(**c)
    again = select_blocks(**c)
    for n, (first, last, held) in enumerate(ranges):
        count = first + min(32, last - first) + held - last
        assert torch.equal(found[n, :, :count], again[n, :, :count])
        for h in range(heads[1]):
            mine, theirs = set(found[n, h, :count].tolist()), set(wanted[n, h, :count].tolist())
            assert len(mine) == count and len(mine ^ theirs) <= 2


def at_once(lanes: tuple[int, int], generator: random.Random) -> bool:
    """Whether two launches on streams of their own choose what each chooses alone, the second of them other blocks."""
    c = case(SHAPES["many-tiles"], torch.device("cpu"))
    both = [c, c | {"q": -c["q"]}]
    alone = [reference(**one) for one in both]
    streams, found = Streams(2, MODULE), []
    for stream, (lane, one) in enumerate(zip(lanes, both, strict=True)):
        with streams.of(stream):
            found.append(select_blocks(**one, lane=lane))
    streams.run(generator)
    read = slice(8)  # of the first query: one page before those that it chooses, three behind them
    return all(torch.equal(a[0, :, read], b[0, :, read]) for a, b in zip(found, alone, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on CPUs")
def test_launches_of_two_lanes_may_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one lane may not: they share what they leave for each other's programs."""
    monkeypatch.setattr("kernels.dispatch.on_gpu", lambda t: True)
    assert all(at_once((1, 2), random.Random(seed)) for seed in range(3))
    assert not all(at_once((1, 1), random.Random(seed)) for seed in range(3))
