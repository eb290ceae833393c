"""A covering of cases holds what it says."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import Case, covering, pairs_of, params

values = st.integers(0, 4)


@given(st.lists(st.tuples(values, values, values, values), max_size=60))
def test_every_pair_of_values_is_held_by_some_cases(cases: list[Case]) -> None:
    selected = covering(cases)
    for case in cases:
        assert all(any(pair in pairs_of(one) for one in selected) for pair in pairs_of(case))
    assert set(selected) <= set(cases) and len(selected) <= len(cases)


def test_a_product_needs_few() -> None:
    cases = [*product("abcdefg", range(6), range(3), range(3))]
    assert 42 <= len(covering(cases)) <= 50 < len(cases)
    slow = [one for one in params(cases) if one.marks]
    assert len(slow) == len(cases) - len(covering(cases)) and slow[0].marks[0].name == "slow"
