"""Pages under one number for all ranks: how many a sequence takes, who has them, what is free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.engine.pages import PagePool
from helix.kv_placement import Stripes
from helix.layout import HelixLayout

grids = st.builds(
    lambda kvp, block, page: Stripes(HelixLayout.create(kvp=kvp), block, page),
    st.integers(1, 8), st.integers(1, 40), st.integers(1, 40),
)  # fmt: skip


@given(grids, st.integers(0, 700), st.integers(0, 7))
def test_a_sequence_takes_what_its_fullest_rank_needs(stripes: Stripes, length: int, start: int) -> None:
    layout, block, page_size = stripes.layout, stripes.append_block, stripes.page_size
    local = [layout.local_length(length, rank, block, start % layout.kvp) for rank in range(layout.kvp)]
    needs = [-(-tokens // page_size) for tokens in local]
    assert stripes.pages_for(length) == max(needs)
    assert max(needs) - min(needs) <= -(-block // page_size)


@given(grids, st.integers(0, 40))
def test_pages_hold_so_many_tokens_and_no_more(stripes: Stripes, pages: int) -> None:
    max_tokens = stripes.tokens_in(pages)
    assert stripes.pages_for(max_tokens) <= pages < stripes.pages_for(max_tokens + 1)


@given(grids, st.integers(0, 3), st.integers(0, 7))
def test_a_stripe_is_the_least_run_that_fills_pages_everywhere(stripes: Stripes, before: int, start: int) -> None:
    layout, block, page_size = stripes.layout, stripes.append_block, stripes.page_size

    def whole(length: int) -> bool:
        local = {layout.local_length(length, rank, block, start % layout.kvp) for rank in range(layout.kvp)}
        return len(local) == 1 and local.pop() % page_size == 0

    end = (before + 1) * stripes.tokens
    assert whole(end) and not any(map(whole, range(before * stripes.tokens + block, end, block)))
    assert stripes.pages_for(end) == (before + 1) * stripes.pages
    assert stripes.tokens == stripes.pages * stripes.page_tokens


@given(st.data(), st.integers(1, 12))
def test_users_and_marks_decide_where_a_page_is(data: st.DataObject, count: int) -> None:
    pool, users, kept = PagePool(count), [0] * count, [False] * count

    def some(where: list[int]) -> np.ndarray:
        return np.array(data.draw(st.lists(st.sampled_from(where), unique=True)) if where else [], dtype=np.int32)

    for _ in range(data.draw(st.integers(1, 30))):
        every = range(count)
        match data.draw(st.sampled_from(["take", "share", "release", "keep", "drop"])):
            case "take":
                pages = pool.allocate(data.draw(st.integers(0, pool.free)))
                assert not any(users[page] or kept[page] for page in pages)
                change = 1
            case "share":
                pages, change = some([page for page in every if users[page] or kept[page]]), 1
                pool.share(pages)
            case "release":
                pages, change = some([page for page in every if users[page]]), -1
                pool.release(pages)
            case "keep":
                pages, change = some([page for page in every if users[page] and not kept[page]]), 0
                pool.mark_cached(pages)
                for page in pages:
                    kept[page] = True
            case "drop":
                pages, change = some([page for page in every if kept[page]]), 0
                pool.unmark_cached(pages)
                for page in pages:
                    kept[page] = False
        for page in pages:
            users[page] += change
        free = sum(not users[page] and not kept[page] for page in every)
        cached = sum(not users[page] and kept[page] for page in every)
        assert (pool.free, pool.evictable, pool.used) == (free, cached, count - free - cached)
        assert [pool.ref_count(page) for page in every] == users
        assert pool.count_unused(np.arange(count)) == users.count(0)


def test_what_cannot_be_is_refused() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    for wrong in (lambda: pool.allocate(2), lambda: pool.share(np.array([2])), lambda: pool.unmark_cached(pages)):
        with pytest.raises(AssertionError):
            wrong()
    pool.mark_cached(pages)
    with pytest.raises(AssertionError):
        pool.mark_cached(pages)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages)
