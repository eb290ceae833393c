"""select_tokens: kernel and reference against a choice made one key at a time."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.sparse.reference import SelectionGroup
from kernels.sparse.reference import select_tokens as reference
from kernels.sparse.select_tokens import select_tokens
from tests.kernels.peers import ThreadRendezvous

OPS = pytest.mark.parametrize("op", [select_tokens, reference], ids=["kernel", "reference"])
FEW: dict[str, Any] = dict(sequences=[(120, 21, 4, 8, 0), (37, 9, 0, 0, 0)], kv_heads=1)
PAGES_OF_128: dict[str, Any] = dict(sequences=[(150, 30, 2, 2, 0), (33, 8, 0, 0, 0)], reach=4, page=128)
NO_NUMBER: dict[str, Any] = FEW | dict(values=torch.where(torch.arange(120) % 10 == 7, torch.nan, torch.inf))
# Each sequence: known, counts, sinks, windows, fresh. Rows are cut into so many parts, or more if these would be long.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": dict(sequences=[(150, 21, 4, 8, 0), (77, 30, 0, 0, 0), (1, 1, 0, 0, 0)], layers=2),
    "few": FEW,
    "edges": dict(sequences=[(0, 0, 0, 0, 0), (100, 0, 0, 0, 0), (129, 129, 1, 2, 0), (64, 63, 0, 1, 0)]),
    "all-forced": dict(sequences=[(120, 50, 20, 30, 0), (16, 16, 16, 0, 0), (48, 9, 0, 9, 0)]),
    "fresh": dict(sequences=[(120, 50, 3, 10, 1), (90, 20, 0, 0, 1), (90, 20, 5, 0, 0), (0, 0, 0, 0, 1)], kv_heads=1),
    "pages-of-one": dict(sequences=[(150, 31, 2, 3, 0), (65, 7, 0, 0, 0)], page=1),
    "pages-of-128": dict(sequences=[(200, 40, 4, 4, 0), (128, 17, 0, 0, 0)], page=128),
    "planes": dict(sequences=[(140, 20, 1, 1, 0), (70, 9, 0, 0, 0)], planes=3),
    "planes-reach": dict(sequences=[(140, 20, 1, 1, 0)], planes=2, reach=2),
    "reach": dict(sequences=[(120, 30, 2, 2, 0), (33, 8, 0, 0, 0), (60, 9, 0, 3, 1), (0, 0, 0, 0, 0)], reach=8),
    "reach-one": dict(sequences=[(70, 30, 0, 0, 0)], reach=1, kv_heads=1),
    "reach-16-pages-of-one": dict(sequences=[(70, 30, 2, 2, 0), (9, 8, 0, 0, 0)], reach=16, page=1),
    "reach-pages-of-128": PAGES_OF_128,
    **{
        f"{name}-tile-{tile}-parts-{parts}": shape | dict(cut=dict(tile=tile, parts=parts))
        for tile, parts in ((32, 9), (64, 1), (256, 2))
        for name, shape in (("few", FEW), ("reach-pages-of-128", PAGES_OF_128))
    },
    "one-table": dict(sequences=[(140, 20, 1, 1, 0), (70, 9, 0, 0, 1), (1, 1, 0, 0, 0)], tables=1, kv_heads=3),
    "one-table-planes-reach": dict(sequences=[(140, 20, 1, 1, 0)], planes=2, reach=2, tables=1),
    "equal-scores": FEW | dict(values=torch.zeros(120)),
    # NaN is the highest score, but pushes out no sink and none of the window.
    "no-number": NO_NUMBER,
    "no-number-beside-forced": NO_NUMBER | dict(sequences=[(120, 15, 4, 8, 0), (37, 9, 0, 0, 0)]),
    # Parts of as many tiles as may be, whose keys all have one digit, the highest: of room for 14, 13 in two parts.
    "one-counter": dict(
        sequences=[(416, 100, 1, 1, 0)], kv_heads=1, values=torch.full((416,), torch.inf), cut=dict(parts=1)
    ),
}  # fmt: skip


def case(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Random scores, of which many are equal; what stands for no known key is NaN, and tables end in wild pages."""
    s = dict(page=16, kv_heads=2, planes=1, layers=1, reach=0, tail=5, values=None) | shape
    s = dict(tables=s["kv_heads"]) | s
    gen = torch.Generator().manual_seed(5)
    page, kv_heads, planes, B = s["page"], s["kv_heads"], s["planes"], len(s["sequences"])
    columns = max(-(-n // page) for n, *_ in s["sequences"]) + 1
    num_keys, counts, sinks, windows, fresh = (
        torch.tensor(x, dtype=torch.int32) for x in zip(*s["sequences"], strict=True)
    )
    block_tables, score_tables = (torch.randperm(B * columns, generator=gen).view(B, columns).int() for _ in range(2))
    # A stride between layers that no shape explains.
    scores = torch.full((s["layers"], planes + 1, B * columns, kv_heads, page), torch.nan).half()[:, :planes]
    for b in range(B):
        n = int(num_keys[b])
        if fresh[b]:
            continue
        own = (4 * torch.randn(s["layers"], planes, kv_heads, n, generator=gen)).half()
        own[..., ::3] = own[..., ::3].round()
        own = own if s["values"] is None else s["values"][:n].half().expand_as(own)
        j = torch.arange(n)
        scores[:, :, score_tables[b, j // page].long(), :, j % page] = own.permute(3, 0, 1, 2)
        score_tables[b, -(-n // page) :] = 1 << 30
    table = torch.full((s["layers"], B, s["tables"], int(counts.max()) + s["tail"] + 2), -7)
    given = dict(
        scores=scores, score_tables=score_tables, block_tables=block_tables, num_keys=num_keys, counts=counts,
        sinks=sinks,
        windows=windows, fresh=fresh.bool(), table=table.int(),
    )  # fmt: skip
    return {name: x.to(device) for name, x in given.items()} | dict(tail=s["tail"], reach=s["reach"])


def order(c: dict[str, Any], layer: int, b: int, head: int) -> list[tuple[float, ...]]:
    """What each known key of a row is compared by: NaN, score, sign; the highest for keys never left out."""
    page = c["scores"].shape[4]
    n, sinks, windows = (int(c[name][b]) for name in ("num_keys", "sinks", "windows"))
    found = []
    for j in range(n):
        if c["fresh"][b]:
            found.append((0.0, 0.0, 0.0))
            continue
        row = c["scores"][layer, :, int(c["score_tables"][b, j // page]), :, j % page].cpu().numpy()  # [planes, Hkv]
        row = row[:, head : head + 1] if c["table"].shape[2] > 1 else row
        total = np.float32(0)
        for x in row.flat:
            total += np.float32(x)
        score = float(row[0, 0] if row.size == 1 else np.float16(total))  # or 0 + -0 is 0
        found.append((1.0, 0.0, 0.0) if math.isnan(score) else (0.0, score, math.copysign(1, score)))
    if c["reach"]:
        found = [max(found[max(0, j - c["reach"]) : j + 1]) for j in range(n)]
    return [(2.0, 0.0, 0.0) if j < sinks or j >= n - windows else x for j, x in enumerate(found)]


def check(c: dict[str, Any]) -> None:
    page, table = c["scores"].shape[4], c["table"].cpu()
    for layer, b, head in np.ndindex(*table.shape[:3]):
        scores = order(c, layer, b, head)
        n, k = len(scores), int(c["counts"][b])
        selected = sorted(sorted(range(n), key=lambda j: (scores[j], j), reverse=True)[:k])
        blocks = c["block_tables"][b].tolist()
        wanted = [
            blocks[j // page] * page + j % page if j // page < len(blocks) else 0
            for j in [*selected, *range(n, n + c["tail"])]
        ]
        wanted += [-7] * (table.shape[3] - len(wanted))
        assert table[layer, b, head].tolist() == wanted, (layer, b, head)


def cut(patch: pytest.MonkeyPatch, tile: int = 32, parts: int = 3) -> None:
    for name, value in (("TILE", tile), ("MIN_PARTS", parts), ("PROGRAMS", 0)):
        patch.setattr(sys.modules[select_tokens.__module__], name, value)


def choose(op: Any, c: dict[str, Any]) -> None:
    c["table"].fill_(-7)
    op(**c)
    check(c)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Rows of several parts, parts of several tiles."""
    if request.node.get_closest_marker("gpu") is None:
        cut(monkeypatch)


@OPS
@pytest.mark.parametrize("shape", SHAPES)
def test_choices(shape: str, op: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, **SHAPES[shape].get("cut", {}))
    choose(op, case(SHAPES[shape], device))


@pytest.mark.parametrize("shape", ["few", "pages-of-one"])
def test_a_call_leaves_nothing_to_the_next(shape: str, device: torch.device) -> None:
    """Other scores, then other lengths, of the same number of rows."""
    for values in (None, torch.arange(150) % 7):
        c = case(SHAPES[shape] | dict(values=values), device)
        choose(select_tokens, c)
        c["num_keys"] -= c["num_keys"] // 3
        c["counts"] = torch.minimum(c["counts"], c["num_keys"] // 2)
        c["sinks"], c["windows"] = c["counts"] // 3, c["counts"] // 4
        choose(select_tokens, c)


def test_what_the_call_before_found_is_a_guess(device: torch.device) -> None:
    """The same scores again, then some a little and some far above or below, and all alike."""
    c = case(FEW, device)
    first = c["scores"].clone()
    for factor in (1, 1, 1.05, 1, 0.95, 4, 0.1, -1, -1, 0, 0, 1):
        c["scores"].copy_(first * factor)
        choose(select_tokens, c)


# Of three ranks: the first one's keys of one sequence, of another none; rooms that are enough, and one that is not.
TOGETHER = [
    dict(sequences=[(120, 40, 4, 6, 0), (37, 20, 4, 0, 0)], layers=2),
    dict(sequences=[(115, 40, 0, 5, 0), (0, 0, 0, 0, 0)], layers=2),
    dict(sequences=[(127, 9, 0, 6, 0), (30, 20, 0, 3, 0)], layers=2),
]
TOTALS = [40, 11]


@OPS
def test_ranks_choose_together(op: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of all, of equals the first rank's, of one rank's the latest; each rank writes its own."""
    ranks, rendezvous = len(TOGETHER), ThreadRendezvous(len(TOGETHER))
    cases = [case(shape, device) for shape in TOGETHER]

    def rank(i: int) -> int:
        counts = torch.tensor(TOTALS, dtype=torch.int32, device=device)
        overflow = torch.zeros(1, dtype=torch.int64, device=device)
        with rendezvous.lock:
            for _ in range(2):  # what one call leaves does not reach the next
                op(**cases[i], selection_group=SelectionGroup(rendezvous.gather(i), i, counts, overflow))
        return int(overflow)

    if op is select_tokens:  # each rank has a workspace of its own
        workspaces = threading.local()
        make = sys.modules[select_tokens.__module__]._workspace.__wrapped__

        def own(*key: Any) -> Any:
            if not hasattr(workspaces, "held"):
                workspaces.held = make(*key)
            return workspaces.held

        monkeypatch.setattr(sys.modules[select_tokens.__module__], "_workspace", own)
    with ThreadPoolExecutor(ranks) as threads:
        overflows = list(threads.map(rank, range(ranks)))
    lost = 0
    for layer, b, head in np.ndindex(2, 2, 2):
        scored = [(x, -i, j) for i, c in enumerate(cases) for j, x in enumerate(order(c, layer, b, head))]
        best = sorted(scored, reverse=True)[: TOTALS[b]]
        for i, c in enumerate(cases):
            selected, room, n = sorted(j for _, r, j in best if r == -i), int(c["counts"][b]), int(c["num_keys"][b])
            lost += max(0, len(selected) - room)
            blocks = c["block_tables"][b].tolist()
            slots = [
                blocks[j // 16] * 16 + j % 16 if j // 16 < len(blocks) else 0 for j in [*selected, *range(n, n + 5)]
            ]
            wanted = slots[: len(selected)][:room]
            wanted += [-1] * (room - len(wanted)) + slots[len(selected) :]
            assert c["table"][layer, b, head].tolist()[: room + 5] == wanted, (layer, b, head, i)
    assert sum(overflows) == 2 * lost > 0


HALVES = st.one_of(
    st.floats(width=16), st.sampled_from([0.0, -0.0, 1.0, 1.0, torch.inf, -torch.inf, torch.nan]), st.floats(1, 1.1)
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(HALVES, min_size=1, max_size=120),
    share=st.floats(0, 1),
    forced=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    reach=st.sampled_from([0, 4]),
)
def test_any_scores(
    device: torch.device, values: list[float], share: float, forced: tuple[int, int], reach: int
) -> None:
    """Numbers far apart and close together, equal ones, none at all."""
    n = len(values)
    k = round(share * n)
    sinks = min(forced[0], k)
    sequence = n, k, sinks, min(forced[1], k - sinks), 0
    c = case(dict(sequences=[sequence], reach=reach, kv_heads=1, values=torch.tensor(values)), device)
    for op in (select_tokens, reference):
        choose(op, c)


def long(layers: int, heads: int, lengths: list[int], share: float, page: int = 128) -> dict[str, Any]:
    """Random scores on the GPU of long sequences, of which that share is chosen."""
    rows = [(n, k, 4 * (k > 9), 5 * (k > 9), 0) for n in lengths for k in [int(n * share)]]
    return case(dict(sequences=rows, layers=layers, kv_heads=heads, page=page, tail=8), torch.device("cuda"))


def same(c: dict[str, Any]) -> None:
    """The kernel's table is the reference's, twice."""
    found = []
    for op in (reference, select_tokens, select_tokens):
        c["table"].fill_(-7)
        op(**c)
        found.append(c["table"].clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [0, 8])
def test_long(reach: int) -> None:
    same(long(8, 2, [131072, 131071, 40000, 3], 0.07) | dict(reach=reach))
    same(long(3, 2, [5000, 70001], 0.4, page=1) | dict(reach=reach))


@pytest.mark.gpu(gb=10)
def test_a_million_keys_beyond_31_bits() -> None:
    c = long(3, 1, [(1 << 20) + 77], 0.07)
    layer = c["scores"][0].numel() + (1 << 30)
    storage = torch.empty(3 * layer, dtype=torch.float16, device="cuda")
    apart = storage.as_strided(c["scores"].shape, (layer, *c["scores"].stride()[1:]))
    same(c | dict(scores=apart.copy_(c["scores"])))


@pytest.mark.gpu
def test_replayed_while_sequences_grow() -> None:
    c = long(4, 2, [60000, 9000], 0.1)
    lengths = c["num_keys"].clone()
    select_tokens(**c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_tokens(**c)
    for share in (1, 100, 700, 1000):
        c["num_keys"].copy_(lengths * share // 1000)
        c["counts"].copy_(c["num_keys"] // 10)
        c["sinks"].copy_((c["counts"] > 9) * 4)
        c["windows"].copy_((c["counts"] > 9) * 5)
        c["table"].fill_(-7)
        graph.replay()
        found = c["table"].clone()
        c["table"].fill_(-7)
        reference(**c)
        assert torch.equal(found, c["table"]), share


@pytest.mark.gpu
def test_more_rows_than_the_second_axis_of_a_grid_takes() -> None:
    """32 layers of 8 KV heads and 260 sequences: 66,560 rows."""
    layers, B, heads, page = 32, 260, 8, 16
    gen = torch.Generator("cuda").manual_seed(3)
    scores = torch.randn(layers, 1, B, heads, page, device="cuda", generator=gen).half()
    tables = torch.arange(B, device="cuda", dtype=torch.int32)[:, None]
    num_keys, counts, none = (torch.full((B,), n, device="cuda", dtype=torch.int32) for n in (page, 5, 0))
    found = torch.zeros(layers, B, heads, 5, device="cuda", dtype=torch.int32)
    select_tokens(scores, tables, tables, num_keys, counts, none, none, none.bool(), found, 0)
    best = scores[:, 0].topk(5).indices.sort().values  # [layers, B, heads, 5]
    # Of equal scores any may be topk's: their values are compared.
    selected = found - tables[None, :, None] * page
    assert torch.equal(
        scores[:, 0].gather(3, selected.long()).sort().values, scores[:, 0].gather(3, best).sort().values
    )
