"""repeat_blocks: consecutive steps share as many blocks as they are told to, and renew the others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks.ranks.synthetic_kernels import reference_blocks as reference
from benchmarks.ranks.synthetic_kernels import repeat_blocks

SINK, LOCAL, HEADS = 1, 3, 2


def selected(
    op: Any, positions: list[int], pages: int, topk: int, repeat: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [N, heads, width] of queries at `positions`, which other pages were in, and the sequences' own pages."""
    N, width = len(positions), SINK + topk + LOCAL
    gen = torch.Generator().manual_seed(topk)
    tables = torch.randperm(2 * pages, generator=gen).int().view(2, pages)
    table = torch.full((N, HEADS, width), -7, dtype=torch.int32, device=device)
    ranges = torch.full((N,), SINK, dtype=torch.int32), torch.full((N,), pages - LOCAL, dtype=torch.int32)
    given = (x.to(device) for x in (tables, *ranges, torch.tensor(positions)))
    op(table, *given, topk, repeat)
    return table.cpu(), tables


@pytest.mark.parametrize(
    "topk, repeat, pages", [(32, 0.8, 600), (8, 0.0, 90), (5, 0.5, 40), (32, 1.0, 200), (1, 0.9, 9)]
)
def test_the_share_is_kept(topk: int, repeat: float, pages: int) -> None:
    """On average over steps, as exactly as it is rounded; what is renewed was not in the last eight choices."""
    steps = 100
    tables, _ = selected(reference, [*range(1000, 1000 + steps)] * 2, pages, topk, repeat, torch.device("cpu"))
    for sequence in (0, 1):
        step_tables = tables[sequence * steps : (sequence + 1) * steps, 1, SINK : SINK + topk]
        sets = [set(row.tolist()) for row in step_tables]
        assert all(len(one) == topk for one in sets)
        repeated = sum(len(a & b) for a, b in pairwise(sets)) / (steps - 1) / topk
        assert repeated == pytest.approx(repeat, abs=0.5 / 1024 + 1 / (steps - 1) / topk)
        for i in range(8, steps):
            new = sets[i] - sets[i - 1]
            assert not new & set().union(*sets[i - min(8, pages // topk - 2) : i])


@pytest.mark.parametrize("op", [repeat_blocks, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("pages", [12, 300])
def test_pages_of_the_sequence_in_order_and_nothing_else(pages: int, op: Any, device: torch.device) -> None:
    """Twelve pages have no eight ranges among what is chosen from: the layer's own choice stays."""
    tables, sequences = selected(op, [1 << 20, (1 << 20) + 1, 77, 78], pages, 9, 0.8, device)
    for n, table in enumerate(tables):
        column_of = {page: column for column, page in enumerate(sequences[n // 2].tolist())}
        for head in table.tolist():
            assert {*head[:SINK], *head[-LOCAL:]} == {-7}
            if pages == 12:
                assert {*head} == {-7}
                continue
            columns = [column_of[page] for page in head[SINK:-LOCAL]]
            assert columns == sorted(set(columns)) and columns[0] >= SINK and columns[-1] < pages - LOCAL
    ours, theirs = (selected(which, [5, 6, 7, 8], pages, 9, 0.8, device)[0] for which in (op, reference))
    assert torch.equal(ours, theirs)
