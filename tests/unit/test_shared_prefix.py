"""Which runs of block-table columns decode attention reads once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm.loopback import LoopbackWorld
from helix.engine.shared_prefix import shared_prefixes
from helix.layout import HelixLayout
from helix.worker.model_runner import MIN_SHARED_BYTES
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine

Tables = dict[int, np.ndarray]


def tables_of(*rows: list[int]) -> Tables:
    return {slot: np.array(pages, dtype=np.int32) for slot, pages in enumerate(rows)}


def runs(tables: Tables, min_pages: float, limit: int = 4) -> list[tuple[tuple[int, ...], int, int]]:
    return [(p.slots, p.begin, p.end) for p in shared_prefixes(tables, min_pages, limit)]


SYSTEM_AND_DOCUMENT = tables_of([7, 8, 3, 4, 9, 11], [7, 8, 3, 4, 9, 12], [7, 8, 5, 6], [1, 2])


@pytest.mark.parametrize(
    "min_pages, expected",
    [
        (1, [((0, 1, 2), 0, 2), ((0, 1), 2, 5)]),
        (4, [((0, 1, 2), 0, 2)]),  # 2 x 2 pages pay, 3 more of two sequences do not
        (5, [((0, 1), 0, 5)]),  # the first columns of two go with the document
        (6, []),
        (math.inf, []),
    ],
)
def test_runs_below_the_minimum_go_to_longer_ones(min_pages: float, expected: list[object]) -> None:
    assert runs(SYSTEM_AND_DOCUMENT, min_pages) == expected


def test_the_largest_savings_come_first() -> None:
    pairs = tables_of(*([10 * i + j for j in range(1 + i)] for i in range(6) for _ in range(2)))
    assert runs(pairs, 1) == [((2 * i, 2 * i + 1), 0, 1 + i) for i in (5, 4, 3, 2)]
    assert runs(pairs, 1, 2) == [((2 * i, 2 * i + 1), 0, 1 + i) for i in (5, 4)]


def test_a_run_may_need_a_number_of_slots() -> None:
    found = shared_prefixes(SYSTEM_AND_DOCUMENT, 1, min_slots=3)
    assert [(p.slots, p.begin, p.end) for p in found] == [((0, 1, 2), 0, 2)]


def test_a_sequence_may_end_where_others_go_on() -> None:
    assert runs(tables_of([1, 2, 3], [1, 2], [1, 2, 3, 4], []), 1) == [((0, 1, 2), 0, 2), ((0, 2), 2, 3)]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=9), st.sampled_from([1, 2, 3, 5]), st.integers(1, 12))
def test_shared_pages_are_read_by_all_who_have_them(paths: list[list[int]], min_pages: int, limit: int) -> None:
    """Against the tree of all prefixes: a page number stands for the choices up to it."""
    numbers: dict[tuple[int, ...], int] = {}
    tables = tables_of(*([numbers.setdefault(tuple(p[: i + 1]), len(numbers)) for i in range(len(p))] for p in paths))
    found, ends = runs(tables, min_pages, limit), dict.fromkeys(tables, 0)
    assert len(found) <= limit
    for slots, begin, end in found:
        shared = tables[slots[0]][:end].tolist()
        assert [s for s in tables if tables[s][:end].tolist() == shared] == list(slots), "all who share it, in order"
        assert (len(slots) - 1) * (end - begin) >= min_pages
        for slot in slots:
            assert ends[slot] == begin < end
            ends[slot] = end
    if min_pages == 1 and limit == 12:
        read = sum(len(t) - ends[slot] for slot, t in tables.items()) + sum(end - begin for _, begin, end in found)
        assert len(found) == limit or read == len(numbers), "each page is read once"


@pytest.mark.parametrize(
    "family, setting, pages",
    [
        ("qwen2", "auto", MIN_SHARED_BYTES / (16 * 2 * 16 * 4)),  # pages of 16 tokens, 16 fp32 keys and values
        ("qwen2", "always", 1),
        ("qwen2", "none", math.inf),
        ("mixtral", "auto", math.inf),  # a window in every layer
        ("glm-5", "auto", math.inf),  # selected tokens
    ],
)
def test_the_reads_that_launches_are_worth(family: str, setting: str, pages: float) -> None:
    engine = build_engine(checkpoint(family), HelixLayout.create(), LoopbackWorld(1).communicator(0, [0]), 16)
    engine.runner.shared_prefix = setting
    assert engine.runner.min_shared_pages == pytest.approx(pages)
    assert engine.runner.min_sharing_rows == 0
    engine.close()


@pytest.mark.parametrize("setting, share", [("auto", 0.5), ("always", 0)])
def test_most_rows_share_what_is_stored_in_fp8(setting: str, share: float) -> None:
    loopback = LoopbackWorld(1).communicator(0, [0])
    engine = build_engine(checkpoint("qwen2"), HelixLayout.create(), loopback, 16, kv="fp8")
    engine.runner.shared_prefix = setting
    assert engine.runner.min_sharing_rows == share
    engine.close()
