"""The best tokens and their log-probabilities: kernel and reference, however columns are cut, against fp64 softmax."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.tokens import reference
from kernels.tokens import top_tokens as kernels
from kernels.tokens.reference import logprobs

OPS = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "reference"])
TOP = kernels.TOP


def expected(logits: Tensor, tokens: Tensor) -> tuple[list[list[int]], Tensor]:
    """Ids and fp64 log-probabilities, the drawn token's first; sorted by value, then id, and padded."""
    values = logits.double().log_softmax(1)
    ids, found = [], torch.full((len(logits), 1 + TOP), -torch.inf, dtype=torch.float64)
    for b, row in enumerate(logits.tolist()):
        order = sorted(range(len(row)), key=lambda t, row=row: (-row[t], t))[:TOP]
        ids.append([int(tokens[b]), *order, *[-1] * (TOP - len(order))])
        found[b, : 1 + len(order)] = values[b, ids[b][: 1 + len(order)]]
    return ids, found


def over(ops: Any, logits: Tensor, tokens: Tensor, cuts: list[int], device: torch.device) -> Tensor:
    """The summary of ranks whose columns end at `cuts`; rows lie apart and NaN stands between them."""
    wide = torch.full((len(logits), logits.shape[1] + 3), torch.nan, device=device)
    wide[:, : logits.shape[1]] = logits
    parts = [ops.top_of_rank(wide[:, a:b], tokens.to(device), a) for a, b in pairwise([0, *cuts, logits.shape[1]])]
    assert all(part.shape == (len(logits), kernels.WIDTH) for part in parts)
    return ops.top_of_ranks(torch.stack(parts)).cpu()


def check(summaries: Tensor, logits: Tensor, tokens: Tensor) -> None:
    ids, values = logprobs(summaries)
    wanted_ids, wanted = expected(logits, tokens)
    assert ids.tolist() == wanted_ids
    # fp64 within, rounded once: half a unit of 2^-23 of the value, and a sum's last bits.
    torch.testing.assert_close(values.double(), wanted, rtol=2**-23, atol=1e-12)


@OPS
@pytest.mark.parametrize(
    "V, cuts", [(1, []), (7, [0, 3, 3]), (5000, []), (5000, [10, 2058]), (99, list(range(0, 99, 9)))]
)
def test_every_cut(ops: Any, V: int, cuts: list[int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(3, V, generator=generator) * 6
    logits[1] = torch.randint(-2, 2, (V,), generator=generator).float()  # many ties, also at the last place
    logits[2, V // 3 :] = -torch.inf
    logits[2, 0] = 80.0
    tokens = torch.tensor([V - 1, V // 2, 0])
    check(over(ops, logits, tokens, cuts, device), logits, tokens)


@settings(suppress_health_check=list(HealthCheck), max_examples=30)
@given(
    levels=st.lists(st.sampled_from([-math.inf, -3e38, -8.0, -0.0, 0.0, 1e-40, 1.5, 3e38]), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    token=st.integers(0, 59),
)
def test_any_levels_over_up_to_four_ranks(levels: list[float], cuts: list[int], token: int) -> None:
    if max(levels) == -math.inf:
        levels[0] = 0.0
    logits, tokens = torch.tensor([levels]), torch.tensor([token % len(levels)])
    cuts = sorted(min(cut, len(levels)) for cut in cuts)
    summaries = over(reference, logits, tokens, cuts, torch.device("cpu"))
    check(summaries, logits, tokens)
    words, alone = summaries[:, :-1], over(reference, logits, tokens, [], torch.device("cpu"))[:, :-1]
    assert torch.equal(words, alone)


@OPS
def test_a_broken_row_is_alone(ops: Any, device: torch.device) -> None:
    """It has no token (-1); what it says means nothing, and its neighbors do not notice."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2] = torch.nan, -torch.inf
    tokens = torch.tensor([4, -1, -1, 49])
    summaries = over(ops, logits, tokens, [25], device)
    keep = [0, 3]
    check(summaries[keep], logits[keep], tokens[keep])


def test_planted_errors_show(device: torch.device) -> None:
    logits, tokens = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 90])
    parts = [kernels.top_of_rank(logits[:, a : a + 50].to(device), tokens.to(device), a) for a in (0, 50)]
    twice = kernels.top_of_ranks(torch.stack([*parts, parts[1]]))
    shifted = kernels.top_of_rank(logits.to(device), tokens.to(device), 1)
    exchanged = kernels.top_of_ranks(torch.stack(parts)).flip(0)
    for wrong in (parts[0], twice, shifted, exchanged):
        with pytest.raises(AssertionError):
            check(wrong.cpu(), logits, tokens)
