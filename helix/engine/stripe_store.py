"""Directory of the stripes of prefixes that lie in host memory, on rank 0's host only.

A stripe (`helix.kv_placement`) is found by its chain hash: sha256 of its tokens and of the hash of the stripe before
it; the first one follows a root that depends on the salt and on the kvp rank of the first block, as in
`helix.engine.prefix`. The directory is flat: a prefix is as long as the run of stripes, from its first on, that are
either in pages or here.

A slab holds one stripe's share of each rank; slab i of all ranks belongs to the same stripe. The least recently used
stripe leaves first. Stripes of one use leave deepest first, so that the rest is still a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

MAX_CHAINS = 32  # prompts whose hashes are remembered


@dataclass(eq=False, slots=True)
class Stripe:
    """A stripe in host memory.

    Attributes:
        slab: -1: none.
        is_ready: whether the slab is filled on all ranks.
        users: moves in flight that read or fill the slab, which is not evicted meanwhile.
    """

    key: bytes
    slab: int = -1
    is_ready: bool = False
    users: int = 0


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

    def keys(self, tokens: np.ndarray, cache_salt: Hashable, start: int) -> Iterator[bytes]:
        """Yields the hashes of the whole stripes of `tokens`, int32 [n], in order, and computes no more than it yields.

        Its caller may stop early; the hashes so far are remembered.
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
        for i in range(count):
            if i == len(keys):
                keys.append(sha256(keys[-1] + tokens[i * size : (i + 1) * size].tobytes()).digest())
            yield keys[i]


class StripeStore:
    """Which stripes lie in which slabs.

    Args:
        slabs: number of slabs of each rank.
    """

    def __init__(self, slabs: int) -> None:
        self.slabs = slabs
        self._free = [*range(slabs - 1, -1, -1)]
        self._stripes: OrderedDict[bytes, Stripe] = OrderedDict()  # least recently used first

    @property
    def used(self) -> int:
        return self.slabs - len(self._free)

    def get(self, key: bytes) -> Stripe | None:
        return self._stripes.get(key)

    def touch(self, stripes: Sequence[Stripe]) -> None:
        """Marks the stripes of a prefix, in order, as used now."""
        for stripe in reversed(stripes):
            self._stripes.move_to_end(stripe.key)

    def add(self, keys: Sequence[bytes]) -> list[Stripe]:
        """Gives slabs to new stripes, deepest last, and to as many of them as there are slabs without users.

        Each has one user, which fills it.
        """
        stripes = []
        for key in keys:
            if not self._free and not self._evict():
                break
            stripe = self._stripes[key] = Stripe(key, self._free.pop(), users=1)
            stripes.append(stripe)
        self.touch(stripes)
        return stripes

    def drop(self, stripe: Stripe) -> None:
        """Forgets a stripe without users."""
        assert not stripe.users, "a slab in use cannot be given to another stripe"
        del self._stripes[stripe.key]
        self._free.append(stripe.slab)
        stripe.slab, stripe.is_ready = -1, False

    def _evict(self) -> bool:
        victim = next((stripe for stripe in self._stripes.values() if not stripe.users), None)
        if victim is not None:
            self.drop(victim)
        return victim is not None
