"""Decides which stripes of prefixes move between pages, host memory and disk, on rank 0's host only.

Rank 0 sends moves with its batches; ranks start them in the background and report when they are done. Neither waits for
the other, and a move is done when all ranks have said so.

- Stores. When a prompt has been read and when a sequence leaves, its stripes are copied to slabs: a stripe whose pages
  are evicted first is lost. The pages of the prefix count as in use until all ranks have read them.
- Writes. Slabs are written to records, if there is a disk; a stripe whose slab is evicted first is lost.
- Restores. A request whose prefix lies in slabs or records is admitted once its stripes are in pages again, if that is
  predicted to be faster than computing them. A restore reads records into slabs, if it has to; then it is like a
  sequence that computes nothing: it takes pages, and when all ranks have filled them, its stripes enter the prefix
  tree, where the request finds them. The snapshot from which the request resumes comes back with them. If a restore
  takes longer than computing would have, or fails, the request does not wait for it. Nor does it wait long for the
  ranks to have said what their files hold.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from helix.engine.block_tables import BlockTable, BlockTables
from helix.engine.prefill_time import PrefillTime
from helix.engine.prefix import Node, PrefixHit, Snapshot, path
from helix.engine.request_state import Offer, RequestState, Restore
from helix.engine.scheduler_output import MoveKind, StripeHeader, StripeMove
from helix.engine.snapshots import StateSnapshots
from helix.engine.stripe_store import ChainHashes, Stripe, StripeStore, snapshot_headers
from helix.kv_placement import NO_PAGES

START_S = 0.01  # of a restore: a decision, an event, a report
GRACE_S = 0.05  # for reports, which rank 0 reads between two runs of decode steps
LINK_RATE = 2e10  # bytes/s of a rank's link until it has been measured
DISK_RATE = 1e9  # the same of a rank's reads
READ_STRIPES = 8  # of a move
MAX_FAILURES, WRITE_PAUSE_S = 3, 60.0  # writes that fail in a row, and how long none is tried then
STORE_BYTES = 512 << 20  # of a move, per rank; two are in flight, so their pages are in use for 30 ms
MAX_OFFERS = 64  # sequences whose stripes wait to be stored
STALL_S = 10.0  # without a report, nobody waits for moves in flight any more, nor for scans

MoveReport = tuple[int, float, Any]  # number, seconds, indices of stripes that failed; number 0: what a scan found


@dataclass(frozen=True)
class Prefix:
    """Stripes `[begin, end)`, in tokens, of a prompt whose first block is on kvp rank `start`.

    Attributes:
        parts: of the snapshot at the end, unless it is on the GPU, or there is none.
        prefill_s, restore_s: predicted seconds of computing what they save, 0 if unknown, and of restoring them.
    """

    start: int
    begin: int
    end: int
    stripes: Sequence[Stripe]
    parts: Sequence[Stripe]
    prefill_s: float
    restore_s: float

    @property
    def slabs(self) -> list[Stripe]:
        """All that has to be in slabs, in order."""
        return [*self.stripes, *self.parts]

    @property
    def saved_s(self) -> float:
        return (self.prefill_s or math.inf) - self.restore_s

    def hit(self, hit: PrefixHit) -> PrefixHit:
        """Returns the hit in pages that they continue."""
        return PrefixHit(self.start, self.begin, 0, hit.node if self.begin else None)


@dataclass(eq=False)
class InFlightMove:
    """A move that some processes have not reported yet.

    Attributes:
        finish: called with the indices of stripes that failed on any rank, and the longest seconds.
    """

    kind: MoveKind
    sent: float
    left: int
    finish: Callable[[set[int], float], None]
    seconds: float = 0.0
    failed: set[int] = field(default_factory=set)


class PrefixMoves:
    """Schedules moves, see above.

    Args:
        stripe_bytes: bytes of a stripe on the fullest rank.
        processes: number of processes that report each move.
        identity: of model and settings, which the hashes depend on.
        snapshot_slabs: slabs of a snapshot; 0: none are stored.

    Attributes:
        start_s: seconds that any restore takes.
        prefill_start: where prefill begins after a prefix hit without a snapshot, see `Scheduler`.
        counters: by name: bytes of the fullest rank that were stored, loaded, written and read, and their seconds
            (`stored_bytes`, `stored_seconds`, ..); tokens that were looked up here (`queries`) and restored (`hits`);
            restores that were `late` or `failed`; stripes that were `dropped`, `failed_stores` and `failed_writes`.
    """

    def __init__(
        self,
        tables: BlockTables,
        times: PrefillTime,
        store: StripeStore,
        stripe_bytes: int,
        processes: int,
        identity: bytes = b"",
        snapshot_slabs: int = 0,
    ) -> None:
        self.store, self.counters = store, Counter[str]()  # seconds are no integers, which Counter allows
        self.prefill_start: Callable[[int], int] = lambda num_cached_tokens: num_cached_tokens
        self._tables, self._times = tables, times
        self._stripes = tables.tree.stripes
        self._hashes = ChainHashes(self._stripes.tokens, identity)
        self._stripe_bytes, self._processes, self._snapshot_slabs = stripe_bytes, processes, snapshot_slabs
        self._numbers = count(1)
        self._in_flight: dict[int, InFlightMove] = {}
        self._outbox: list[StripeMove] = []
        self._restores: list[Restore] = []  # that requests may wait for
        self._now = 0.0
        self._offers: deque[Offer] = deque()
        self._storing = self._writing = 0  # bytes, and stripes
        self._unwritten: deque[Stripe] = deque()
        self._has_records = True  # when one was wanted last
        self._failures, self._writes_from = 0, -math.inf  # writes that failed in a row
        self._scans: dict[int, Sequence[tuple[int, StripeHeader]]] = {}
        self._scans_due = math.inf  # when requests stop waiting for them
        self._link_rate, self._disk_rate, self.start_s = LINK_RATE, DISK_RATE, START_S
        self._progress_at = -math.inf

    def reset(self, tables: BlockTables, times: PrefillTime) -> None:
        """Goes on with empty tables; moves in flight still end, with the pages of the earlier tables."""
        self._tables, self._times = tables, times
        self._offers.clear()
        self._restores.clear()
        self.store.forget_snapshots()
        for move in self._outbox:  # never sent
            self._in_flight.pop(move.number).finish(set(range(len(move.slabs))), 0.0)
        self._outbox.clear()

    def is_busy(self, now: float) -> bool:
        """Returns whether requests wait for moves, or moves are due or in flight on ranks that still report."""
        waits = any(not restore.is_done and now <= restore.deadline for restore in self._restores)
        if waits or now < self._scans_due < math.inf:
            return True
        may_write = (self._has_records or len(self._scans) < self._processes) and now >= self._writes_from
        has_moves = self._outbox or self._offers or self._in_flight or (self._unwritten and may_write)
        return bool(has_moves) and now - self._progress_at < STALL_S

    def collect(self, reports: Iterable[tuple[int, MoveReport]], now: float) -> None:
        """Handles what ranks have reported."""
        self._now = now
        for rank, (number, seconds, failed) in reports:
            if not number:
                self._scans[rank] = failed
                if len(self._scans) == self._processes:
                    self.store.restore_records([*self._scans.values()])
                    self._scans_due = -math.inf
                continue
            move = self._in_flight[number]
            self._progress_at = now
            move.left -= 1
            move.seconds = max(move.seconds, seconds)
            move.failed.update(failed)
            if not move.left:
                del self._in_flight[number]
                move.finish(move.failed, move.seconds)

    def take(self, reserve: int, now: float) -> tuple[StripeMove, ...]:
        """Returns the moves to send now.

        Args:
            reserve: pages that stores leave to the running sequences.
        """
        while self._offers and self._storing <= STORE_BYTES:
            sent = self._store(self._offers[0], reserve)
            if sent is None:
                break
            if not sent:
                self.store.touch(self._offers.popleft().known)
        if not self._disk_hangs():
            self._write(now)
        moves, self._outbox = tuple(self._outbox), []
        if moves:
            self._progress_at = now
        return moves

    # ---- stores and writes

    def offer(self, s: RequestState, tokens: np.ndarray) -> None:
        """Offers the stripes of a sequence's first tokens, int32 [n], which are in the tree or will be this batch."""
        whole = len(tokens) // self._stripes.tokens * self._stripes.tokens
        if whole and s.block_table is not None and s.request.sampling.prompt_logprobs is None:
            start, before = s.block_table.start, s.offer
            known = [] if before is None or before.start != start else before.known[: whole // self._stripes.tokens]
            s.offer = Offer(s.request.prefix_salt, start, tokens[:whole], known)
            self._offers.append(s.offer)
            if len(self._offers) > MAX_OFFERS:
                self.counters["dropped"] += len(self._offers.popleft().tokens) // self._stripes.tokens

    def _store(self, offer: Offer, reserve: int) -> bool | None:
        """Sends the next stripes of an offer; returns False if none is left, None if there are too few pages now."""
        size, tree, pool = self._stripes.tokens, self._tables.tree, self._tables.pool
        cache_salt, start, tokens, known = offer.cache_salt, offer.start, offer.tokens, offer.known
        node, cached = tree.follow(tree.root(cache_salt, start), tokens, 0)
        if any(stripe.slab < 0 for stripe in known):
            known.clear()
        headers: list[StripeHeader] = []
        limit = max(1, STORE_BYTES // self._stripe_bytes)
        parent = known[-1].key if known else self._hashes.root(cache_salt, start)
        has_disk = self.store.records > 0
        for key in self._hashes.keys(tokens[:cached], cache_salt, start, len(known)):
            stripe = self.store.get(key)
            if stripe is None or stripe.slab < 0:
                at = (len(known) + len(headers)) * size
                headers.append(
                    StripeHeader(key, parent, 0, start, at, tokens[at : at + size] if has_disk else NO_PAGES)
                )
            elif headers:
                break
            else:
                known.append(stripe)
            if len(headers) == limit:
                break
            parent = key
        if not headers:
            self._link_snapshots(node, known[: cached // size])  # others' tokens may follow these in `node`
            self._store_snapshots(known)
        begin = len(known) * size
        pages = tree.pages_of(PrefixHit(start, begin + len(headers) * size, 0, node))[0]
        before, added = np.split(pages, [self._stripes.columns(0, begin).stop])
        if pool.count_unused(added):
            room = (pool.available - pool.count_unused(before) - reserve) // self._stripes.pages
            if room <= 0:
                return None
            headers = headers[:room]
        # A prefix does not displace its own beginning, unless that is on disk.
        evicts = len(headers) > self.store.free
        with self._used([stripe for stripe in known if stripe.record < 0] if evicts else []):
            stripes = self.store.add(headers)
        if headers and not stripes and self._writing:
            return None
        if not stripes:
            self.counters["dropped"] += (len(tokens) - begin) // size
            return False
        end = begin + len(stripes) * size
        known += stripes
        self._link_snapshots(node, known)
        held = self._hold(cache_salt, PrefixHit(start, end, 0, node), 0)
        self._storing += len(stripes) * self._stripe_bytes

        def finish(failed: set[int], seconds: float) -> None:
            self._storing -= len(stripes) * self._stripe_bytes
            self._count("stored", len(stripes) - len(failed), seconds)
            if failed:  # another try is likely to fail too
                self.counters["failed_stores"] += len(failed)
                self._offers = deque(other for other in self._offers if other is not offer)
            pool.release(held.pages)
            if held.node is not None:
                tree.queue_up(held.node)
            for i, stripe in enumerate(stripes):
                self.store.filled(stripe, i not in failed)
                if has_disk and i not in failed and stripe.record < 0:
                    self._unwritten.append(stripe)

        self._send("store", stripes, finish, pages=held.pages[self._stripes.columns(begin, end)])
        self._store_snapshots(known)
        return True

    def _store_snapshots(self, stripes: Sequence[Stripe]) -> None:
        """Sends the snapshots at the ends of a prefix's stripes that are on the GPU and not in slabs."""
        for stripe in stripes if self._snapshot_slabs else ():
            snapshot = _snapshot(stripe)
            if snapshot is None or snapshot.users:
                continue
            headers = self._parts(stripe)
            found = [self.store.get(header.key) for header in headers]
            if any(part is not None and part.slab >= 0 for part in found) or not self._snapshots.is_on_gpu(snapshot):
                continue
            with self._used(stripes):
                parts = self.store.add(headers)
            if len(parts) < len(headers):
                for part in reversed(parts):
                    self.store.filled(part, False)
                self.counters["dropped"] += len(headers)
                return
            snapshot.users += 1
            self._storing += len(parts) * self._stripe_bytes
            self._send("store", parts, partial(self._snapshot_stored, snapshot, parts), snapshot=snapshot.index)

    def _snapshot_stored(self, snapshot: Snapshot, parts: Sequence[Stripe], failed: set[int], seconds: float) -> None:
        snapshot.users -= 1
        self._storing -= len(parts) * self._stripe_bytes
        self._count("stored", 0 if failed else len(parts), seconds)
        self.counters["failed_stores"] += len(failed)
        for part in reversed(parts):
            self.store.filled(part, not failed)
        if self.store.records and not failed:
            self._unwritten.extend(part for part in parts if part.record < 0)

    def _parts(self, stripe: Stripe) -> list[StripeHeader]:
        if stripe.parts is None:
            given = self._snapshot_slabs, self._stripes.tokens, self.store.records > 0
            stripe.parts = snapshot_headers(stripe.header, *given)
        return stripe.parts

    def _stored_snapshot(self, stripe: Stripe, from_disk: bool) -> list[Stripe]:
        """Returns the parts of the snapshot at a stripe's end, or none if one is not in a slab, or in a record."""
        headers = self._parts(stripe)
        found = (self.store.get(header.key) for header in headers)
        parts = [part for part in found if part is not None and self._is_at_hand(part, from_disk)]
        return parts if len(parts) == len(headers) else []

    def _is_at_hand(self, stripe: Stripe, from_disk: bool) -> bool:
        """Returns whether a stripe is in a slab or, if it may be read or is being read, in a record."""
        return stripe.is_ready or (stripe.record >= 0 and from_disk)

    @property
    def _snapshots(self) -> StateSnapshots:
        return self._tables.snapshots

    def _write(self, now: float) -> None:
        """Sends writes, as many at a time as a tenth of the slabs: these are not evicted meanwhile."""
        while self._unwritten and self._writing < max(1, self.store.slabs // 10) and now >= self._writes_from:
            stripe = self._unwritten.popleft()
            if not stripe.is_ready:
                self.counters["dropped"] += 1
                continue
            if stripe.record >= 0 or not len(stripe.header.tokens):
                continue
            record = self.store.new_record(stripe)
            self._has_records = record >= 0
            if not self._has_records:
                self._unwritten.appendleft(stripe)
                return
            self._writing += 1
            self._send("write", [stripe], partial(self._written, stripe, record, now), records=(record,))

    def _written(self, stripe: Stripe, record: int, now: float, failed: set[int], seconds: float) -> None:
        self._writing -= 1
        self.store.written(stripe, record, not failed)
        self._count("written", 1 - len(failed), seconds)
        self.counters["failed_writes"] += len(failed)
        self._failures = self._failures + 1 if failed else 0
        if self._failures == MAX_FAILURES:
            self._failures, self._writes_from = 0, now + WRITE_PAUSE_S

    def _link_snapshots(self, node: Node, stripes: Sequence[Stripe]) -> None:
        """Notes the snapshots on the path to `node` with the stripes, from the first on, at whose end they are."""
        for snapshot in (s for each in path(node) for s in each.snapshots):
            if (index := snapshot.tokens // self._stripes.tokens) <= len(stripes):
                stripes[index - 1].snapshot, snapshot.is_stored = snapshot, True

    def _attach_snapshots(self, node: Node | None, stripes: Sequence[Stripe]) -> None:
        """Lets prompts find the snapshots of stripes that are on the path to `node` again."""
        for stripe in stripes:
            if (snapshot := _snapshot(stripe)) is not None and snapshot.node is None:
                for of in [n for n in path(node) if n.depth < snapshot.tokens <= n.end]:
                    self._tables.tree.add_snapshot(of, snapshot)

    def _disk_hangs(self) -> bool:
        """Returns whether a read or write takes so long that no other should follow: its slab stays in use."""
        return any(m.kind in ("read", "write") and self._now - m.sent > STALL_S for m in self._in_flight.values())

    def _count(self, what: str, stripes: int, seconds: float) -> None:
        self.counters.update({f"{what}_bytes": stripes * self._stripe_bytes, f"{what}_seconds": seconds})  # type: ignore[dict-item]

    @contextmanager
    def _used(self, stripes: Sequence[Stripe]) -> Iterator[None]:
        for stripe in stripes:
            stripe.users += 1
        yield
        for stripe in stripes:
            stripe.users -= 1

    # ---- restores

    def restores(self, s: RequestState, free_slots: int, now: float) -> bool:
        """Returns whether a waiting request waits for its prefix; starts its restore if that is faster than prefill."""
        if self._waits_for_scans(s, now):
            return True
        if s.restore is None:
            waits = self._start_restore(s, free_slots, now)
            if s.restore is None:
                return waits  # there is no room, or others come first
        restore = s.restore
        assert restore is not None
        if not restore.is_done and now > restore.deadline:
            restore.is_done = True
            self.counters["late"] += 1
        if not restore.is_done and restore.is_read:
            restore.is_read = False
            hit = self._tables.tree.match(s.tokens, s.request.prefix_salt)
            found = max(self._find(s, hit, from_disk=False), key=attrgetter("saved_s"), default=None)
            restore.is_done = found is None or not self._load(s, found, hit, restore)
        return not restore.is_done

    def _waits_for_scans(self, s: RequestState, now: float) -> bool:
        """Returns whether nobody knows yet what is on disk, which is so for a moment after the start."""
        if self.store.records and len(s.tokens) > self._stripes.tokens:
            self._scans_due = min(self._scans_due, now + STALL_S)
            return now < self._scans_due
        return False

    def _start_restore(self, s: RequestState, free_slots: int, now: float) -> bool:
        """Starts the restore of a request, if that is faster than prefill; returns whether the request waits."""
        hit = self._tables.tree.match(s.tokens, s.request.prefix_salt)
        found = max(self._find(s, hit), key=attrgetter("saved_s", "end"), default=None)
        if found is None or found.saved_s <= 0:
            self.counters["queries"] += len(s.tokens) - hit.tokens
            s.restore = Restore(now, is_done=True)
            return False
        self._restores = [restore for restore in self._restores if not restore.is_done and now <= restore.deadline]
        if any(stripe.slab >= 0 and not stripe.is_ready for stripe in found.slabs):
            return True  # another request reads it
        own = {*found.stripes}
        if any(2 * len(own.intersection(r.loading)) > max(len(own), len(r.loading)) for r in self._restores):
            return True  # another request loads most of it, and little else
        if len(self._restores) >= free_slots:
            return self._fits(s, found, hit)
        restore = Restore(now + (max(found.prefill_s, found.restore_s) + GRACE_S if found.prefill_s else STALL_S))
        if not self._fits(s, found, hit):
            return False
        if records := [stripe for stripe in found.slabs if stripe.slab < 0]:
            self._read(found, records, restore, now)
        elif not self._load(s, found, hit, restore):
            return False
        s.restore = restore
        self.counters["queries"] += len(s.tokens) - hit.tokens
        self._restores.append(restore)
        return True

    def _find(self, s: RequestState, hit: PrefixHit, from_disk: bool = True) -> Iterator[Prefix]:
        """Yields the runs of stripes that continue the prefix in pages and save work: in slabs, then in records too."""
        size, prompt = self._stripes.tokens, s.tokens[:-1]
        before = self._tables.tree.last_snapshot(hit.node, hit.shared)
        at = max(self.prefill_start(hit.tokens), 0 if before is None else before.tokens)
        if s.request.sampling.prompt_logprobs is not None:
            return
        from_disk = from_disk and not self._disk_hangs()
        for start in range(self._stripes.layout.kvp):
            begin = hit.shared if start == hit.start else 0
            stripes: list[Stripe] = []
            ends: list[int] = []  # numbers of stripes: without any record, and all
            for key in self._hashes.keys(prompt, s.request.prefix_salt, start, begin // size):
                stripe = self.store.get(key)
                if stripe is None or not self._is_at_hand(stripe, from_disk):
                    break
                if not stripe.is_ready and not ends:
                    ends.append(len(stripes))
                stripes.append(stripe)
            for end in (*ends, len(stripes)):
                resume, parts = self.prefill_start(begin + end * size), list[Stripe]()
                for i in range(end, 0, -1) if self._snapshots.are_taken else ():
                    if begin + i * size <= resume:
                        break
                    is_here = _snapshot(stripes[i - 1]) is not None
                    parts = [] if is_here else self._stored_snapshot(stripes[i - 1], from_disk)
                    if is_here or parts:
                        end, resume = i, begin + i * size
                        break
                run = stripes[:end]
                if not run or resume <= at:
                    continue
                records = sum(stripe.slab < 0 for stripe in (*run, *parts))
                restore_s = self.start_s + (len(run) + len(parts)) * self._stripe_bytes / self._link_rate
                restore_s += records * self._stripe_bytes / self._disk_rate
                prefill_s = self._times.seconds(self._times.work(at, resume))
                yield Prefix(start, begin, begin + len(run) * size, run, parts, prefill_s, restore_s)

    def _read(self, found: Prefix, records: Sequence[Stripe], restore: Restore, now: float) -> None:
        """Reads the records of a prefix into slabs, as many as there are."""
        self.store.touch(found.slabs)
        with self._used(found.slabs):
            stripes = self.store.add([stripe.header for stripe in records])
        kept = [stripe for stripe in found.slabs if stripe.is_ready]  # not evicted before they are loaded
        for stripe in kept:
            stripe.users += 1
        left = len(stripes)

        def finish(part: Sequence[Stripe], failed: set[int], seconds: float) -> None:
            nonlocal left
            left -= len(part)
            for i, stripe in enumerate(part):
                self.store.filled(stripe, i not in failed)
                if i in failed and not stripe.users:
                    self.store.drop_record(stripe)
            self.counters["failed"] += bool(failed)
            self._count("read", len(part) - len(failed), seconds)
            restore.disk_tokens += (len(part) - len(failed)) * self._stripes.tokens
            if not left:
                restore.is_read = True
                if stripes:
                    rate = len(stripes) * self._stripe_bytes / max(self._now - now, 1e-6)
                    self._disk_rate += (rate - self._disk_rate) / 4
                for stripe in kept:
                    stripe.users -= 1

        for at in range(0, len(stripes), READ_STRIPES):
            part = stripes[at : at + READ_STRIPES]
            self._send("read", part, partial(finish, part), records=tuple(stripe.record for stripe in part))
        if not stripes:
            finish([], set(), 0.0)

    def _fits(self, s: RequestState, found: Prefix, hit: PrefixHit) -> bool:
        """Returns whether there are pages for a request whose prefix is restored."""
        pool = self._tables.pool
        need = self._stripes.pages_for(s.reserved) - self._stripes.columns(0, found.begin).stop
        shared = self._tables.tree.pages_of(found.hit(hit))[0]
        return need <= pool.available - pool.count_unused(shared)

    def _load(self, s: RequestState, found: Prefix, hit: PrefixHit, restore: Restore) -> bool:
        """Loads stripes in slabs into new pages; returns False if there are too few pages now."""
        if not self._fits(s, found, hit):
            return False
        tokens, stripes, parts, tables = s.tokens, found.stripes, found.parts, self._tables
        snapshot = self._snapshots.reserve(found.end) if parts else None
        if parts and snapshot is None:
            return False
        held, restore.loading = self._hold(s.request.prefix_salt, found.hit(hit), len(stripes)), stripes
        self.store.touch(found.slabs)
        for stripe in found.slabs:
            stripe.users += 1
        loaded, left = len(stripes), 1 + bool(parts)

        def finish(of: Sequence[Stripe], failed: set[int], seconds: float) -> None:
            nonlocal loaded, left
            left -= 1
            for stripe in of:
                stripe.users -= 1
            self.counters["failed"] += bool(failed)
            self._count("loaded", min(failed, default=len(of)), seconds)
            if not failed and seconds > 0:
                self._link_rate += (len(of) * self._stripe_bytes / seconds - self._link_rate) / 4
            if of is stripes:
                loaded = min(failed, default=loaded)
            if snapshot is not None and failed:
                snapshot.is_dropped = True
            if left:
                return
            self.counters["hits"] += loaded * self._stripes.tokens
            restore.tokens = 0 if restore.is_done else loaded * self._stripes.tokens
            restore.is_done = True
            tables.end_restore(held, tokens[: found.begin + loaded * self._stripes.tokens])
            if snapshot is not None:
                self._attach_restored(tables, snapshot, held.node, stripes[-1])
            self._attach_snapshots(held.node, stripes[:loaded])

        columns = self._stripes.columns(found.begin, found.end)
        self._send("load", stripes, partial(finish, stripes), pages=held.pages[columns])
        if snapshot is not None:
            self._send("load", parts, partial(finish, parts), snapshot=snapshot.index)
        return True

    def _attach_restored(self, tables: BlockTables, snapshot: Snapshot, node: Node | None, stripe: Stripe) -> None:
        """Lets prompts find a snapshot that came back, unless it or the pages before it did not."""
        snapshot.users -= 1
        of = next((n for n in path(node) if n.depth < snapshot.tokens <= n.end), None)
        if of is None or snapshot.is_dropped or any(s.tokens == snapshot.tokens for s in of.snapshots):
            tables.snapshots.cancel(snapshot)
            return
        tables.tree.add_snapshot(of, snapshot)
        if tables is self._tables:  # else a reset has dropped it
            stripe.snapshot, snapshot.is_stored = snapshot, True

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
        kind: MoveKind,
        stripes: Sequence[Stripe],
        finish: Callable[[set[int], float], None],
        pages: np.ndarray = NO_PAGES,
        records: tuple[int, ...] = (),
        snapshot: int = -1,
    ) -> None:
        number = next(self._numbers)
        slabs = np.array([stripe.slab for stripe in stripes], dtype=np.int32)
        headers = tuple(stripe.header for stripe in stripes) if records else ()
        if kind == "read":
            headers = tuple(replace(header, tokens=NO_PAGES) for header in headers)
        self._in_flight[number] = InFlightMove(kind, self._now, self._processes, finish)
        pages = pages.reshape(len(stripes), -1)
        self._outbox.append(StripeMove(number, kind, slabs, pages, records, headers, snapshot))


def _snapshot(stripe: Stripe) -> Snapshot | None:
    """Returns the snapshot at a stripe's end, if it is still stored."""
    return None if stripe.snapshot is None or stripe.snapshot.is_dropped else stripe.snapshot
