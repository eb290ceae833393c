"""Pairwise covering: a subset of cases with every pair of values, which shows any fault of two causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = tuple[Hashable, ...]


def pairs_of(case: Case) -> set[Case]:
    """Returns all pairs of a case's values, each with its index."""
    return set(combinations(enumerate(case), 2))


def covering(cases: Sequence[Case]) -> list[Case]:
    """Returns a subset of `cases`, in order, with every pair of values that occurs in them; deterministic."""
    missing: set[Case] = set().union(*map(pairs_of, cases))
    selected: set[Case] = set()
    used: Counter[Hashable] = Counter()  # balances how often values are used
    while missing:
        best = max(cases, key=lambda case: (len(pairs_of(case) & missing), -sum(used[v] for v in enumerate(case))))
        selected.add(best)
        missing -= pairs_of(best)
        used.update(enumerate(best))
    return [case for case in cases if case in selected]


def params(cases: Sequence[Case], name: Callable[..., str] = lambda *case: "-".join(map(str, case))) -> list[Any]:
    """Returns test parameters: all cases outside a covering are slow; `name` makes a case's id."""
    selected = set(covering(cases))
    return [pytest.param(*case, id=name(*case), marks=[] if case in selected else [pytest.mark.slow]) for case in cases]
