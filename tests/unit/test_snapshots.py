"""The directory of snapshots: what is found, what moves to host memory, and what goes first, stripes too."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from helix.engine.block_tables import BlockTable, BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefix import PrefixTree
from helix.engine.snapshots import StateSnapshots
from helix.kv_placement import Stripes
from helix.layout import HelixLayout
from helix.worker.kv_cache_spec import SNAPSHOTS_PER_SLOT
from tests.simulated_engine import SimulatedEngine

STRIPE = 8


def tables(on_gpu: int, on_host: int = 0, pages: int = 1000, every: int = 0, cost: float = 0.0) -> BlockTables:
    """Stripes of a page of eight tokens, of a model with states."""
    stripes = Stripes(HelixLayout.create(), STRIPE, STRIPE)
    tree = PrefixTree(PagePool(pages), stripes, lambda depth: 1.0 + cost * depth, 1, needs_snapshots=True)
    return BlockTables(tree, True, None, StateSnapshots(tree, lambda begin, end: end - begin, on_gpu, on_host, every))


def text(number: int, depth: int) -> np.ndarray:
    return np.full(depth, number, dtype=np.int32)


def admit(of: BlockTables, tokens: np.ndarray) -> BlockTable:
    table = of.admit(np.append(tokens, -1).astype(np.int32), len(tokens) + 1, 0)
    assert table is not None
    of.insert(table, tokens)
    return table


def take(of: BlockTables, tokens: np.ndarray, *ends: int) -> tuple[int, int]:
    """Serves a sequence with snapshots after all its tokens, or after `ends`; returns the last index and move."""
    table = admit(of, tokens)
    found = [of.snapshots.add(table.node, end) for end in ends or (len(tokens),)]
    of.end(table, tokens)
    return found[-1]


def find(of: BlockTables, tokens: np.ndarray) -> tuple[int, int]:
    hit = of.tree.match(np.append(tokens, -1).astype(np.int32))
    return of.snapshots.find(hit.node, hit.shared)


@pytest.mark.parametrize(
    "length, known, last_message, every, ends",
    [
        (17, 0, 0, 0, [16]),
        (16, 0, 0, 0, [8]),
        (8, 0, 0, 0, []),
        (100, 40, 0, 0, [40, 96]),
        (100, 40, 45, 0, [40, 96]),
        (100, 0, 71, 0, [64, 96]),
        (100, 96, 97, 0, [96]),
        (100, 0, 0, 30, [24, 56, 88, 96]),
        (100, 0, 7, 5, [*range(8, 97, 8)]),
    ],
)
def test_where_snapshots_are_taken(length: int, known: int, last_message: int, every: int, ends: list[int]) -> None:
    assert tables(1, every=every).snapshots.ends(length, known, last_message) == ends
    assert tables(0, every=every).snapshots.ends(length, known, last_message) == []


def test_the_longest_one_within_a_hit_is_found() -> None:
    of, whole = tables(3), text(1, 96)
    indices = [take(of, whole, end)[0] for end in (16, 40)]
    other = whole.copy()
    other[20] = 0
    assert find(of, whole) == (40, indices[1]) and find(of, whole[:39]) == (16, indices[0])
    assert find(of, other) == (16, indices[0]) and find(of, whole[:15]) == (0, -1)
    assert take(of, whole, 40) == (-1, -1), "there is one"
    take(of, other)
    assert find(of, whole) == (40, indices[1]) and find(of, other)[0] == 96, "the run was cut between them"
    assert find(of, np.append(whole[:16], text(7, 16))) == (16, indices[0])


def test_of_equal_ones_the_one_used_least_recently_goes_first() -> None:
    of = tables(2)
    first, second = (take(of, text(i, 16))[0] for i in range(2))
    assert find(of, text(0, 16)) == (16, first)
    assert take(of, text(2, 16)) == (second, -1)
    assert find(of, text(0, 16)) == (16, first) and find(of, text(1, 16)) == (0, -1)


def test_the_one_that_saves_least_goes_first_until_it_is_old() -> None:
    """The long one stays while short ones come and go, and goes once so much has gone."""
    of, seen = tables(2), []
    take(of, text(0, 80))
    for i in range(1, 20):
        take(of, text(i, 8))
        seen.append(any(s.tokens == 80 for s in of.snapshots._snapshots))
    assert seen[:8] == [True] * 8 and not seen[-1]


def test_what_leaves_the_gpu_moves_to_the_host() -> None:
    of = tables(1, 2)
    assert take(of, text(0, 24)) == (0, -1)
    assert take(of, text(1, 16)) == (0, 2)
    assert find(of, text(0, 24)) == (24, 2), "a hit in host memory"
    assert take(of, text(2, 8)) == (0, 1)
    assert take(of, text(3, 40)) == (0, -1), "of all the one on the GPU is worth least"
    assert find(of, text(2, 8)) == (0, -1)
    assert take(of, text(4, 40)) == (0, 1), "of all one in host memory is worth least"
    assert find(of, text(1, 16)) == (0, -1)
    assert find(of, text(3, 40)) == (40, 1) and find(of, text(4, 40)) == (40, 0)


def test_stripes_behind_the_last_snapshot_go_first_and_a_snapshot_with_its_stripes() -> None:
    """Of three runs the oldest is all before a snapshot, the next in part, and the newest has none."""
    of = tables(2, pages=15)
    take(of, text(0, 32))
    take(of, text(1, 40), 16)
    of.end(admit(of, text(2, 40)), text(2, 40))
    left = []
    while of.pool.evictable:
        of.tree.evict(of.pool.free + 1)
        left.append([of.tree.match(text(i, 99)).tokens // STRIPE for i in range(3)] + [find(of, text(0, 32))[0]])
    assert [row[1] for row in left[:3]] == [4, 3, 2], "behind its snapshot, the oldest first"
    assert left[3:8] == [[4, 2, n, 32] for n in (4, 3, 2, 1, 0)]
    assert left[8] == [3, 2, 0, 0], "its snapshot went with its end"
    assert [row[:2] for row in left[9:]] == [[2, 2], [1, 2], [0, 2], [0, 1], [0, 0]]
    assert take(of, text(3, 16))[0] >= 0 and take(of, text(4, 16))[0] >= 0
    assert find(of, text(3, 16))[0] == find(of, text(4, 16))[0] == 16, "those without stripes went first"


def test_of_many_stripes_those_before_a_snapshot_stay() -> None:
    of = tables(2)
    take(of, text(0, 32))
    take(of, text(1, 40), 16)
    of.tree.evict(of.pool.free + 4)
    assert [of.tree.match(text(i, 99)).tokens for i in range(2)] == [24, 16]


def test_a_dropped_snapshot_leaves_its_stripes_worthless() -> None:
    of = tables(1, cost=1.0)
    take(of, text(0, 80))
    take(of, text(1, 24))
    assert find(of, text(0, 80)) == (0, -1)
    of.tree.evict(of.pool.free + 2)
    assert [of.tree.match(text(i, 99)).tokens for i in range(2)] == [64, 24]


def test_a_snapshot_without_stripes_does_not_move() -> None:
    of = tables(1, 1)
    take(of, text(0, 24))
    of.tree.evict(of.pool.free + 3)
    assert take(of, text(1, 16)) == (0, -1) and take(of, text(2, 16)) == (0, 1)


def test_other_tokens_never_find_a_snapshot_of_evicted_ones() -> None:
    of = tables(4, pages=5)
    take(of, text(0, 32), 16, 32)
    of.tree.evict(of.pool.free + 2)
    other = np.append(text(0, 16), text(1, 16)).astype(np.int32)
    of.end(admit(of, other), other)
    assert find(of, other)[0] == 16 and find(of, text(0, 32))[0] == 16


def test_indices_are_never_shared_and_content_follows() -> None:
    """Against what ranks would have at each index, over random takes and finds, with constant eviction of stripes."""
    for seed in range(20):
        rng = random.Random(seed)
        on_gpu, on_host = rng.randint(1, 3), rng.randint(0, 4)
        of, content = tables(on_gpu, on_host, pages=24), dict[int, bytes]()
        for _ in range(200):
            depth, at = STRIPE * rng.randint(1, 9), rng.randint(0, 8)
            tokens = np.array([rng.randint(0, 2) if i >= STRIPE * at else 0 for i in range(depth)], dtype=np.int32)
            if rng.random() < 0.6:
                index, moved = take(of, tokens)
                if moved >= 0:
                    assert on_gpu <= moved < on_gpu + on_host
                    content[moved] = content[index]
                if index >= 0:
                    assert index < on_gpu
                    content[index] = tokens.tobytes()
            else:
                known, index = find(of, tokens)
                assert index < 0 or content[index] == tokens[:known].tobytes()
        indices = [s.index for s in of.snapshots._snapshots]
        assert len({*indices}) == len(indices) <= on_gpu + on_host


@pytest.mark.parametrize("chunk", [16, 4096])
@pytest.mark.parametrize(
    "shared, salts, computed",
    [
        (60, "aaaa", [69, 9, 9, 9]),
        (60, "aabb", [69, 9, 69, 9]),
        (5, "aaaa", [14, 14, 14, 14]),  # less than half of a prompt is not worth a wait
    ],
)
def test_forks_that_arrive_at_once_compute_what_they_share_once(
    shared: int, salts: str, computed: list[int], chunk: int
) -> None:
    engine = SimulatedEngine(400, max_batch=8, prefill_chunk=chunk, lacking=math.inf, snapshots=(6, 0, 0))
    prompts = [[*range(shared), *(100 + n for _ in range(9))] for n in range(4)]
    names = [engine.submit(p, 1, cache_salt=salt) for p, salt in zip(prompts, salts, strict=True)]
    other = engine.submit([500] * 7, 1)
    first = engine.advance()
    assert first is not None
    waiting = [name for name, tokens in zip(names, computed, strict=True) if tokens == 9]
    assert {r.id for r in first.new_requests} == {*names, other} - {*waiting}, "the others wait for nobody"
    engine.drain()
    assert [engine.served[name].computed for name in names] == computed


def test_a_fork_goes_on_when_the_prompt_it_waits_for_is_aborted() -> None:
    engine = SimulatedEngine(400, max_batch=8, prefill_chunk=16, lacking=math.inf, snapshots=(6, 0, 0))
    names = [engine.submit([*range(60), 100 + n], 1) for n in range(2)]
    engine.advance()
    engine.abort(names[0])
    engine.drain()
    assert engine.served[names[1]].computed == 61


@pytest.mark.parametrize("lacking", [12.0, math.inf])
def test_conversations_of_a_full_batch_compute_their_own_turns_only(lacking: float) -> None:
    """As many conversations as rows, in turns, each with as many snapshots as kv.snapshots=auto has for a row."""
    rows, turns, new = 6, 4, 40
    room = SNAPSHOTS_PER_SLOT * rows
    engine = SimulatedEngine(4000, max_batch=rows, prefill_chunk=96, lacking=lacking, snapshots=(room, 0, 0))
    for turn in range(1, turns + 1):
        for user in range(rows):
            engine.submit([1000 * user + i for i in range(new * turn)], 3)
        engine.drain()
    stripe = engine.stripes.tokens
    assert [served.computed for served in engine.served.values()] == rows * [new] + (turns - 1) * rows * [new + stripe]
    engine.check_nothing_is_left()


def test_a_snapshot_whose_stripes_are_in_host_memory_keeps_its_worth_without_pages() -> None:
    """Of two, the one of fewer tokens goes."""
    of = tables(2)
    long, short = take(of, text(1, 40)), take(of, text(2, 8))
    first = next(s for s in of.snapshots._snapshots if s.tokens == 40)
    of.tree.drop_snapshot(first)
    first.is_stored = True
    assert first.node is None
    assert take(of, text(3, 24))[0] == short[0] != long[0]
