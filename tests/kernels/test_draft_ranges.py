"""draft_ranges: kernel and arithmetic against the sets of tokens that they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from helix.kv_placement import KeyBudget, KVPlacement
from helix.layout import HelixLayout
from kernels.sparse.draft_ranges import draft_ranges


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("kvp", [1, 3, 4])
def test_ranges(kvp: int, block: int, device: torch.device) -> None:
    layout = HelixLayout.create("helix", kvp)
    positions = torch.tensor([0, 1, 3, 14, 15, 63, 64, 200, 511, 7])
    starts, live = torch.arange(len(positions)) % kvp, torch.arange(len(positions)) < 9
    budget = KeyBudget(sink_tokens=4, min_keys=5, share=110_000, latest=400_000)
    for rank in range(kvp):
        placement = KVPlacement(layout, rank, block, 16)
        found = placement.draft_ranges(positions, starts, live, budget)
        on_device = (x.to(device) for x in (positions, starts, live))
        sizes = dict(sink_tokens=4, min_keys=5, share=110_000, latest=400_000)
        for mine, theirs in zip(draft_ranges(*on_device, **placement.grid, **sizes), found, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        for n, position in enumerate(positions.tolist()):
            known, counts, sinks, recent = (int(x[n]) for x in found)
            local_tokens = [t for t in range(position + 1) if layout.token_owner(t, block, int(starts[n])) == rank]
            local_tokens = local_tokens if live[n] else []
            assert known == len(local_tokens)
            assert counts == min(known, max(5, math.ceil(round(0.11 * known, 6))))
            assert sinks == min(counts, sum(t < 4 for t in local_tokens))
            assert recent == max(0, int(counts * 4 / 10) - sinks)
            assert 0 <= sinks + recent <= counts
