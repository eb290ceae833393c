"""block_ranges: kernel and arithmetic against the sets of tokens that they stand for."""

from __future__ import annotations

import pytest
import torch

from helix.kv_placement import BlockBudget, KVPlacement
from helix.layout import HelixLayout
from kernels.sparse.block_ranges import block_ranges

CASES = {
    "one-rank": dict(kvp=1, block=16, page=16, sink=1, local=4, queries=1),
    "four-ranks": dict(kvp=4, block=16, page=16, sink=1, local=4, queries=3),
    "page-of-several-blocks": dict(kvp=3, block=8, page=32, sink=2, local=3, queries=4),
    "block-of-several-pages": dict(kvp=2, block=64, page=16, sink=1, local=3, queries=2),
    "no-sink": dict(kvp=5, block=16, page=16, sink=0, local=2, queries=2),
    "block-of-one": dict(kvp=3, block=1, page=16, sink=1, local=2, queries=1),
}


@pytest.mark.parametrize("parts, candidates", [(1, 0), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", CASES)
def test_ranges(name: str, parts: int, candidates: int, device: torch.device) -> None:
    """Candidates are the pages of committed tokens between sink and window, and no others."""
    c = CASES[name]
    layout = HelixLayout.create("helix", c["kvp"])
    lengths = [0, 1, 15, 16, 39, 200, 333, 511]
    budget = BlockBudget(c["sink"], c["local"], topk=5, from_tokens=40, parts=parts, candidates=candidates)
    T, page = c["queries"], c["page"]
    committed = torch.tensor(lengths).repeat_interleave(T)
    positions = committed + torch.arange(T).repeat(len(lengths))
    starts = (torch.arange(len(lengths)) % c["kvp"]).repeat_interleave(T)
    live = torch.ones_like(positions, dtype=torch.bool)
    live[2 * T] = False
    for rank in range(c["kvp"]):
        placement = KVPlacement(layout, rank, c["block"], page)
        found = placement.block_ranges(positions, starts, live, T, budget)
        on_device = (x.to(device) for x in (positions, starts, live))
        sizes = dict(
            sink_blocks=c["sink"], local_blocks=c["local"], topk=5, from_tokens=40, parts=parts, candidates=candidates
        )
        kernel_ranges = block_ranges(*on_device, T, page_size=page, **placement.grid, **sizes)
        for mine, theirs in zip(kernel_ranges, found, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        for n, p in enumerate(positions.tolist()):
            first, last, pages, hi, *part_ranges = (int(x[n]) for x in found)
            local_tokens = [t for t in range(p + 1) if layout.token_owner(t, c["block"], int(starts[n])) == rank]
            local_tokens = local_tokens if live[n] else []
            assert pages == -(-len(local_tokens) // page)
            for j in range(pages):
                tokens = local_tokens[j * page : (j + 1) * page]
                sink = tokens[0] < c["sink"] * page
                window = tokens[-1] >= (p // page - c["local"] + 1) * page
                unfinished = len(tokens) < page or tokens[-1] >= int(committed[n])
                everything = p + 1 < 40
                assert (first <= j < last) == (not (sink or window or unfinished or everything)), (rank, p, j)
            looked_at = last - first if parts == 1 else min(candidates, last - first)
            left_out = (last - first) * parts - min(looked_at * parts, 5)
            assert hi == len(local_tokens) - left_out * page // parts
            if parts > 1:
                columns = [*range(first), *["candidate"] * looked_at, *range(last, pages)]
                here = [i for i, column in enumerate(columns) if column == "candidate"] or [first]
                assert part_ranges == [
                    here[0] * parts,
                    (here[0] + looked_at) * parts,
                    len(columns) * parts,
                    -(-len(local_tokens) // (page // parts)),
                ]
