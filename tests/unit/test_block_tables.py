"""What becomes of a sequence's pages, case by case: stripes of 4 tokens over two ranks, a page each."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from helix.engine.block_tables import BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefix import PrefixTree
from helix.kv_placement import Stripes
from helix.layout import HelixLayout
from tests.agent_traces import AgentTraces, replay
from tests.simulated_engine import calls_of


def small(
    pages: int, cost: float = 0.0, min_copied: int = 1, caching: bool = True, max_pages: int | None = None
) -> BlockTables:
    stripes = Stripes(HelixLayout.create(kvp=2), 2, 2)
    return BlockTables(PrefixTree(PagePool(pages), stripes, lambda depth: cost * depth, min_copied), caching, max_pages)


def word(text: str) -> np.ndarray:
    return np.array([*map(ord, text)], dtype=np.int32)


def serve(tables: BlockTables, text: str, start: int = 0, cache_salt: Hashable = None) -> int:
    """Admits a sequence, computes and ends it; the tokens that were known."""
    held = tables.admit(word(text), len(text), start, cache_salt)
    assert held is not None
    tables.end(held, word(text))
    return held.num_cached_tokens


def known(tables: BlockTables, text: str) -> int:
    return tables.tree.match(word(f"{text}.")).tokens


def test_a_sequence_goes_on_where_it_was_cut() -> None:
    tables = small(8)
    held = tables.admit(word("abcdefghijkl"), 12, 1)
    assert held is not None
    tables.insert(held, word("abcdefgh"))
    tables.end(held, word("abcdefghij"))
    again = tables.admit(word("abcdefghijkl"), 12, 0)
    assert again is not None
    assert (again.num_cached_tokens, again.start, again.num_inserted_tokens) == (10, 1, 8)
    assert again.pages[:2].tolist() == [0, 1]
    assert (again.copy_from.tolist(), again.copy_to.tolist()) == ([2], again.pages[2:].tolist())


def test_nothing_is_remembered_without_caching() -> None:
    tables = small(4, caching=False)
    assert serve(tables, "abcdefghi") == serve(tables, "abcdefghi") == 0
    assert tables.pool.free == 4


def test_a_shared_page_counts_in_each_table_where_tables_are_bounded() -> None:
    tables = small(8, max_pages=5)
    serve(tables, "abcdefghi")
    one = tables.admit(word("abcdefghi"), 9, 0)
    assert one is not None and tables.admit(word("abcdefghi"), 9, 0) is None, "6 pages in two tables"
    assert tables.grow(one, 21) is None and tables.grow(one, 17) is not None
    tables.end(one, word("abcdefghi"))
    assert tables.admit(word("abcdefghi"), 20, 0) is not None, "all are given back"


def test_who_is_about_to_compute_the_same_stripe() -> None:
    tables = small(20)
    texts = "abcdefghi", "abcdefgh!", "abcd----i", "abcdefgh"
    held = [tables.admit(word(text), 9, 0) for text in texts]

    def stripes(entered: str) -> list[Hashable]:
        found = []
        for text, table in zip(texts, held, strict=True):
            assert table is not None
            tables.insert(table, word(entered))
            found.append(tables.next_stripe(table, word(text)))
        return found

    one, same, other, last = stripes("")
    assert one == same == other == last is not None
    one, same, other, last = stripes("abcd")
    assert one == same is not None and other not in (None, one)
    assert last is None, "the last token of a prompt is computed in any case"
    alone = small(20, caching=False)
    table = alone.admit(word(texts[0]), 9, 0)
    assert table is not None and alone.next_stripe(table, word(texts[0])) is None


def test_the_source_of_a_copy_stays_until_it_is_copied() -> None:
    tables = small(4)
    serve(tables, "abc")  # the first to go
    serve(tables, "wxyz")
    serve(tables, "WXYZ")
    held = tables.admit(word("abc-----"), 12, 0)
    assert held is not None and held.num_cached_tokens == 3
    assert held.copy_from.tolist() == [0] and 0 not in held.pages and tables.pool.evictable == 1
    tables.end(held, word("abc-"))
    tables.tree.evict(4)


def test_a_copy_is_given_up_where_all_pages_are_needed() -> None:
    tables = small(3)
    serve(tables, "abc")
    held = tables.admit(word("abcdefghi"), 12, 0)
    assert held is not None and (held.num_cached_tokens, len(held.pages), tables.pool.used) == (0, 3, 3)


def test_what_was_used_last_goes_last_and_ends_go_before_beginnings() -> None:
    tables = small(6)
    for text in ("abcdefgh", "ABCDEFGH", "abcd----"):
        serve(tables, text)
    left = []
    while tables.pool.evictable:
        tables.tree.evict(tables.pool.free + 1)
        left.append([known(tables, text) for text in ("abcdefgh", "ABCDEFGH", "abcd----")])
    assert left == [[4, 8, 8], [4, 4, 8], [4, 0, 8], [4, 0, 4], [0, 0, 0]]


def test_what_takes_longer_to_compute_stays_longer_but_not_for_ever() -> None:
    tables = small(6, cost=1.0)
    serve(tables, "abcdefghijkl")
    short = [f"{letter}---" for letter in "ABCDEFGHIJKLMN"]
    left = []
    for text in short:
        serve(tables, text)
        left.append(known(tables, "abcdefghijkl"))
    assert left == sorted(left, reverse=True)
    assert left[3:5] == [12, 12] and left[-1] == 0


MILLION = 1_000_000


def test_a_million_tokens_are_matched_at_once() -> None:
    """A stripe of 512 tokens, as pages of 64 over eight ranks make them; whether in one run or in a hundred."""
    stripes = Stripes(HelixLayout.create(kvp=8), 16, 64)
    tokens = np.random.default_rng(0).integers(0, 1000, MILLION, dtype=np.int32)
    for runs in (1, 100):
        tables = BlockTables(PrefixTree(PagePool(8192), stripes, lambda depth: 1.0))
        for length in np.linspace(MILLION / runs, MILLION, runs).astype(int):
            part = tokens[:length]
            held = tables.admit(part, length, 0)
            assert held is not None
            tables.end(held, part)
            if runs > 1:  # somebody else leaves the way here, and the run is cut
                other = np.append(part[: length // 512 * 512 - 512], [-1] * 512).astype(np.int32)
                if (held := tables.admit(other, len(other), 0)) is not None:
                    tables.end(held, other)
        assert tables.tree.match(tokens).tokens > MILLION - 1024
        assert calls_of(lambda tree=tables.tree: tree.match(tokens)) < 100 * runs + 400, "no look at each stripe"


def test_what_is_costly_to_compute_again_is_worth_keeping() -> None:
    """Agents of which one has a very long context: the cost of what is computed again, where pages are scarce."""
    doubling = 38_000  # of Qwen2.5-7B: attention takes as many operations as the products at this depth
    trace = [*AgentTraces(turns=250, long=128_000).prompts(seed=0)]
    for tokens in (200_000, 300_000, 400_000):
        latest = replay(iter(trace), tokens, doubling, lambda depth: 1.0)
        costly = replay(iter(trace), tokens, doubling, lambda depth: 1 + depth / doubling)
        assert costly.computed < 0.92 * latest.computed, (latest, costly)
