"""commit: kernel and reference against a walk over lists."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.tokens.commit import PLACEHOLDER_TOKEN_ID, Candidates, commit
from kernels.tokens.reference import commit as reference

OPS = pytest.mark.parametrize("op", [commit, reference], ids=["kernel", "reference"])


@dataclass
class Case:
    """A step's end; `history` is a part of wider rows, and -9 where nothing was written.

    `drawn` [B, 1 + n] are the tokens that the candidates are to give. Of rejection sampling, `accepted` drafts hold and
    only the token behind them is drawn. `outcome` replaces drawn tokens that are not broken.
    """

    drawn: Tensor
    drafts: Tensor | None
    accepted: Tensor | None
    outcome: Tensor | None
    last: Tensor
    lengths: Tensor
    limits: Tensor
    active: Tensor
    history: Tensor

    def to(self, device: torch.device) -> Case:
        """A copy, tokens in wider rows that agree where they must not be read."""

        def wide(x: Tensor, fill: int) -> Tensor:
            rows = torch.full((len(x), x.shape[1] + 3), fill, dtype=x.dtype, device=device)
            rows[:, : x.shape[1]] = x
            return rows[:, : x.shape[1]]

        moved = {name: x if x is None else x.to(device).clone() for name, x in vars(self).items()}
        moved |= {"history": wide(self.history, -9)}
        moved |= {name: wide(x, 3) for name in ("drafts", "outcome") if (x := getattr(self, name)) is not None}
        return Case(**moved)

    def candidates(self, ranks: int, device: torch.device, seed: int = 0) -> Candidates:
        """Candidates whose best are the drawn tokens: ties with larger ids; NaN, inf or all -inf for those of -1."""
        g = torch.Generator().manual_seed(seed)
        drawn = self.drawn.cpu()
        tokens = drawn.flatten() if self.accepted is None else drawn.gather(1, self.accepted[:, None].cpu())[:, 0]
        R = len(tokens)
        scores = torch.randint(-9, 0, (ranks, R), generator=g).double()
        ids = torch.randint(0, 9, (ranks, R), generator=g)
        best = torch.randint(0, ranks, (1, R), generator=g)
        scores.scatter_(0, best, torch.zeros(1, R).double())
        ids.scatter_(0, best, tokens[None])
        tie = torch.randint(0, ranks, (1, R), generator=g)
        scores.scatter_(0, tie, torch.zeros(1, R).double())
        ids = torch.where((scores == 0) & (ids < tokens), tokens + 1, ids)
        bad = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(R) % 3].double()
        broken = tokens < 0
        scores[:, broken & bad.isneginf()] = -math.inf
        scores = torch.where(broken & ~bad.isneginf() & (torch.arange(ranks)[:, None] == best), bad, scores)
        return Candidates(torch.stack((scores, ids.double()), -1).to(device), self.accepted)


def make(B: int, n: int | None, L: int, seed: int = 0, rejects: bool = False, replaces: bool = False) -> Case:
    """`n` drafts, None for no tensor of them; few tokens, so that they agree behind the first mismatch as well."""
    g = torch.Generator().manual_seed(seed)
    T = 1 + (n or 0)
    drawn = torch.randint(0, 4, (B, T), generator=g)
    agree = torch.rand(B, T - 1, generator=g) < torch.tensor([0.0, 0.5, 0.9, 1.0])[torch.arange(B) % 4, None]
    drafts = torch.where(agree, drawn[:, :-1], torch.randint(-1, 4, (B, T - 1), generator=g))
    accepted = None
    if rejects:  # what follows differs from the draft there
        accepted = torch.where(agree & (drafts >= 0), 1, 0).cumprod(1).sum(1)
        at = accepted[:, None]
        refused = torch.nn.functional.pad(drafts, (0, 1), value=-1).gather(1, at)
        drawn.scatter_(1, at, torch.where(refused == drawn.gather(1, at), refused + 4, drawn.gather(1, at)))
    broken = torch.rand(B, T, generator=g) < 0.05
    drawn = torch.where(broken, -1, drawn)
    outcome = torch.randint(0, 4, (B, T - 1), generator=g) if replaces else None
    lengths = torch.randint(0, 9, (B,), generator=g)
    room = torch.randint(0, T + 3, (B,), generator=g)
    return Case(
        drawn, None if n is None else drafts, accepted, outcome, torch.randint(0, 99, (B,), generator=g), lengths,
        lengths + room,
        torch.rand(B, generator=g) < 0.8, torch.full((B, L), -9, dtype=torch.int32),
    )  # fmt: skip


def walk(case: Case) -> tuple[list[list[int]], Case]:
    """What is taken, and what the state has become, row by row."""
    after = case.to(torch.device("cpu"))
    accepted = []
    for b, row in enumerate(case.drawn.tolist()):
        drafts = [] if case.drafts is None else case.drafts[b].tolist()
        if case.accepted is not None:
            k = int(case.accepted[b])
            row = drafts[:k] + [row[k]] + drafts[k + 1 :] + [-1] * (k < len(drafts))
        if case.outcome is not None:
            row = [t if t < 0 else o for t, o in zip(row, case.outcome[b].tolist(), strict=False)] + row[-1:]
        count = 1
        for d, t in zip(drafts, row, strict=False):
            if d != t or d < 0:
                break
            count += 1
        length = int(case.lengths[b])
        count = min(count, int(case.limits[b]) - length) if case.active[b] else 0
        accepted.append(row[:count] + [PLACEHOLDER_TOKEN_ID] * (len(row) - count))
        if count:
            after.last[b] = row[count - 1]
        for i in range(count if case.history.shape[1] else 0):
            after.history[b, length + 1 + i] = row[i]
        after.lengths[b] += count
    return accepted, after


def state_of(case: Case, ranks: int, device: torch.device) -> dict[str, Any]:
    """Arguments of `commit`."""
    arguments = {name: x for name, x in vars(case).items() if name not in ("accepted", "drawn")}
    return arguments | {"candidates": case.candidates(ranks, device)}


def check(op: Any, case: Case, device: torch.device, ranks: int = 3) -> None:
    wanted, after = walk(case)
    mine = case.to(device)
    accepted, before = op(**state_of(mine, ranks, device))
    assert accepted.dtype == torch.int64 and accepted.tolist() == wanted
    assert before.tolist() == case.lengths.tolist() and before.dtype == torch.int64
    for name, x in vars(mine).items():
        if x is not None and name != "candidates":
            assert x.tolist() == getattr(after, name).tolist(), name
    base = mine.history._base
    assert base is None or (base[:, mine.history.shape[1] :] == -9).all(), "history of a neighbor"


# Sequences, drafts of each, columns of the history, ranks: 256 are 32 slices of eight, more than a program holds.
STEPS = [
    (1, None, 0, 1), (5, None, 50, 2), (3, 0, 0, 1), (4, 1, 50, 3), (33, 4, 60, 1), (7, 31, 80, 2), (6, 16, 0, 5),
    (131, 5, 30, 3), (3, 9, 40, 256), (3, 9, 40, 97), (9, 1, 70, 33), (2, 33, 0, 70), (8, 7, 70, 17),
]  # fmt: skip


@OPS
@pytest.mark.parametrize("B, n, L, ranks", STEPS)
def test_any_step(op: Any, B: int, n: int | None, L: int, ranks: int, device: torch.device) -> None:
    for seed, (rejects, replaces) in enumerate(product((False, True), repeat=2)):
        case = make(B, n, L, seed, rejects and n is not None, replaces and n is not None)
        check(op, case, device, ranks)


def test_missing_and_broken_tokens_are_not_accepted(device: torch.device) -> None:
    """-1 as a draft is no token; -1 as what was drawn says that the row's logits are NaN, and is handed on."""
    case = replace(
        make(3, 2, 0), drafts=torch.tensor([[-1, 5], [5, -1], [5, 5]]),
        drawn=torch.tensor([[-1, 5, 6], [5, -1, 6], [5, 5, -1]]), active=torch.ones(3, dtype=torch.bool),
    )  # fmt: skip
    case.limits = case.lengths + 9
    assert walk(case)[0] == [
        [-1, PLACEHOLDER_TOKEN_ID, PLACEHOLDER_TOKEN_ID],
        [5, -1, PLACEHOLDER_TOKEN_ID],
        [5, 5, -1],
    ]
    check(commit, case, device)
    check(commit, replace(case, outcome=torch.full((3, 2), 5)), device)


def test_planted_errors_show(device: torch.device) -> None:
    case = make(9, 4, 40)
    for change in (
        {"limits": torch.maximum(case.limits - 2, case.lengths)},
        {"active": ~case.active},
        {"lengths": (case.lengths - 1).clamp(min=0)},
        {"drafts": torch.full((9, 4), -1)},
        {"candidates": case.candidates(3, device, seed=1)},
    ):
        given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in change.items()}
        if "candidates" in change:
            given["candidates"].pairs[:, 0, 1] += 1
        with pytest.raises(AssertionError):
            check(lambda given=given, **state: commit(**state | given), case, device)


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = make(2, 3, 0).to(device)
    assert case.drafts is not None
    with pytest.raises(AssertionError, match="8 rows of candidates for 2 sequences of 2 drafts"):
        commit(**state_of(replace(case, drafts=case.drafts[:, :2]), 1, device))
