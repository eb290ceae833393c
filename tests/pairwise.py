"""Few of many cases that still hold every pair of values: a fault of two causes shows in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = tuple[Hashable, ...]


def pairs_of(case: Case) -> set[Case]:
    """Every two values of a case, each with its place."""
    return set(combinations(enumerate(case), 2))


def covering(cases: Sequence[Case]) -> list[Case]:
    """Some of `cases`, in their order, that hold every pair of values that any of them holds; always the same."""
    missing: set[Case] = set().union(*map(pairs_of, cases))
    selected: set[Case] = set()
    used: Counter[Hashable] = Counter()  # so that values are taken about equally often
    while missing:
        best = max(cases, key=lambda case: (len(pairs_of(case) & missing), -sum(used[v] for v in enumerate(case))))
        selected.add(best)
        missing -= pairs_of(best)
        used.update(enumerate(best))
    return [case for case in cases if case in selected]


def params(cases: Sequence[Case], name: Callable[..., str] = lambda *case: "-".join(map(str, case))) -> list[Any]:
    """Parameters of a test: `cases`, of which all but a covering are slow; `name` makes the name of a case's values."""
    selected = set(covering(cases))
    return [pytest.param(*case, id=name(*case), marks=[] if case in selected else [pytest.mark.slow]) for case in cases]
