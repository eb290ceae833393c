"""commit: kernel and reference against a walk over lists."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference.commit import commit as reference
from kernels.tokens.commit import PAST, commit


@dataclass
class Case:
    """A step's end; `history` is a part of wider rows, and -9 where nothing was written."""

    drawn: Tensor
    drafts: Tensor | None
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
        moved |= {"drawn": wide(self.drawn, 3), "history": wide(self.history, -9)}
        return Case(**moved | {"drafts": None if self.drafts is None else wide(self.drafts, 3)})


def make(B: int, n: int | None, L: int, seed: int = 0) -> Case:
    """`n` drafts, None for no tensor of them; few tokens, so that they agree behind the first mismatch as well."""
    g = torch.Generator().manual_seed(seed)
    T = 1 + (n or 0)
    drawn = torch.randint(0, 4, (B, T), generator=g)
    agree = torch.rand(B, T - 1, generator=g) < torch.tensor([0.0, 0.5, 0.9, 1.0])[torch.arange(B) % 4, None]
    drafts = torch.where(agree, drawn[:, :-1], torch.randint(-1, 4, (B, T - 1), generator=g))
    lengths = torch.randint(0, 9, (B,), generator=g)
    room = torch.randint(0, T + 3, (B,), generator=g)
    return Case(
        drawn, None if n is None else drafts, torch.randint(0, 99, (B,), generator=g), lengths, lengths + room,
        torch.rand(B, generator=g) < 0.8, torch.full((B, L), -9, dtype=torch.int32),
    )  # fmt: skip


def walk(case: Case) -> tuple[list[list[int]], Case]:
    """What is taken, and what the state has become, row by row."""
    after = case.to(torch.device("cpu"))
    taken = []
    for b, row in enumerate(case.drawn.tolist()):
        drafts = [] if case.drafts is None else case.drafts[b].tolist()
        count = 1
        for d, t in zip(drafts, row, strict=False):
            if d != t or d < 0:
                break
            count += 1
        length = int(case.lengths[b])
        count = min(count, int(case.limits[b]) - length) if case.active[b] else 0
        taken.append(row[:count] + [PAST] * (len(row) - count))
        if count:
            after.last[b] = row[count - 1]
        for i in range(count if case.history.shape[1] else 0):
            after.history[b, length + 1 + i] = row[i]
        after.lengths[b] += count
    return taken, after


def check(op: Any, case: Case, device: torch.device) -> None:
    wanted, after = walk(case)
    mine = case.to(device)
    taken = op(**vars(mine))
    assert taken.dtype == torch.int64 and taken.tolist() == wanted
    for name, x in vars(mine).items():
        if x is not None:
            assert x.tolist() == getattr(after, name).tolist(), name
    base = mine.history._base
    assert base is None or (base[:, mine.history.shape[1] :] == -9).all(), "history of a neighbour"


@pytest.mark.parametrize("op", [commit, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    "B, n, L", [(1, None, 0), (5, None, 50), (3, 0, 0), (4, 1, 50), (33, 4, 60), (7, 31, 80), (6, 16, 0)]
)
def test_any_step(op: Any, B: int, n: int | None, L: int, device: torch.device) -> None:
    for seed in range(3):
        check(op, make(B, n, L, seed), device)


def test_many_rows(device: torch.device) -> None:
    check(commit, make(512, 5, 30), device)


def test_missing_and_broken_tokens_are_not_accepted(device: torch.device) -> None:
    """-1 as a draft is no token; -1 as what was drawn says that the row's logits are NaN, and is handed on."""
    case = replace(
        make(3, 2, 0), drafts=torch.tensor([[-1, 5], [5, -1], [5, 5]]),
        drawn=torch.tensor([[-1, 5, 6], [5, -1, 6], [5, 5, -1]]), active=torch.ones(3, dtype=torch.bool),
    )  # fmt: skip
    case.limits = case.lengths + 9
    assert walk(case)[0] == [[-1, PAST, PAST], [5, -1, PAST], [5, 5, -1]]
    check(commit, case, device)


def test_planted_errors_show(device: torch.device) -> None:
    case = make(9, 4, 40)
    for change in (
        {"limits": torch.maximum(case.limits - 2, case.lengths)},
        {"active": ~case.active},
        {"lengths": (case.lengths - 1).clamp(min=0)},
        {"drafts": torch.full((9, 4), -1)},
    ):
        with pytest.raises(AssertionError):
            check(
                lambda change=change, **state: commit(**state | {k: v.to(device) for k, v in change.items()}),
                case,
                device,
            )


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = make(2, 3, 0).to(device)
    assert case.drafts is not None
    with pytest.raises(AssertionError, match="4 tokens drawn behind 2 drafts"):
        commit(**vars(replace(case, drafts=case.drafts[:, :2])))
