"""Prefixes between pages and host memory: what rank 0 decides, against a model of the ranks that carry it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helix.engine import prefix_moves as module
from helix.engine.block_tables import BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefix import PrefixTree
from helix.engine.prefix_moves import MAX_FAILURES, STALL_S, WRITE_PAUSE_S
from helix.engine.scheduler_output import StripeHeader
from helix.engine.snapshots import StateSnapshots
from helix.engine.stripe_store import ChainHashes, StripeStore
from tests.simulated_engine import SimulatedEngine, calls_of


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 900, count).tolist()


def engine(pages: int = 24, slabs: int = 64, **options: Any) -> SimulatedEngine:
    """Stripes of 4 tokens: 24 pages hold 96 tokens, 64 slabs 256."""
    return SimulatedEngine(pages, slabs=slabs, max_batch=2, **options)


def serve(found: SimulatedEngine, prompt: list[int], new: int = 1, **options: Any) -> int:
    """Serves a request to its end; returns how many tokens were computed for it."""
    name = found.submit(prompt, new, **options)
    found.drain()
    return found.served[name].computed


def test_an_evicted_prefix_comes_back_from_host_memory() -> None:
    found, prompt = engine(), words(61)
    assert serve(found, prompt) == 61
    assert serve(found, words(80, 1)) == 80, "which evicts most of it"
    assert serve(found, [*prompt, 7]) == 62 - 60, "whole stripes come back"
    assert found.moves is not None and found.moves.counters["loaded_bytes"] > 0
    found.check_nothing_is_left()


@pytest.mark.parametrize("change", [{"cache_salt": "a"}, {"first": 899}], ids=["salt", "first token"])
def test_other_prefixes_do_not(change: dict[str, Any]) -> None:
    found, prompt = engine(), words(61)
    serve(found, prompt)
    serve(found, words(80, 1))
    prompt[0] = change.get("first", prompt[0])
    assert serve(found, prompt, cache_salt=change.get("cache_salt")) == 61


def test_a_restore_must_beat_prefill() -> None:
    found, prompt = engine(), words(61)
    assert found.moves is not None
    found.moves.start_s = 1.0
    serve(found, prompt)
    serve(found, words(80, 1))
    assert serve(found, prompt) > 30 and not found.moves.counters["loaded_bytes"]


def test_a_late_restore_is_not_waited_for() -> None:
    found, prompt = engine(pages=44), words(61)
    serve(found, prompt)
    serve(found, words(160, 1))
    assert found.moves is not None
    name = found.submit(prompt, 1)
    decision = found.advance()
    assert decision is not None and [move.kind for move in decision.moves] == ["load"]
    assert not decision.new_requests and found.advance() is None
    found.moving[0].left = 1000
    found.now += 0.1  # it would have been computed by now
    while not found.served[name].ended:
        found.advance()
    assert found.moves.counters["late"] == 1 and found.served[name].computed > 30
    assert found.pool.used >= 9, "the ranks may still fill its pages"
    found.moving[0].left = 0
    found.drain()
    found.check_nothing_is_left()


@pytest.mark.parametrize("patience_s", [0.0, 0.01])
def test_others_pass_who_waits_for_a_restore(patience_s: float) -> None:
    """However impatient it is: it needs no pages yet."""
    found, prompt = engine(pages=44, patience_s=patience_s), words(61)
    serve(found, prompt)
    serve(found, words(160, 1))
    name = found.submit([*prompt, 1], 1)
    for _ in range(2):  # it is found to wait, and for longer than its patience
        found.advance()
        found.moving[0].left, found.now = 1000, found.now + 0.012
    other = found.submit(words(4, 2), 1)
    for _ in range(3):
        found.advance()
    assert found.served[other].ended and not found.served[name].admissions
    found.moving[0].left = 0
    found.drain()
    assert found.served[name].computed == 62 - 60
    found.check_nothing_is_left()


def test_nobody_waits_for_a_restore_whose_request_was_aborted() -> None:
    """Two read from disk, as many as there are slots: a third one takes its turn when they are aborted."""
    found, prompts = engine(records=64), [words(25, seed) for seed in range(3)]
    for prompt in prompts:
        serve(found, prompt)
    assert found.moves is not None
    for stripe in [*found.moves.store._in_slabs.values()]:
        found.moves.store._drop_slab(stripe)
    found.tables[0].tree.evict(found.pool.available)
    names = [found.submit([*prompt, 1], 1) for prompt in prompts]
    decision = found.advance()
    assert decision is not None and [move.kind for move in decision.moves] == ["read", "read"]
    for name in names[:2]:
        found.abort(name)
    found.drain()  # `advance` notices if nothing is done for the third
    assert found.served[names[2]].computed == 26 - 24
    found.check_nothing_is_left()


@pytest.mark.parametrize("records", [0, 64])
def test_what_several_requests_wait_for_is_restored_once(records: int) -> None:
    """After a restart, or with several answers to a prompt; the second one does not compute it meanwhile."""
    found, prompt = engine(pages=48, records=records), words(61)
    serve(found, prompt)
    assert found.moves is not None
    for stripe in [*found.moves.store._in_slabs.values()] if records else []:
        found.moves.store._drop_slab(stripe)
    found.tables[0].tree.evict(found.pool.available)
    names = [found.submit([*prompt, last], 1) for last in range(2)]
    found.drain()
    assert [found.served[name].computed for name in names] == [62 - 60] * 2
    assert found.moves.counters["read_bytes"] == 15_000 * bool(records)
    assert found.moves.counters["loaded_bytes"] == 15_000
    found.check_nothing_is_left()


def test_a_common_beginning_is_no_reason_to_wait_for_the_rest_of_another_prefix() -> None:
    found, prompts = engine(pages=48), [[*words(20), *words(41, seed)] for seed in (1, 2)]
    for prompt in prompts:
        serve(found, prompt)
    found.tables[0].tree.evict(found.pool.available)
    for prompt in prompts:
        found.submit([*prompt, 1], 1)
    decision = found.advance()
    assert decision is not None and [move.kind for move in decision.moves] == ["load", "load"]
    found.drain()
    found.check_nothing_is_left()


def test_restores_make_no_room_for_a_drafter() -> None:
    """Sequences that share a prefix share pages of the cache, but not of a drafter."""
    found, prompt = engine(own_pages=True, run_steps=1), words(61)
    for _ in range(2):
        serve(found, prompt)
        serve(found, words(80, 1))
    name = found.submit([*prompt, 1], 20)
    while not found.served[name].drawn:
        found.advance()
    found.submit([*prompt, 2], 2)
    found.drain()  # `execute` counts them
    found.check_nothing_is_left()


def test_a_failed_restore_is_shorter() -> None:
    found, prompt = engine(), words(61)
    serve(found, prompt)
    serve(found, words(90, 1))
    name = found.submit(prompt, 1)
    decision = found.advance()
    assert decision is not None
    count = len(decision.moves[0].slabs)
    found.moving[0].failed = (count - 2, count - 1)
    found.drain()
    assert found.served[name].computed == 61 - 60 + 2 * 4
    assert found.moves is not None and found.moves.counters["failed"] == 1
    found.check_nothing_is_left()


def test_a_store_that_fails_is_not_tried_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORE_BYTES", 4000)  # 4 stripes of a move
    found, sent = engine(), set[int]()
    found.submit(words(61), 1)
    for _ in range(60):
        found.advance()
        for moving in found.moving:
            moving.failed = tuple(range(len(moving.move.slabs)))
            sent.add(moving.move.number)
    assert found.moves is not None and not found.moves.is_busy(found.now)
    assert found.moves.counters["failed_stores"] == 4 * len(sent) <= 16 and not found.moves.counters["stored_bytes"]
    found.drain()
    found.check_nothing_is_left()


def test_a_beginning_that_has_left_is_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORE_BYTES", 2000)
    found = engine(run_steps=1)
    assert found.moves is not None
    store = found.moves.store
    name = found.submit(words(61), 30)
    while not (ready := [s for s in store._stripes.values() if s.is_ready and not s.header.depth]):
        found.advance()
    assert store.used < 15
    store._drop_slab(ready[0])
    while found.moves._offers:
        found.advance()
    assert store.used == 15 and not found.served[name].ended
    found.drain()
    found.check_nothing_is_left()


def test_a_longer_prefix_continues_what_is_stored_from_the_same_rank() -> None:
    found = engine()
    assert found.moves is not None
    found.submit(words(61), 30)
    while not found.moves.counters["stored_bytes"]:
        found.advance()
    (s,) = dict(found.scheduler.running).values()
    assert s.offer is not None and s.block_table is not None and len(s.offer.known) == 15
    before = s.offer.known
    found.moves.offer(s, s.tokens[:20])
    assert s.offer.known == before[:5], "no more than it offers"
    for start, same in ((s.offer.start, True), (1 - s.offer.start, False)):
        s.block_table.start = start
        before = s.offer.known
        found.moves.offer(s, s.tokens)
        assert (s.offer.known == before) is same and s.offer.known is not before


def test_states_need_stripes_and_a_snapshot() -> None:
    """A hit ends at a snapshot, which survives the eviction of its pages as long as its stripes are in host memory."""
    for snapshots, computed in (((4, 0, 0), 2), ((1, 1, 0), 2), ((1, 0, 0), 2)):
        found, prompt = engine(lacking=math.inf, snapshots=snapshots), words(61)
        serve(found, prompt)
        serve(found, words(80, 1))
        assert serve(found, [*prompt, 7]) == computed
        found.check_nothing_is_left()
    found = engine(slabs=3, lacking=math.inf, snapshots=(4, 0, 0))
    serve(found, words(61))
    serve(found, words(80, 1))
    assert serve(found, words(61)) == 61, "its stripes are not all there"


def test_snapshots_come_back_from_slabs_and_others_leave_for_them() -> None:
    """One fits on the GPU: three prompts in turn resume each from its own, which takes two slabs."""
    found = engine(lacking=math.inf, snapshots=(1, 0, 0), slabs=80)
    prompts = [words(61, seed) for seed in range(3)]
    assert [serve(found, prompt) for prompt in prompts] == [61, 61, 61]
    assert [serve(found, [*prompt, 7]) for prompt in prompts] == [2, 2, 2]
    found.check_nothing_is_left()
    assert found.moves is not None
    found.moves.reset(found.tables[0], found.times)
    assert all(stripe.snapshot is None for stripe in found.moves.store._stripes.values()), "its tables are gone"


def test_a_snapshot_that_does_not_come_back_is_not_resumed() -> None:
    """Its pages do, so that a node is there to which it would belong; ranks check the states that are resumed."""
    found, prompt = engine(lacking=math.inf, snapshots=(1, 0, 0)), words(61)
    serve(found, prompt)
    serve(found, words(80, 1))
    name = found.submit([*prompt, 7], 1)
    while not (
        parts := [moving for moving in found.moving if moving.move.kind == "load" and moving.move.snapshot >= 0]
    ):
        found.advance()
    parts[0].failed = (1,)
    found.drain()
    assert found.served[name].computed == 62 and found.moves is not None and found.moves.counters["failed"] == 1
    found.check_nothing_is_left()


def test_a_snapshot_that_comes_back_after_a_reset_is_not_resumed() -> None:
    found, prompt = engine(lacking=math.inf, snapshots=(1, 0, 0)), words(61)
    serve(found, prompt)
    serve(found, words(80, 1))
    assert found.moves is not None
    found.submit([*prompt, 7], 1)
    while not any(moving.move.kind == "load" and moving.move.snapshot >= 0 for moving in found.moving):
        found.advance()
    old = found.tables[0]
    tree = PrefixTree(PagePool(24), old.tree.stripes, found.times.cost, 1, True)
    found.moves.reset(BlockTables(tree, True, None, StateSnapshots(tree, found.times.work, 1)), found.times)
    found.moves.collect([(0, (moving.move.number, 0.1, ())) for moving in found.moving], found.now)
    assert all(stripe.snapshot is None for stripe in found.moves.store._stripes.values())


def test_a_snapshot_of_other_tokens_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores lag: when one is due, its prefix has been evicted, and another one continues its beginning."""
    found, prompt = engine(lacking=math.inf, snapshots=(4, 0, 0), run_steps=1), words(61)
    assert found.moves is not None
    found.submit(prompt, 8)
    while found.moving or not found.moves.counters["stored_bytes"]:
        found.advance()
    with monkeypatch.context() as lag:
        lag.setattr(module, "STORE_BYTES", -1)
        found.drain()
        serve(found, words(78, 1))
        serve(found, [*prompt[:16], *words(29, 2)])
    found.drain()
    serve(found, words(80, 3))
    found.tables[0].tree.evict(found.pool.available)
    serve(found, [*prompt[:46], 7])  # `admit` checks its state
    found.check_nothing_is_left()


def test_a_prefix_does_not_displace_its_own_beginning() -> None:
    found, prompt = engine(pages=40, slabs=4), words(33)
    serve(found, prompt[:17])
    serve(found, prompt)
    serve(found, words(150, 1)[:2])
    found.tables[0].tree.evict(found.pool.available)
    assert serve(found, prompt) == 33 - 16


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    computed = []
    for slabs in (0, 64):
        found = engine(pages=28, slabs=slabs, lookahead_tokens=16)
        for seed in range(2):
            found.submit(words(40, seed), 30)
        while not found.scheduler.preemptions or found.moving:
            found.advance()
        found.tables[0].tree.evict(found.pool.available)
        found.drain()
        computed.append(sum(s.computed for s in found.served.values()))
        found.check_nothing_is_left()
    assert computed[1] <= computed[0] - 40, "at least its prompt is not computed again"


def test_what_a_preempted_prompt_had_computed_itself_is_no_hit() -> None:
    found = engine(pages=15, slabs=0, lookahead=0, lookahead_tokens=1, prefill_chunk=8, run_steps=1)
    found.submit(words(24), 30)
    while not found.served[0].drawn:
        found.advance()
    name = found.submit(words(30, 1), 2)
    found.drain()  # `admit` compares what is reported with the first admission
    assert [a.num_computed_tokens for a in found.served[name].admissions] == [0, 4]


def test_stores_leave_pages_to_running_sequences() -> None:
    """A sequence does not have to leave because the pages of one that has ended are being copied."""
    for pages, lookahead_tokens in ((24, 16), (26, 16), (28, 16), (24, 32)):
        preemptions = []
        for slabs in (0, 64):
            found = engine(pages, slabs, lookahead_tokens=lookahead_tokens)
            for seed in range(2):
                found.submit(words(20, seed), 50)
            found.drain()
            preemptions.append(found.scheduler.preemptions)
        assert preemptions[0] == preemptions[1]


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("slabs, records", [(1, 0), (6, 0), (30, 0), (4, 5), (6, 60)])
def test_two_hundred_prompts_with_aborts_and_preemptions(slabs: int, records: int, states: bool) -> None:
    """Six stripes on the GPU: eviction never stops; the model of the ranks checks each key."""
    rng = np.random.default_rng(slabs)
    found = SimulatedEngine(
        6, slabs=slabs, records=records, failing=0.05 * (records > 5), max_batch=3, lookahead_tokens=2, run_steps=2,
        **(dict(lacking=math.inf, snapshots=(2, 0, 0)) if states else {}),
    )  # fmt: skip
    systems = [words(9, seed) for seed in range(3)]
    while len(found.served) < 200:
        prompt = systems[rng.integers(3)] + words(rng.integers(1, 8), int(rng.integers(5)))
        found.submit(prompt, int(rng.integers(1, 7)), cache_salt="ab"[rng.integers(2)] if rng.random() < 0.2 else None)
        for _ in range(rng.integers(0, 5)):
            found.advance()
        if rng.random() < 0.2:
            found.abort(int(rng.integers(max(0, len(found.served) - 5), len(found.served))))
    found.drain()
    assert found.moves is not None and (slabs < (30 if states else 6) or found.moves.counters["loaded_bytes"] > 0)
    assert records < 60 or found.moves.counters["read_bytes"] > 0
    found.check_nothing_is_left()


def test_a_disk_that_hangs_is_left_alone() -> None:
    """A request waits for as long as its prefill takes; later ones do not try."""
    found, prompt = engine(pages=44, slabs=16, records=64), words(61)
    assert found.moves is not None
    serve(found, prompt)
    serve(found, words(61, 1))
    found.tables[0].tree.evict(found.pool.available)
    name = found.submit([*prompt, 1], 1)
    decision = found.advance()
    assert decision is not None and {move.kind for move in decision.moves} == {"read"}
    for moving in found.moving:
        moving.left = 10_000
    found.now += 0.04
    assert found.moves.is_busy(found.now), "the request is not forgotten"
    found.now += STALL_S
    while not found.served[name].ended:
        found.advance()
    assert found.served[name].computed == 62 and found.moves.counters["late"] == 1
    for _ in range(4):
        found.advance()  # its pages are released
    found.tables[0].tree.evict(found.pool.available)
    name = found.submit([*prompt, 2], 1)
    while not found.served[name].ended:
        found.advance()
    assert found.served[name].computed > 30 and found.moves.counters["late"] == 1
    for moving in found.moving:
        moving.left = 0
    found.drain()
    found.check_nothing_is_left()


def test_writes_that_fail_in_a_row_pause() -> None:
    found = engine(records=64, failing=1.0)
    assert found.moves is not None
    found.failing, stored = 0.0, found.moves.counters
    found.submit(words(61), 1)
    while not found.moves._unwritten:
        found.advance()
    found.failing = 1.0
    found.drain()
    assert stored["failed_writes"] in range(MAX_FAILURES, MAX_FAILURES + 7) and not found.moves.is_busy(found.now)
    found.failing, found.now = 0.0, found.now + WRITE_PAUSE_S
    serve(found, words(5, 1))
    assert stored["written_bytes"] and found.moves.store.used_records
    found.check_nothing_is_left()


def test_what_is_stored_again_while_writes_pause_is_written_once() -> None:
    """Its record goes to another stripe when they go on, and a second one would be lost."""
    found, prompt = engine(records=4), words(17)
    serve(found, prompt)
    assert found.moves is not None
    store, found.moves._writes_from = found.moves.store, math.inf
    serve(found, words(17, 1))
    for _ in range(2):
        for key in [*store._in_records]:
            store._drop_slab(store._in_slabs[key])
        serve(found, prompt)
    found.moves._writes_from = found.now
    serve(found, words(1, 2))
    found.check_nothing_is_left()


def test_ranks_that_stop_to_report_are_not_waited_for() -> None:
    found = engine()
    serve(found, words(20))
    assert found.moves is not None
    found.submit(words(20, 1), 1)
    while not any(m.move.kind == "store" for m in found.moving):
        found.advance()
    assert found.moves.is_busy(found.now) and not found.moves.is_busy(found.now + STALL_S)


@pytest.mark.parametrize("come", [True, False])
def test_requests_wait_a_while_for_what_ranks_find_on_disk(come: bool) -> None:
    found, prompt = engine(records=8), words(20)
    moves = found.moves
    assert moves is not None
    moves._scans.clear()
    moves._scans_due = math.inf
    long, short = found.submit(prompt, 1), found.submit(words(4, 2), 1)
    while not found.served[short].ended:
        found.advance()
    assert not found.served[long].computed and moves.is_busy(found.now)
    if come:
        moves.collect([(0, (0, 0.0, []))], found.now)
    else:
        found.now += STALL_S
        moves.store.restore_records([[]])
    found.drain()
    assert found.served[long].computed == 20
    assert serve(found, words(20, 1)) == 20, "later ones do not wait"


def test_a_restore_waits_where_nobody_knows_the_time_of_prefill() -> None:
    found, prompt = engine(), words(61)
    serve(found, prompt)
    serve(found, words(80, 1))
    found.times._seen.clear()
    name = found.submit(prompt, 1)
    found.advance()
    found.moving[0].left = 1000
    found.now += STALL_S / 2
    assert found.advance() is None, "it still waits"
    found.moving[0].left = 0
    found.drain()
    assert found.served[name].computed == 61 - 60


def headers(*keys: bytes) -> list[StripeHeader]:
    return [StripeHeader(key, b"", 0, 0, 0) for key in keys]


def test_the_least_recently_used_prefix_leaves_from_its_end() -> None:
    store = StripeStore(4)
    a, b = (store.add(headers(*keys)) for keys in ((b"a0", b"a1"), (b"b0", b"b1")))
    for stripe in (*a, *b):
        store.filled(stripe, True)
    store.touch(a)
    assert [stripe.key for stripe in store.add(headers(b"c0"))] == [b"c0"]
    assert store.get(b"b1") is None and store.get(b"b0") is not None
    store.add(headers(b"c1"))
    assert store.get(b"b0") is None
    assert [stripe.slab for stripe in store.add(headers(b"d0", b"d1", b"d2"))] == [1, 0], "others are being filled"
    assert store.add(headers(b"e")) == []


def test_hashes_depend_on_all_tokens_before_and_are_computed_once() -> None:
    def keys(tokens: list[int], salt: Any = None, start: int = 0, seed: bytes = b"") -> list[bytes]:
        return [*ChainHashes(4, seed).keys(np.array(tokens, dtype=np.int32), salt, start)]

    base = keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(base) == 2 and keys([1, 2, 3, 4, 5, 6, 7, 8, 9]) == base
    others: list[Callable[[], list[bytes]]] = [
        lambda: keys([0, 2, 3, 4, 5, 6, 7, 8]), lambda: keys([1, 2, 3, 4, 5, 6, 7, 8], "a"),
        lambda: keys([1, 2, 3, 4, 5, 6, 7, 8], start=1), lambda: keys([1, 2, 3, 4, 5, 6, 7, 8], seed=b"x"),
    ]  # fmt: skip
    assert not {key for other in others for key in other()} & {*base}
    hashes, rng = ChainHashes(4), np.random.default_rng(0)
    known = [rng.integers(0, 2, 40, dtype=np.int32) for _ in range(3)]
    for _ in range(200):  # prompts that go on from, or leave, earlier ones
        prompt = np.concatenate((known[rng.integers(3)][: rng.integers(40)], rng.integers(0, 2, 9, dtype=np.int32)))
        stop = int(rng.integers(12))
        got = [key for _, key in zip(range(stop), hashes.keys(prompt, None, 0), strict=False)]
        assert got == keys(prompt.tolist())[:stop]
    long = np.zeros(4000, dtype=np.int32)
    first = calls_of(lambda: [*hashes.keys(long, None, 0)])
    assert calls_of(lambda: [*hashes.keys(np.append(long, np.int32(1)), None, 0)]) < first / 2


def test_a_restart_finds_records_that_all_ranks_have_from_the_root_on() -> None:
    def header(name: str, generation: int = 1) -> StripeHeader:
        depth = int(name[1])
        return StripeHeader(name.encode(), f"{name[0]}{depth - 1}".encode(), generation, 0, depth)

    store = StripeStore(4, 8)
    one = [
        (0, header("a0")),
        (1, header("a1")),
        (2, header("b1")),
        (3, header("c0", 7)),
        (4, header("d0")),
        (5, header("e0")),
    ]
    two = [(0, header("a0")), (1, header("a1")), (2, header("b1")), (3, header("c0", 6)), (4, header("d0"))]
    store.restore_records([one, two])
    assert {key: stripe.record for key, stripe in store._stripes.items()} == {b"a0": 0, b"a1": 1, b"d0": 4}
    (stripe,) = store.add(headers(b"new"))
    record = store.new_record(stripe)
    assert record == 2 and stripe.header.generation == 8, "later than all that are there"
    store.written(stripe, record, False)
    assert stripe.record < 0 and store.used_records == 3
    assert store.new_record(stripe) == record
    store.written(stripe, record, True)
    assert stripe.record == record and store.used_records == 4


def test_a_move_is_done_when_all_processes_have_said_so() -> None:
    found = engine()
    assert found.moves is not None
    found.moves._processes = 2
    found.submit(words(20), 1)
    while not any(m.move.kind == "store" for m in found.moving):
        found.advance()
    number = found.moving[0].move.number
    found.moving.clear()
    found.moves.collect([(1, (number, 0.1, ()))], found.now)
    assert found.pool.used and number in found.moves._in_flight
    found.moves.collect([(0, (number, 0.1, (1,)))], found.now)
    stripes = found.moves.store._stripes.values()
    assert number not in found.moves._in_flight and all(stripe.is_ready for stripe in stripes)
    assert len(stripes) < 5, "a stripe that failed on one rank is none"
