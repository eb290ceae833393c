"""keep_best: kernel and reference against one list of all ranks' blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.sparse.keep_best import keep_best
from kernels.sparse.reference import NONE
from kernels.sparse.reference import keep_best as reference


@pytest.mark.parametrize("op", [keep_best, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("ranks, topk, equal", [(2, 4, False), (3, 5, True), (8, 32, False), (5, 1, True)])
def test_the_best_of_all_ranks(ranks: int, topk: int, equal: bool, op: Any, device: torch.device) -> None:
    """Equal scores: the earlier block of the sequence, whoever stores it; what was not offered is left alone."""
    gen = torch.Generator().manual_seed(ranks)
    N, heads, width = 3, 2, topk + 9
    first = torch.tensor([0, 2, 5]).int()
    starts = torch.arange(N) % ranks
    counts = torch.randint(0, topk + 1, (ranks, N, heads), generator=gen)
    offered = torch.full((ranks, N, heads, topk, 2), NONE, dtype=torch.int32)
    everyone: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for k in range(ranks):
        for n in range(N):
            for h in range(heads):
                count = int(counts[k, n, h])
                pages = torch.randperm(100, generator=gen)[:count].sort().values
                scores = torch.randint(
                    -3 if equal else -(2**31) + 1, 3 if equal else 2**31 - 1, (count,), generator=gen
                )
                offered[k, n, h, :count, 0], offered[k, n, h, :count, 1] = scores.int(), pages.int()
                for i, (score, page) in enumerate(zip(scores.tolist(), pages.tolist(), strict=True)):
                    block = page * ranks + (k - int(starts[n])) % ranks
                    everyone.setdefault((n, h), []).append((-score, block, k, i))
    for k in range(ranks):
        table = torch.arange(N * heads * width).view(N, heads, width).int()
        wanted = table.clone()
        for (n, h), blocks in everyone.items():
            for _, _, owner, i in sorted(blocks)[topk:]:
                if owner == k:
                    wanted[n, h, first[n] + i] = -1
        found = table.to(device)
        counted = torch.zeros(2, dtype=torch.int64, device=device)
        op(offered.to(device), first.to(device), starts.to(device), found, k, counted)
        assert torch.equal(found.cpu(), wanted) and counted.tolist() == [-int((wanted < 0).sum()), 0]
