"""Prompt lookup: drafts continue the last earlier occurrence of a sequence's final tokens."""

from __future__ import annotations

import torch

from helix.engine.scheduler_output import NewRequest
from helix.speculation.base import Draft, Drafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.sequence_observer import FirstTokenSampled, RequestReleased
from helix.worker.step import DecodeState
from helix.worker.transfers import to_device
from kernels.tokens.suffix import TOKEN_BITS, SuffixPool, suffix


class SuffixDrafter(Drafter):
    """Prompt lookup in the sequence itself, and in a pool of finished answers to requests with the same cache_salt.

    Args:
        limit: maximum number of drafts per sequence and step.
        prompt_lookup_max: maximum number of final tokens to match.
        pool_tokens: size of the pool, a ring of tokens; 0: no pool.
        max_batch: number of rows.
    """

    def __init__(
        self,
        limit: int,
        prompt_lookup_max: int,
        pool_tokens: int = 0,
        max_batch: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(limit)
        self.prompt_lookup_max = prompt_lookup_max
        self.size = pool_tokens
        # The extra entry takes writes to discard.
        self._pool = torch.full((pool_tokens + 1,), -1, dtype=torch.int64, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._salts = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._admitted: dict[int, NewRequest] = {}
        self._decoding = torch.zeros(max_batch, dtype=torch.bool, device=device)

    def admit(self, *admissions: NewRequest) -> None:
        if not self.size:
            return
        self._admitted |= {a.slot: a for a in admissions}
        numbers = torch.tensor([(a.slot, a.cache_salt) for a in admissions], dtype=torch.int64)
        slots, salts = to_device(numbers.T.contiguous(), self._salts.device)
        self._decoding.index_fill_(0, slots, False)
        self._salts.index_copy_(0, slots, salts)

    def on_first_token(self, begun: FirstTokenSampled) -> None:
        if self.size:
            self._decoding.index_fill_(0, begun.slots, True)

    def release(self, *released: RequestReleased) -> None:
        if self.size:
            for one in released:
                self._add_to_pool(one)

    def _add_to_pool(self, released: RequestReleased) -> None:
        """Adds a finished sequence to the shared pool that suffix lookup searches."""
        admission = self._admitted.pop(released.slot)
        begun = self._decoding[released.slot]  # else `length` is still the previous sequence's
        # Include the end of the prompt, which precedes the answer; -1 ends the answer.
        first = max(admission.length - self.prompt_lookup_max, 0)
        offsets = torch.arange(min(admission.limit + 2 - first, self.size), device=released.length.device)
        count = (released.length + 1 - first).clamp(max=len(offsets) - 1)
        token_ids = released.history[first : first + len(offsets)].long() + (admission.cache_salt << TOKEN_BITS)
        to = torch.where((offsets <= count) & begun, (self._cursor + offsets) % self.size, self.size)
        self._pool[to] = torch.where(offsets < count, token_ids, -1)
        self._cursor.copy_((self._cursor + (count + 1) * begun) % self.size)

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        rows = slice(0, kind.rows)
        pool = SuffixPool(self._pool[: self.size], self._cursor, self._salts[rows]) if self.size else None
        return Draft(suffix(state.history[rows], state.lengths[rows] + 1, pool, kind.drafts, self.prompt_lookup_max))
