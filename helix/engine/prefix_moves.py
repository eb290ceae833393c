"""Decides which stripes of prefixes move between pages and host memory, on rank 0's host only.

Rank 0 sends moves with its batches; ranks start them on a stream of their own and report when they are done. Neither
waits for the other, and a move is done when all ranks have said so.

- Stores. When a prompt has been read and when a sequence leaves, its stripes are copied to slabs, in the background: a
  stripe whose pages are evicted first is lost. The pages of the prefix count as in use until all ranks have read them.
- Restores. A request whose prefix lies in slabs is admitted once its stripes are in pages again, if that is predicted
  to be faster than computing them. A restore is like a sequence that computes nothing: it takes pages, and when all
  ranks have filled them, its stripes enter the prefix tree, where the request finds them. If it takes longer than
  computing would have, or fails, the request does not wait for it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np

from helix.engine.block_tables import BlockTable, BlockTables
from helix.engine.prefill_time import PrefillTime
from helix.engine.prefix import PrefixHit, path
from helix.engine.request_state import RequestState, Restore
from helix.engine.scheduler_output import StripeMove
from helix.engine.stripe_store import ChainHashes, Stripe, StripeStore

START_S = 0.01  # of a restore: a decision, an event, a report
LINK_RATE = 2e10  # bytes/s of a rank's link until it has been measured
MAX_STORE_BYTES = 512 << 20  # per rank, in flight: their pages are in use for 10 ms
MAX_OFFERS = 64  # sequences whose stripes wait to be stored
STALL_S = 10.0  # without a report, nobody waits for moves in flight any more

MoveReport = tuple[int, float, tuple[int, ...]]  # number, seconds, indices of stripes that failed


@dataclass(frozen=True)
class Prefix:
    """Stripes `[begin, end)`, in tokens, of a prompt whose first block is on kvp rank `start`."""

    start: int
    begin: int
    end: int
    stripes: Sequence[Stripe] = ()


@dataclass(eq=False)
class InFlightMove:
    """A move that some processes have not reported yet.

    Attributes:
        finish: called with the number of leading stripes that succeeded on all ranks, and the longest seconds.
    """

    count: int
    left: int
    finish: Callable[[int, float], None]
    seconds: float = 0.0
    failed: set[int] = field(default_factory=set)


class PrefixMoves:
    """Schedules moves, see above.

    Args:
        stripe_bytes: bytes of a stripe on the fullest rank.
        processes: number of processes that report each move.
        numbers: of moves, which no earlier engine has used.

    Attributes:
        start_s: seconds that any restore takes.
        resume: given a request and how many of its tokens are cached, returns how many of these it needs, and where its
            prefill begins.
        counters: stored and restored bytes per rank, restored tokens, failed and late restores, dropped stores.
    """

    def __init__(
        self,
        tables: BlockTables,
        times: PrefillTime,
        store: StripeStore,
        stripe_bytes: int,
        processes: int,
        numbers: Iterator[int],
    ) -> None:
        self.store, self.counters = store, Counter[str]()
        self.resume: Callable[[RequestState, int], tuple[int, int]] = lambda s, cached: (cached, cached)
        self._tables, self._times = tables, times
        self._stripes = tables.tree.stripes
        self._hashes = ChainHashes(self._stripes.tokens)
        self._stripe_bytes, self._processes = stripe_bytes, processes
        self._numbers = numbers
        self._in_flight: dict[int, InFlightMove] = {}
        self._outbox: list[StripeMove] = []
        self._num_restores = 0  # in flight
        self._offers: deque[tuple[Hashable, int, np.ndarray]] = deque()  # salt, start, tokens of whole stripes
        self._storing = 0  # bytes
        self._link_rate, self.start_s = LINK_RATE, START_S
        self._progress_at = -math.inf

    def is_busy(self, now: float) -> bool:
        """Returns whether moves are in flight or due; False if ranks have stopped to report."""
        return bool(self._outbox or self._offers or self._in_flight) and now - self._progress_at < STALL_S

    def collect(self, reports: Iterable[tuple[int, MoveReport]], now: float) -> None:
        """Handles what ranks have reported."""
        for _, (number, seconds, failed) in reports:
            move = self._in_flight.get(number)
            if move is None:
                continue  # of an earlier engine
            self._progress_at = now
            move.left -= 1
            move.seconds = max(move.seconds, seconds)
            move.failed.update(failed)
            if not move.left:
                del self._in_flight[number]
                move.finish(min(move.failed, default=move.count), move.seconds)

    def take(self, reserve: int, now: float) -> tuple[StripeMove, ...]:
        """Returns the moves to send now.

        Args:
            reserve: pages that stores leave to the running sequences.
        """
        while self._offers and self._storing < MAX_STORE_BYTES:
            sent = self._store(*self._offers[0], reserve)
            if sent is None:
                break
            if not sent:
                self._offers.popleft()
        moves, self._outbox = tuple(self._outbox), []
        if moves:
            self._progress_at = now
        return moves

    # ---- stores

    def offer(self, s: RequestState, tokens: np.ndarray) -> None:
        """Offers the stripes of a sequence's first tokens, int32 [n], which are in the tree or will be this batch."""
        whole = len(tokens) // self._stripes.tokens * self._stripes.tokens
        if whole and s.block_table is not None and s.request.sampling.prompt_logprobs is None:
            self._offers.append((s.request.prefix_salt, s.block_table.start, tokens[:whole]))
            if len(self._offers) > MAX_OFFERS:
                self.counters["dropped"] += len(self._offers.popleft()[2]) // self._stripes.tokens

    def _store(self, cache_salt: Hashable, start: int, tokens: np.ndarray, reserve: int) -> bool | None:
        """Sends the next stripes of an offer; returns False if none is left, None if there are too few pages now."""
        size, tree = self._stripes.tokens, self._tables.tree
        node, cached = tree.follow(tree.root(cache_salt, start), tokens, 0)
        known, keys = [], []
        limit = max(1, (MAX_STORE_BYTES - self._storing) // self._stripe_bytes)
        for key in self._hashes.keys(tokens[:cached], cache_salt, start):
            stripe = self.store.get(key)
            if stripe is None:
                keys.append(key)
            elif not keys:
                known.append(stripe)
            if len(keys) == limit or (keys and stripe is not None):
                break
        self.store.touch(known)
        if not keys:
            self.counters["dropped"] += (len(tokens) - cached) // size
            return False
        begin = len(known) * size
        pages, pool = tree.pages_of(PrefixHit(start, begin + len(keys) * size, 0, node))[0], self._tables.pool
        before, added = np.split(pages, [self._stripes.columns(0, begin).stop])
        if pool.count_unused(added):
            room = (pool.available - pool.count_unused(before) - reserve) // self._stripes.pages
            if room <= 0:
                return None
            keys = keys[:room]
        for stripe in known:
            stripe.users += 1
        stripes = self.store.add(keys)
        for stripe in known:
            stripe.users -= 1
        if not stripes:
            self.counters["dropped"] += (len(tokens) - begin) // size
            return False
        end = begin + len(stripes) * size
        held = self._hold(cache_salt, PrefixHit(start, end, 0, node), 0)
        self._storing += len(stripes) * self._stripe_bytes

        def finish(count: int, seconds: float) -> None:
            self._storing -= len(stripes) * self._stripe_bytes
            self.counters["stored_bytes"] += count * self._stripe_bytes
            pool.release(held.pages)
            if held.node is not None:
                tree.queue_up(held.node)
            self._fill(stripes, count)

        self._send("store", stripes, held.pages[self._stripes.columns(begin, end)], finish)
        return True

    def _fill(self, stripes: Sequence[Stripe], count: int) -> None:
        for i, stripe in enumerate(stripes):
            stripe.users -= 1
            stripe.is_ready = i < count
            if i >= count:
                self.store.drop(stripe)

    # ---- restores

    def restores(self, s: RequestState, free_slots: int, now: float) -> bool:
        """Returns whether a waiting request waits for its prefix; starts its restore if that is faster than prefill."""
        if s.restore is None and not self._start_restore(s, free_slots, now):
            return False
        if s.restore is None:
            return True  # others come first
        if not s.restore.is_done and now > s.restore.deadline:
            s.restore.is_done = True
            self.counters["late"] += 1
        return not s.restore.is_done

    def _start_restore(self, s: RequestState, free_slots: int, now: float) -> bool:
        """Starts the restore of a request, if that is faster than prefill; returns whether the request waits."""
        salt, tables = s.request.prefix_salt, self._tables
        hit = tables.tree.match(s.tokens, salt)
        found = self._find(s, hit)
        if found is None:
            s.restore = Restore(now, is_done=True)
            return False
        (_, at), (_, end) = self.resume(s, hit.tokens), self.resume(s, found.end)
        prefill_s = self._times.seconds(self._times.work(at, end))
        restore_s = self.start_s + len(found.stripes) * self._stripe_bytes / self._link_rate
        if 0 < prefill_s < restore_s:
            s.restore = Restore(now, is_done=True)
            return False
        shared = PrefixHit(found.start, found.begin, 0, hit.node if found.begin else None)
        need = self._stripes.pages_for(s.reserved) - self._stripes.columns(0, found.begin).stop
        if need > tables.pool.available - tables.pool.count_unused(tables.tree.pages_of(shared)[0]):
            return False  # it does not fit now
        if self._num_restores >= free_slots:
            return True
        held = self._hold(salt, shared, len(found.stripes))
        restore = s.restore = Restore(now + max(prefill_s, restore_s))
        tokens, stripes = s.tokens, found.stripes
        self._num_restores += 1
        self.store.touch(stripes)
        for stripe in stripes:
            stripe.users += 1

        def finish(count: int, seconds: float) -> None:
            self._num_restores -= 1
            for stripe in stripes:
                stripe.users -= 1
            loaded = count * self._stripe_bytes
            self.counters["restored_bytes"] += loaded
            self.counters["failed"] += count < len(stripes)
            if count == len(stripes) and seconds > 0:
                self._link_rate += (loaded / seconds - self._link_rate) / 4
            if not restore.is_done:
                restore.tokens = count * self._stripes.tokens
            restore.is_done = True
            tables.end(held, tokens[: found.begin + count * self._stripes.tokens])

        self._send("load", stripes, held.pages[self._stripes.columns(found.begin, found.end)], finish)
        return True

    def _find(self, s: RequestState, hit: PrefixHit) -> Prefix | None:
        """Finds the stripes that continue the prefix in pages, over all starts; None if they save nothing."""
        size, prompt = self._stripes.tokens, s.tokens[:-1]
        best, best_resume = None, self.resume(s, hit.tokens)[1]
        if s.request.sampling.prompt_logprobs is not None:
            return None
        for start in range(self._stripes.layout.kvp):
            begin = hit.shared if start == hit.start else 0
            stripes: list[Stripe] = []
            for key in islice(self._hashes.keys(prompt, s.request.prefix_salt, start), begin // size, None):
                stripe = self.store.get(key)
                if stripe is None or not stripe.is_ready:
                    break
                stripes.append(stripe)
            if not stripes:
                continue
            needed, resume = self.resume(s, begin + len(stripes) * size)
            stripes = stripes[: max(-(-needed // size) - begin // size, 0)]
            if stripes and resume > best_resume:
                best_resume, best = resume, Prefix(start, begin, begin + len(stripes) * size, stripes)
        return best

    # ---- pages

    def _hold(self, cache_salt: Hashable, hit: PrefixHit, count: int) -> BlockTable:
        """Shares the pages of a prefix, and allocates those of `count` stripes after it."""
        tree, pool, node = self._tables.tree, self._tables.pool, None
        assert hit.start is not None
        shared = tree.pages_of(hit)[0]
        if hit.shared:
            assert hit.node is not None
            node = next(n for n in path(hit.node) if n.depth < hit.shared)
            node = tree.split_at(node, hit.shared)
        pool.share(shared)
        new = count * self._stripes.pages
        tree.evict(new)
        pages = np.concatenate((shared, pool.allocate(new)))
        return BlockTable(cache_salt, hit.start, pages, num_inserted_tokens=hit.shared, node=node)

    def _send(
        self,
        kind: Literal["store", "load"],
        stripes: Sequence[Stripe],
        pages: np.ndarray,
        finish: Callable[[int, float], None],
    ) -> None:
        number = next(self._numbers)
        slabs = np.array([stripe.slab for stripe in stripes], dtype=np.int32)
        self._in_flight[number] = InFlightMove(len(stripes), self._processes, finish)
        self._outbox.append(StripeMove(number, kind, slabs, pages.reshape(len(stripes), -1)))
