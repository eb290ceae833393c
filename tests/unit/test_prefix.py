"""The prefix cache against a naive one that knows every token of every page on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helix.engine.block_tables import BlockTable, BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefix import PrefixHit, PrefixTree
from helix.kv_placement import Stripes
from helix.layout import HelixLayout

# kvp, append_block, page_size: pages smaller and larger than blocks, of no common measure, odd numbers of ranks
GRIDS = [(1, 1, 2), (1, 2, 1), (1, 2, 3), (2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1), (3, 2, 3), (5, 1, 1)]
Key = tuple[Hashable, int, tuple[int, ...]]  # salt, start, tokens up to the end of a stripe or tail


def alike(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many first tokens agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def array(tokens: tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@dataclass(eq=False)
class Sequence:
    """A running sequence: all its tokens, and how many of them its pages hold."""

    cache_salt: Hashable
    tokens: tuple[int, ...]
    done: int
    held: BlockTable


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences come, compute, and go. A page's slot holds the salt and all tokens up to its own, as keys depend on."""

    @initialize(
        grid=st.sampled_from(GRIDS),
        min_copied=st.sampled_from([0, 1, 3]),
        stripes=st.integers(3, 24),
        slope=st.integers(0, 1),
    )
    def begin(self, grid: tuple[int, int, int], min_copied: int, stripes: int, slope: int) -> None:
        kvp, block, page_size = grid
        self.layout = HelixLayout.create(kvp=kvp)
        self.stripes = Stripes(self.layout, block, page_size)
        self.S, self.m = self.stripes.tokens, self.stripes.pages
        self.pool = PagePool(stripes * self.m)
        self.min_copied = min_copied
        self.tree = PrefixTree(self.pool, self.stripes, lambda depth: 1.0 + slope * depth, min_copied)
        self.tables = BlockTables(self.tree)
        self.slots: dict[tuple[int, int, int], tuple[Hashable, tuple[int, ...]]] = {}
        self.cached: dict[Key, tuple[int, ...]] = {}
        self.running: list[Sequence] = []
        self.seen: list[tuple[int, ...]] = [()]

    # ---- the naive model

    def locate(self, run: Sequence, position: int) -> tuple[int, int, int]:
        """Rank, page and slot of a token, as ranks compute them."""
        block, page_size = self.stripes.append_block, self.stripes.page_size
        slot = self.layout.token_slot(position, block)
        rank = self.layout.token_owner(position, block, run.held.start)
        return rank, int(run.held.pages[slot // page_size]), slot % page_size

    def write(self, run: Sequence, until: int) -> None:
        for position in range(run.done, until):  # none where others have computed it meanwhile
            self.slots[self.locate(run, position)] = run.cache_salt, run.tokens[: position + 1]
        run.done = max(run.done, until)

    def expected(self, cache_salt: Hashable, tokens: tuple[int, ...]) -> tuple[int, int, int | None]:
        """Tokens shared, tokens copied, start."""
        best: tuple[int, int, int | None] = 0, 0, None
        for start in range(self.layout.kvp):
            same_start = (entry for s, at, entry in self.cached if (s, at) == (cache_salt, start))
            most = max((alike(entry, tokens[:-1]) for entry in same_start), default=0)
            copied = most % self.S if most % self.S >= self.min_copied else 0
            if most - most % self.S + copied > sum(best[:2]):
                best = most - most % self.S, copied, start
        return best

    def enter(self, run: Sequence, length: int, tail: bool) -> None:
        """What the cache has to know of the first `length` tokens."""
        ends = [*range(self.S, length + 1, self.S), *([length] if tail and length % self.S else [])]
        for end in ends:
            tokens = run.tokens[:end]
            same_start = [k for k in self.cached if k[:2] == (run.cache_salt, run.held.start)]
            if any(k[2][:end] == tokens for k in same_start):
                continue
            for k in same_start:  # tails that are part of what comes
                if len(k[2]) > end - 1 - (end - 1) % self.S and tokens[: len(k[2])] == k[2]:
                    del self.cached[k]
            first = (end - 1) // self.S * self.m
            count = self.stripes.pages_for(end) - first
            self.cached[run.cache_salt, run.held.start, tokens] = tuple(run.held.pages[first : first + count].tolist())

    def evicted(self) -> None:
        """Forgets what was evicted: unused, ends of runs first, and only while too little was free."""
        kept = self.pool._cached
        gone = [key for key, pages in self.cached.items() if not kept[list(pages)].any()]
        for key in gone:
            del self.cached[key]
        assert not gone or self.pool.free < 2 * self.m, "more was freed than was wanted"

    def in_use(self) -> set[int]:
        return {int(page) for run in self.running for page in run.held.pages}

    # ---- what happens

    @precondition(lambda self: len(self.running) < 4)
    @rule(
        data=st.data(),
        cache_salt=st.sampled_from([None, None, None, "a"]),
        starts=st.sampled_from([(0, 0), (0,), (1,), (3,), (0, 0, 0), (0, 1)]),
        served=st.booleans(),
    )
    def arrive(self, data: st.DataObject, cache_salt: Hashable, starts: tuple[int, ...], served: bool) -> None:
        """Some sequences that begin alike are admitted at once, and maybe served to the end one by one."""
        old = data.draw(st.sampled_from(self.seen[:-6:-1]))
        kept = data.draw(st.just(len(old)) | st.integers(0, len(old)))
        runs = []
        for start in starts:
            more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.S + 1))
            tokens = (*old[:kept], *more)[: self.pool.pages // self.m * self.S]
            runs.append(self.admit(cache_salt, tokens, len(tokens) + data.draw(st.integers(0, 2)), start))
        for run in runs if served else []:
            if run is not None:
                self.compute(run, len(run.tokens))
                self.leave(run)

    def admit(self, cache_salt: Hashable, tokens: tuple[int, ...], reserved: int, start: int) -> Sequence | None:
        shared, copied, start_of_hit = self.expected(cache_salt, tokens)
        assert self.tree.match(array(tokens), cache_salt).tokens == shared + copied
        hit = {p for n in range(self.S, shared + 1, self.S) for p in self.cached[cache_salt, start_of_hit, tokens[:n]]}
        need = self.stripes.pages_for(reserved) - len(hit)
        room = self.pool.pages - len(self.in_use() | hit)
        held = self.tables.admit(array(tokens), reserved, start % self.layout.kvp, cache_salt)
        assert (held is not None) == (need <= room)
        if held is None:
            return None
        assert len(held.pages) == self.stripes.pages_for(reserved)
        assert held.start == (start % self.layout.kvp if start_of_hit is None else start_of_hit)
        assert held.num_cached_tokens == shared + copied or (
            held.num_cached_tokens == shared and need > room - self.m
        ), "a hit was given up"
        assert held.num_cached_tokens < len(tokens)
        self.evicted()
        run = Sequence(cache_salt, tokens, 0, held)
        sources = {at: content for at, content in self.slots.items() if at[1] in held.copy_from.tolist()}
        for source, target in zip(held.copy_from.tolist(), held.copy_to.tolist(), strict=True):
            for (rank, page, slot), content in sources.items():
                if page == source:
                    self.slots[rank, target, slot] = content
        run.done = held.num_cached_tokens
        self.running.append(run)
        self.seen.append(tokens)
        return run

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def chunk(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.compute(run, data.draw(st.integers(run.done, len(run.tokens))))

    def compute(self, run: Sequence, until: int) -> None:
        start, entered, done = run.held.start, run.held.num_inserted_tokens, run.done
        cached = (tokens for cache_salt, at, tokens in self.cached if (cache_salt, at) == (run.cache_salt, start))
        most = max((alike(tokens, run.tokens[:-1]) // self.S * self.S for tokens in cached), default=0)
        run.done, changed = self.tables.rematch(run.held, array(run.tokens), run.done)
        assert run.done == max(done, most)
        columns = range(entered // self.S * self.m, most // self.S * self.m)
        assert changed == (columns if most > done else range(0))
        self.write(run, until)
        before = run.held.pages.copy()
        changed = self.tables.insert(run.held, array(run.tokens[: run.done]))
        assert set(np.flatnonzero(before != run.held.pages)) == set(changed)
        self.enter(run, run.done, tail=False)

    @precondition(lambda self: any(run.done == len(run.tokens) for run in self.running))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in self.running if run.done == len(run.tokens)]))
        more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.S))
        length = len(run.tokens) + len(more)
        lacking = max(self.stripes.pages_for(length) - len(run.held.pages), 0)
        room = self.pool.pages - len(self.in_use())
        new_pages = self.tables.grow(run.held, length)
        assert (new_pages is not None) == (lacking <= room)
        if new_pages is not None:
            assert len(new_pages) == lacking
            self.evicted()
            run.tokens = (*run.tokens, *more)
            self.write(run, length)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """It has ended, was aborted or preempted, wherever it is."""
        self.leave(data.draw(st.sampled_from(self.running)))

    def leave(self, run: Sequence) -> None:
        self.running.remove(run)
        pages = run.held.pages.copy()
        self.tables.end(run.held, array(run.tokens[: run.done]))
        whole = self.stripes.pages_for(run.done)
        run.held = BlockTable(run.cache_salt, run.held.start, pages[:whole])
        for end in range(self.S, run.done + 1, self.S):  # pages that another one has entered meanwhile
            other = self.cached.get((run.cache_salt, run.held.start, run.tokens[:end]))
            if other is not None:
                run.held.pages[end // self.S * self.m - self.m : end // self.S * self.m] = other
        self.enter(run, run.done, tail=True)
        self.seen.append(run.tokens)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = min(self.pool.free + data.draw(st.integers(1, 2 * self.m)), self.pool.available)
        free = self.pool.free
        self.tree.evict(count)
        assert self.pool.free >= count
        kept = self.pool._cached
        gone = [key for key, pages in self.cached.items() if not kept[list(pages)].any()]
        assert self.pool.free < max(count, free + 1) + self.m, "more was freed than was wanted"
        for key in gone:
            del self.cached[key]

    # ---- what holds at any time

    @invariant()
    def pages_are_counted(self) -> None:
        if not hasattr(self, "tree"):
            return
        users = Counter(int(page) for run in self.running for page in run.held.pages)
        kept = [page for pages in self.cached.values() for page in pages]
        assert len(kept) == len(set(kept)), "a page holds two things"
        assert {*np.flatnonzero(self.pool._cached)} == {*kept}
        assert [users[page] for page in range(self.pool.pages)] == self.pool._ref_counts.tolist()
        assert self.pool.used == len(users)
        assert self.pool.evictable == len({*kept} - {*users})
        assert self.pool.free + self.pool.evictable + self.pool.used == self.pool.pages
        for run in self.running:
            own = run.held.pages[run.held.num_inserted_tokens // self.S * self.m :]
            assert all(users[int(page)] == 1 for page in own) and not self.pool._cached[own].any(), (
                "two write to a page"
            )

    @invariant()
    def the_tree_has_no_holes(self) -> None:
        for cache_salt, start, tokens in getattr(self, "known", {}):
            above = (len(tokens) - 1) // self.S * self.S
            assert above == 0 or (cache_salt, start, tokens[:above]) in self.cached

    @invariant()
    def everybody_finds_its_own_tokens(self) -> None:
        for run in getattr(self, "running", []):
            for position in range(run.done):
                assert self.slots[self.locate(run, position)] == (run.cache_salt, run.tokens[: position + 1])

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for run in self.running:
                self.tables.end(run.held, array(run.tokens[: run.done]))
            self.tree.evict(self.pool.pages)
            assert self.tree._roots == {}, "what is empty is kept"
            assert (self.pool.free, self.pool.used, self.tree.match(array((0, 1, 0)))) == (
                self.pool.pages,
                0,
                PrefixHit(),
            )


PrefixCacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestServing = PrefixCacheMachine.TestCase
