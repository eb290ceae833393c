"""Pairs by local expert: each once, in the place of its expert."""

from __future__ import annotations

import pytest
import torch

from kernels.moe.pair_order import pair_order


@pytest.mark.parametrize(
    "N, k, experts, first, E, each",
    [(700, 8, 16, 3, 9, 64), (1, 1, 1, 0, 1, 16), (300, 4, 300, 0, 300, 128), (65, 2, 7, 5, 2, 32)],
)
@pytest.mark.parametrize("skewed", [False, True])
def test_pairs_lie_by_expert(
    N: int, k: int, experts: int, first: int, E: int, each: int, skewed: bool, device: torch.device
) -> None:
    """Chosen evenly, or all from the first half of the experts; programs count part of the pairs each."""
    gen = torch.Generator().manual_seed(N)
    choices = max(k, experts // 2) if skewed else experts
    ids = torch.stack([torch.randperm(choices, generator=gen)[:k] for _ in range(N)]).int()
    found = pair_order(ids.to(device), first, E, each)
    local = ids.flatten().long() - first
    here = (local >= 0) & (local < E)
    counts = torch.bincount(local[here], minlength=E)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    assert found.bounds.tolist() == bounds.tolist()
    assert found.block_ends.tolist() == ((counts + each - 1) // each).cumsum(0).tolist()
    order, place_of = found.order.cpu().long()[: bounds[-1]], found.inverse_order.cpu().long()
    assert order.sort().values.tolist() == here.nonzero().flatten().tolist()
    assert (local[order].diff() >= 0).all()
    assert torch.equal(place_of[order], torch.arange(len(order)))


def test_nobody_here(device: torch.device) -> None:
    found = pair_order(torch.full((40, 3), 7, dtype=torch.int32, device=device), 8, 5, 16)
    assert found.bounds.tolist() == 6 * [0] and found.block_ends.tolist() == 5 * [0]
