"""synthetic_drafts: kernel against reference, and both against the rate that was asked for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ranks.synthetic_kernels import reference_drafts as reference
from benchmarks.ranks.synthetic_kernels import synthetic_drafts


@pytest.mark.parametrize(
    "B, n, acceptance, seed, vocab", [(1, 1, 0.5, 0, 2), (7, 4, 0.8, 1, 151_936), (33, 31, 0.3, 2**40, 97)]
)
def test_the_kernel_is_the_reference(
    B: int, n: int, acceptance: float, seed: int, vocab: int, device: torch.device
) -> None:
    lengths = torch.randint(0, 2**31, (B,), generator=torch.Generator().manual_seed(B))
    mine = synthetic_drafts(lengths.to(device), n, acceptance, seed, vocab)
    for a, b in zip(mine, reference(lengths, n, acceptance, seed, vocab), strict=True):
        assert a.dtype == torch.int64 and torch.equal(a.cpu(), b)
        assert a.min() >= 0 and a.max() < vocab


def rates(acceptance: float, seed: int = 3) -> tuple[float, float]:
    """The share of 4000 rows' drafts at four places that holds, and how far that of any place is from the mean's."""
    tokens, outcome = reference(torch.arange(4000) * 5, 4, acceptance, seed, 1000)
    held = (tokens == outcome).double()
    return held.mean().item(), (held.mean(0) - held.mean()).abs().max().item()


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.8, 1.0])
def test_drafts_hold_at_the_rate(acceptance: float) -> None:
    # Five standard deviations of 16,000 coins, at most 5 * 0.5 / 126, and of 4,000.
    mean, spread = rates(acceptance)
    assert abs(mean - acceptance) <= 0.02 * (0 < acceptance < 1) and spread < 0.04
    assert abs(rates(acceptance + 0.05 - 0.1 * (acceptance > 0.5))[0] - acceptance) > 0.02, "the test could not fail"


def test_a_place_has_one_fate(device: torch.device) -> None:
    """Drafted again after a rejection before it, it is the same draft and is kept or refused as before."""
    lengths = torch.tensor([10, 20], device=device)
    tokens, outcome = synthetic_drafts(lengths, 6, 0.5, 0, 1000)
    again = synthetic_drafts(lengths + 2, 4, 0.5, 0, 1000)
    assert torch.equal(again[0], tokens[:, 2:]) and torch.equal(again[1], outcome[:, 2:])
    assert not torch.equal(tokens[0], tokens[1]) and not torch.equal(
        tokens, synthetic_drafts(lengths, 6, 0.5, 1, 1000)[0]
    )
