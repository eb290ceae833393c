"""Prompt lookup: drafts continue the last earlier occurrence of a sequence's final tokens."""

from __future__ import annotations

import torch

from helix.engine.decision import Admission
from helix.speculation.base import Draft, Drafter
from helix.worker.follower import Begun, Retired
from helix.worker.graph_keys import StepKind
from helix.worker.step import DecodeState
from helix.worker.transfers import to_device
from kernels.tokens.suffix import TOKEN_BITS, OtherTexts, suffix


class SuffixDrafter(Drafter):
    """Drafter by prompt lookup in a sequence, and in texts that were generated for others of the same salt.

    Args:
        limit: most tokens proposed per sequence and step.
        longest: most final tokens of a sequence that are searched for.
        remembered: most tokens of others; the oldest ones are forgotten. 0: nothing is kept of any sequence.
        max_batch: number of slots, of which salts are kept.
        device: where all this is kept.
    """

    def __init__(
        self, limit: int, longest: int, remembered: int = 0, max_batch: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(limit)
        self.longest = longest
        self.size = remembered
        # An entry more for what is not to be written.
        self._others = torch.full((remembered + 1,), -1, dtype=torch.int64, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._salts = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._admitted: dict[int, Admission] = {}
        self._decoding = torch.zeros(max_batch, dtype=torch.bool, device=device)

    def admit(self, *admissions: Admission) -> None:
        if not self.size:
            return
        self._admitted |= {a.slot: a for a in admissions}
        numbers = torch.tensor([(a.slot, a.salt) for a in admissions], dtype=torch.int64)
        slots, salts = to_device(numbers.T.contiguous(), self._salts.device)
        self._decoding.index_fill_(0, slots, False)
        self._salts.index_copy_(0, slots, salts)

    def begun(self, begun: Begun) -> None:
        if self.size:
            self._decoding.index_fill_(0, begun.slots, True)

    def retire(self, *gone: Retired) -> None:
        if self.size:
            for one in gone:
                self._keep(one)

    def _keep(self, gone: Retired) -> None:
        """Stores the text of a sequence that leaves behind those of others."""
        admission = self._admitted.pop(gone.slot)
        begun = self._decoding[gone.slot]  # else what its length says is another sequence's
        # The end of the prompt leads to the answer, and -1 ends it.
        first = max(admission.length - self.longest, 0)
        place = torch.arange(min(admission.limit + 2 - first, self.size), device=gone.length.device)
        count = (gone.length + 1 - first).clamp(max=len(place) - 1)
        text = gone.history[first : first + len(place)].long() + (admission.salt << TOKEN_BITS)
        to = torch.where((place <= count) & begun, (self._cursor + place) % self.size, self.size)
        self._others[to] = torch.where(place < count, text, -1)
        self._cursor.copy_((self._cursor + (count + 1) * begun) % self.size)

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        rows = slice(0, kind.rows)
        others = OtherTexts(self._others[: self.size], self._cursor, self._salts[rows]) if self.size else None
        return Draft(suffix(state.history[rows], state.lengths[rows] + 1, others, kind.drafts, self.longest))
