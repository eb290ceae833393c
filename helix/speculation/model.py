"""A second, smaller model proposes: what it would say next is what the target most likely says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from comm.base import Communicator
from helix.attention.dense import DenseAttention
from helix.kv_cache import KVCache, Placement, pages_for_tokens, token_bytes
from helix.layout import HelixLayout
from helix.models import Decoder
from helix.scheduler import Admission
from helix.speculation.base import Draft, Drafter
from helix.speculation.drawing import DraftDrawing
from helix.step import DecodeState

CHUNK = 1024  # the most tokens in one pass that makes up for steps without drafts


@dataclass(frozen=True)
class DraftModel:
    """This rank's part of a draft model: the same ranks as the target's in a layout of its own.

    Args:
        comm: over the same ranks as the target's, with the kvp groups of `layout`.
    """

    model: Decoder
    layout: HelixLayout
    comm: Communicator

    def pages(self, tokens: int, append_block: int, page_size: int, max_batch: int) -> int:
        """Pages that are enough for any `max_batch` sequences of `tokens` tokens in all."""
        return pages_for_tokens(self.layout, tokens, append_block, page_size, max_batch)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV on the rank that stores the token."""
        spec = self.model.spec
        return token_bytes(spec.layers, spec.entries(self.layout, self.comm.rank), self.model.weights.dtype)


class ModelDrafter(Drafter):
    """Decodes with the draft model from where the target is; its own cache holds the same tokens as the target's.

    What a step appends of drafts that the target then refuses is overwritten by the next, as in the target's cache:
    lengths are the target's. A step begins with the last two tokens, since where all drafts were kept, the last of
    them has not been through the draft model yet.

    Args:
        limit: the most tokens proposed for each sequence and step.
        vocab: the target's number of token ids.
        max_batch, max_length, token_budget: the engine's: whatever it admits has room.
        append_block, page_size: of the draft model's cache.

    Raises:
        ValueError: the vocabularies differ, or the ranks; alike on every rank.
    """

    def __init__(
        self,
        draft: DraftModel,
        limit: int,
        *,
        vocab: int,
        max_batch: int,
        max_length: int,
        token_budget: int,
        append_block: int,
        page_size: int,
    ) -> None:
        super().__init__(limit)
        model, layout, comm = draft.model, draft.layout, draft.comm
        check_draft(vocab, comm.world_size, model.spec.vocab, layout)
        self.model = model
        self.policy = DenseAttention()
        self.comm = comm
        self.placement = Placement(layout, layout.kvp_rank(comm.rank), append_block, page_size)
        pages = draft.pages(token_budget, append_block, page_size, max_batch)
        entries = model.spec.entries(layout, comm.rank)
        self.cache = KVCache(model.spec.layers, pages, page_size, entries, model.weights.dtype, comm.device)
        most = max(self.placement.pages(max_length + limit, start) for start in range(layout.kvp))
        # Its lengths count the tokens that are certain: those behind may have been refused.
        self.sequences = DecodeState(max_batch, most, self.placement, comm.device)
        self._pages: dict[int, list[int]] = {}
        self._admissions = 0

    def admit(self, admission: Admission) -> None:
        start = self._admissions % self.placement.layout.kvp
        self._admissions += 1
        pages = self.cache.take(self.placement.pages(admission.reserved, start))
        self._pages[admission.slot] = pages
        self.sequences.admit(admission.slot, start, np.array(pages, dtype=np.int32), admission.limit, admission.prompt)

    def retire(self, slot: int) -> None:
        self.cache.give_back(self._pages.pop(slot))

    def prefill(self, state: DecodeState, segments: list[tuple[int, int, Tensor]]) -> None:
        self.model.hidden(self.cache, self.sequences.prefill_step(segments), self.policy)
        for row, begin, tokens in segments:
            self.sequences.lengths[row] = begin + len(tokens)

    def catch_up(self, state: DecodeState) -> None:
        active, lengths, known = (t.tolist() for t in (state.active, state.lengths, self.sequences.lengths))
        # Without the last two tokens, with which the next step begins.
        while behind := [row for row in self._pages if active[row] and known[row] < lengths[row] - 1]:
            ends = {row: min(known[row] + max(1, CHUNK // len(behind)), lengths[row] - 1) for row in behind}
            tokens = {row: state.history[row, known[row] : end].long() for row, end in ends.items()}
            self.prefill(state, [(row, known[row], tokens[row]) for row in behind])
            known = [ends.get(row, at) for row, at in enumerate(known)]

    def check(self, wait: bool = True) -> None:
        self.comm.check(wait)

    def propose(self, state: DecodeState, rows: int, drafts: int, stochastic: bool, filtered: bool) -> Draft:
        own, lengths, last = self.sequences, state.lengths[:rows], state.tokens[:rows, None]
        before = (lengths - 1).clamp(min=0)  # of rows that do not decode, whatever is there
        own.active[:rows] = state.active[:rows]
        own.lengths[:rows] = before
        own.tokens[:rows] = state.history[:rows].gather(1, before[:, None])[:, 0]
        hidden = self.model.hidden(self.cache, own.decode_step(rows, last), self.policy).unflatten(0, (rows, 2))[:, 1]
        drawing = DraftDrawing(self.model, self.comm, False, stochastic, filtered)
        for n in range(1, drafts + 1):
            tokens = drawing.draw(hidden, state, lengths + n)
            if n < drafts:
                own.tokens[:rows] = tokens
                own.lengths[:rows] = lengths + n
                hidden = self.model.hidden(self.cache, own.decode_step(rows), self.policy)
        own.lengths[:rows] = lengths + 1
        return drawing.draft()


def check_draft(vocab: int, world_size: int, draft_vocab: int, layout: HelixLayout) -> None:
    """Raises ValueError unless a draft model of this vocabulary and layout can propose to a target over these ranks."""
    if draft_vocab != vocab:
        raise ValueError(
            f"the draft model has {draft_vocab} token ids and the target {vocab}: speculation.model must be a model of "
            "the target's vocabulary (of the same family, mostly)"
        )
    if layout.world_size != world_size:
        raise ValueError(
            f"speculation.layout.kvp*tpa = {layout.kvp}*{layout.tpa} = {layout.world_size} ranks, but the target runs "
            f"on {world_size}: the draft model needs all of them (leave speculation.layout unset to derive it)"
        )
