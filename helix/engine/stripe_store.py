"""Directory of the stripes of prefixes that lie in host memory and on disk, on rank 0's host only.

A stripe (`helix.kv_placement`) is found by its chain hash: sha256 of its tokens and of the hash of the stripe before
it; the first one follows a root that depends on the salt and on the kvp rank of the first block, as in
`helix.engine.prefix`. The directory is flat: a prefix is as long as the run of stripes, from its first on, that are
either in pages or here.

A slab holds one stripe's share of each rank; slab i of all ranks belongs to the same stripe, and so does record i of
their files. A snapshot of states and windows takes several slabs: its parts are kept as stripes that continue its
prefix with tokens that do not exist, -1, -2 and so on. The least recently used stripe leaves first. Stripes of one use
leave deepest first, so that the rest is still a prefix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from helix.engine.prefix import Snapshot
from helix.engine.scheduler_output import StripeHeader
from helix.kv_placement import NO_PAGES

MAX_CHAINS = 32  # prompts whose hashes are remembered


@dataclass(eq=False, slots=True)
class Stripe:
    """A stripe in host memory, on disk, or both.

    Attributes:
        header: what a record of it holds; without tokens, it was found on disk.
        slab, record: -1: none.
        is_ready: whether the slab is filled on all ranks.
        snapshot: the one at its end on the GPU or in its host memory, if any.
        parts: headers of the parts of the one at its end, once they were asked for.
        users: moves in flight that use the slab or the record, which are not evicted meanwhile.
    """

    header: StripeHeader
    slab: int = -1
    record: int = -1
    is_ready: bool = False
    snapshot: Snapshot | None = None
    parts: list[StripeHeader] | None = None
    users: int = 0

    @property
    def key(self) -> bytes:
        return self.header.key


class ChainHashes:
    """Chain hashes of the stripes of prompts; a prompt that continues an earlier one hashes only its new stripes.

    Args:
        tokens: tokens per stripe.
        seed: what the roots depend on besides salt and start.
    """

    def __init__(self, tokens: int, seed: bytes = b"") -> None:
        self._tokens, self._seed = tokens, seed
        self._recent: OrderedDict[bytes, tuple[np.ndarray, list[bytes]]] = OrderedDict()  # by hash of the first stripe

    def root(self, cache_salt: Hashable, start: int) -> bytes:
        """Returns the hash before the first stripe; the same in every process, for salts of texts and numbers."""
        return sha256(self._seed + repr((cache_salt, start)).encode()).digest()

    def keys(self, tokens: np.ndarray, cache_salt: Hashable, start: int, begin: int = 0) -> Iterator[bytes]:
        """Yields the hashes of the whole stripes of `tokens`, int32 [n], in order, from stripe `begin` on.

        Its caller may stop early: it computes no more than it yields, and these are remembered.
        """
        size, count = self._tokens, len(tokens) // self._tokens
        if not count:
            return
        first = sha256(self.root(cache_salt, start) + tokens[:size].tobytes()).digest()
        known, keys = self._recent.pop(first, (tokens, [first]))
        limit = min(len(keys), count) * size
        differ = np.flatnonzero(known[:limit] != tokens[:limit])
        same = (int(differ[0]) if len(differ) else limit) // size
        if same < count:  # it goes on differently, or further
            known, keys = tokens, keys[:same]
        self._recent[first] = known, keys
        if len(self._recent) > MAX_CHAINS:
            self._recent.popitem(last=False)
        for i in range(begin, count):
            while len(keys) <= i:
                at = len(keys) * size
                keys.append(sha256(keys[-1] + tokens[at : at + size].tobytes()).digest())
            yield keys[i]


def snapshot_headers(stripe: StripeHeader, count: int, tokens: int, has_disk: bool) -> list[StripeHeader]:
    """Returns the headers of the `count` parts of the snapshot at the end of a stripe of `tokens` tokens."""
    headers, parent = list[StripeHeader](), stripe.key
    for i in range(count):
        marks = np.full(tokens, -1 - i, dtype=np.int32)
        key = sha256(parent + marks.tobytes()).digest()
        depth = stripe.depth + tokens + i
        headers.append(StripeHeader(key, parent, 0, stripe.start, depth, marks if has_disk else NO_PAGES))
        parent = key
    return headers


class StripeStore:
    """Which stripes lie in which slabs and records.

    Args:
        slabs, records: number of each on every rank.
    """

    def __init__(self, slabs: int, records: int = 0) -> None:
        self.slabs, self.records = slabs, records
        self._free = [*range(slabs - 1, -1, -1)]
        self._free_records: list[int] = []  # until ranks have said what their files hold
        self._stripes: dict[bytes, Stripe] = {}
        self._in_slabs, self._in_records = OrderedDict[bytes, Stripe](), OrderedDict[bytes, Stripe]()  # by last use
        self._generation = 0

    @property
    def used(self) -> int:
        """Slabs in use."""
        return self.slabs - len(self._free)

    @property
    def free(self) -> int:
        """Slabs that are not in use."""
        return len(self._free)

    @property
    def used_records(self) -> int:
        return len(self._in_records)

    def get(self, key: bytes) -> Stripe | None:
        return self._stripes.get(key)

    def touch(self, stripes: Sequence[Stripe]) -> None:
        """Marks the stripes of a prefix, in order, as used now."""
        for stripe in reversed(stripes):
            if stripe.slab >= 0:
                self._in_slabs.move_to_end(stripe.header.key)
            if stripe.record >= 0:
                self._in_records.move_to_end(stripe.header.key)

    def add(self, headers: Sequence[StripeHeader]) -> list[Stripe]:
        """Gives slabs to stripes without one, as far as there are slabs without users; returns those that got one.

        Each has one user, which fills it.
        """
        stripes = []
        for header in headers:
            if not self._free and not self._evict_slab():
                break
            stripe = self._stripes.setdefault(header.key, Stripe(header))
            assert stripe.slab < 0, "a stripe has one slab"
            stripe.slab = self._free.pop()
            stripe.users += 1
            self._in_slabs[stripe.key] = stripe
            stripes.append(stripe)
        self.touch(stripes)
        return stripes

    def filled(self, stripe: Stripe, is_ready: bool) -> None:
        """Ends the filling of a slab, which is given back if it failed."""
        stripe.users -= 1
        stripe.is_ready = is_ready
        if not is_ready:
            self._drop_slab(stripe)

    def _drop_slab(self, stripe: Stripe) -> None:
        assert not stripe.users, "a slab in use cannot be given to another stripe"
        del self._in_slabs[stripe.key]
        self._free.append(stripe.slab)
        stripe.slab, stripe.is_ready = -1, False
        self._forget(stripe)

    def _evict_slab(self) -> bool:
        victim = next((stripe for stripe in self._in_slabs.values() if not stripe.users), None)
        if victim is not None:
            self._drop_slab(victim)
        return victim is not None

    def _forget(self, stripe: Stripe) -> None:
        if stripe.slab < 0 and stripe.record < 0:
            del self._stripes[stripe.key]
            if stripe.snapshot is not None:
                stripe.snapshot.is_stored = False

    # ---- records

    def new_record(self, stripe: Stripe) -> int:
        """Returns a record to write a stripe to; -1 if all are in use."""
        if not self._free_records:
            victim = next((one for one in self._in_records.values() if not one.users), None)
            if victim is None:
                return -1
            self.drop_record(victim)
        self._generation += 1
        stripe.header = replace(stripe.header, generation=self._generation)
        stripe.users += 1
        return self._free_records.pop()

    def written(self, stripe: Stripe, record: int, is_written: bool) -> None:
        """Ends a write: a record is found only after all ranks have written it."""
        stripe.users -= 1
        if is_written:
            stripe.record = record
            self._in_records[stripe.key] = stripe
        else:
            self._free_records.append(record)

    def forget_snapshots(self) -> None:
        """Forgets the snapshots outside slabs, which are not valid any more."""
        for stripe in self._stripes.values():
            stripe.snapshot = None

    def drop_record(self, stripe: Stripe) -> None:
        del self._in_records[stripe.key]
        self._free_records.append(stripe.record)
        stripe.record = -1
        self._forget(stripe)

    def restore_records(self, scans: Sequence[Sequence[tuple[int, StripeHeader]]]) -> None:
        """Lists the records that all ranks have found, without those whose prefix is incomplete.

        Args:
            scans: by process, (record, header).
        """
        counts = Counter((record, header.key, header.generation) for scan in scans for record, header in scan)
        known = set[bytes]()
        free = set(range(self.records))
        for record, header in sorted(scans[0], key=lambda found: (found[1].depth, -found[1].generation)):
            self._generation = max(self._generation, header.generation)
            is_prefix = not header.depth or header.parent in known
            if counts[record, header.key, header.generation] < len(scans) or not is_prefix or header.key in known:
                continue
            known.add(header.key)
            stripe = self._stripes.setdefault(header.key, Stripe(header))
            if stripe.record < 0 and record in free:
                stripe.header = replace(stripe.header, generation=header.generation)
                stripe.record = record
                free.remove(record)
                self._in_records[header.key] = stripe
                self._in_records.move_to_end(header.key, last=False)  # the deepest leave first
        self._generation = max([self._generation, *(header.generation for scan in scans for _, header in scan)])
        self._free_records = sorted(free, reverse=True)
