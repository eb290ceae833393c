"""What the scheduler decides, against a model of the ranks that carry decisions out."""

from __future__ import annotations

from helix.block_tables import BlockTables
from helix.layout import HelixLayout
from helix.pages import PagePool, Stripes
from helix.prefill_time import PrefillTime
from helix.prefix import PrefixTree
from helix.request import Request
from helix.scheduler import Scheduler


def tables(pages: int, kvp: int = 2) -> BlockTables:
    stripes, times = Stripes(HelixLayout.create(kvp=kvp), 2, 2), PrefillTime(1000)
    return BlockTables(PrefixTree(PagePool(pages), stripes, times.cost, 1))


def test_all_end_and_leave_nothing() -> None:
    held = tables(16)
    scheduler = Scheduler(held, PrefillTime(1000), max_batch=2, prefill_chunk=16, lease=1)
    for i in range(5):
        assert scheduler.submit(Request(i, range(20), 30), i) is None
    drawn = dict.fromkeys(range(5), 0)
    while (decision := scheduler.decide(0.0)) is not None:
        tokens = [s.slot for s in decision.prefill if s.last]
        tokens += decision.decode_steps * [
            slot for slot, s in scheduler.running.items() if s.prefilled == len(s.tokens)
        ]
        for slot in tokens:
            if (s := scheduler.record_token(slot, 7)) is not None:
                drawn[int(s.request.id)] += 1
        scheduler.landed()
    assert set(drawn.values()) == {30} and held.pool.used == 0
