"""A second, smaller model proposes: what it would say next is what the target most likely says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from comm.base import Communicator
from helix.attention.dense import DenseAttention
from helix.events.decision import Admission, StepKind, TableWrite
from helix.events.follower import Prefilled
from helix.layout import HelixLayout
from helix.memory.keeps import Keeps, page_bytes
from helix.memory.kv_cache import KVCache, slot_bytes
from helix.models import Decoder
from helix.placement import Placement, PromptChunk, Stripes
from helix.speculation.base import Draft, Drafter
from helix.speculation.drawing import DraftDrawing
from helix.steps.step import DecodeState

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

    def placement(self, target: Placement) -> Placement:
        """Where its cache has tokens: a page number holds the same ones as in the target's cache, or fewer."""
        page_size = target.stripes.page_tokens // self.layout.kvp
        append_block = math.gcd(target.append_block, page_size)
        return Placement(self.layout, self.layout.kvp_rank(self.comm.rank), append_block, page_size)

    def page_bytes(self, target: Placement) -> int:
        """Bytes of a page on this rank."""
        return sum(page_bytes(kept, self.placement(target).page_size) for kept in self.keeps)

    @property
    def keeps(self) -> list[tuple[Keeps, ...]]:
        """What each of its layers keeps on this rank."""
        return self.model.spec.keeps(self.layout, self.comm.rank, self.model.weights.dtype)

    def slot_bytes(self, target: Placement, max_batch: int, drafts: int, chunk: int) -> int:
        """Counts the bytes of all that is not in pages on this rank."""
        return slot_bytes(self.keeps, self.placement(target), max_batch, rows(drafts), max(chunk, CHUNK))


class ModelDrafter(Drafter):
    """Decodes with the draft model from where the target is; its own cache holds the same tokens in the same pages.

    What a step appends of drafts that the target then refuses is overwritten by the next, as in the target's cache:
    lengths are the target's. A step begins with the last two tokens, since where all drafts were kept, the last of
    them has not been through the draft model yet.

    Args:
        limit: the most tokens proposed for each sequence and step.
        vocab: the target's number of token ids.
        max_batch, max_length: the engine's.
        target: where the target's cache has tokens.
        pages: of the target's cache.
        chunk: tokens of a prefill step, at most.

    Raises:
        ValueError: the vocabularies differ, or the ranks, or pages do not divide; alike on every rank.
    """

    lags = True

    def __init__(
        self,
        draft: DraftModel,
        limit: int,
        *,
        vocab: int,
        max_batch: int,
        max_length: int,
        target: Placement,
        pages: int,
        chunk: int,
    ) -> None:
        super().__init__(limit)
        model, layout, comm = draft.model, draft.layout, draft.comm
        check_draft(vocab, model.spec.vocab, layout, target.stripes)
        self.model = model
        self.policy = DenseAttention()
        self.comm = comm
        self.placement = draft.placement(target)
        self.cache = KVCache(
            draft.keeps, pages, self.placement, comm.device, slots=max_batch, rows=rows(limit), chunk=max(chunk, CHUNK)
        )
        self.lacking = self.cache.lacking
        # Its lengths count the tokens that are certain: those behind may have been refused.
        most = target.stripes.pages_for(max_length + limit)
        self.sequences = DecodeState(max_batch, most, self.placement, comm.device, rings=self.cache.rings)

    def admit(self, admission: Admission) -> None:
        # Sequences that share pages have one start.
        admission = replace(admission, start=admission.start % self.placement.layout.kvp)
        self.sequences.admit(admission)
        self.cache.admit(admission)

    def write(self, table: TableWrite) -> None:
        self.sequences.write(table)

    def copy(self, sources: Tensor, to: Tensor) -> None:
        self.cache.copy(sources, to)

    def prefilled(self, chunk: Prefilled) -> None:
        self._read(chunk.prompts)

    def _read(self, prompts: Sequence[PromptChunk]) -> None:
        step = self.sequences.prefill_step(prompts)
        hidden = self.model.hidden(self.cache, step, self.policy)
        for prompt in prompts:
            self.sequences.lengths[prompt.slot].fill_(prompt.written[1])
        self.cache.prefilled(Prefilled(prompts, self.sequences.prompts_span(step, prompts), step.parts, hidden))

    def catch_up(self, state: DecodeState) -> None:
        active, lengths, known = (t.tolist() for t in (state.active, state.lengths, self.sequences.lengths))
        # Without the last two tokens, with which the next step begins.
        while behind := [row for row in range(len(active)) if active[row] and known[row] < lengths[row] - 1]:
            ends = {row: min(known[row] + max(1, CHUNK // len(behind)), lengths[row] - 1) for row in behind}
            tokens = {row: state.history[row, known[row] : end].long() for row, end in ends.items()}
            self._read([PromptChunk(row, known[row], tokens[row].cpu()) for row in behind])
            known = [ends.get(row, at) for row, at in enumerate(known)]

    def check(self, wait: bool = True) -> None:
        self.comm.check(wait)

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        rows, drafts = kind.rows, kind.drafts
        own, lengths, last = self.sequences, state.lengths[:rows], state.tokens[:rows, None]
        before = (lengths - 1).clamp(min=0)  # of rows that do not decode, whatever is there
        own.active[:rows] = state.active[:rows]
        own.lengths[:rows] = before
        own.tokens[:rows] = state.history[:rows].gather(1, before[:, None])[:, 0]
        hidden = self.model.hidden(self.cache, own.decode_step(rows, last), self.policy).unflatten(0, (rows, 2))[:, 1]
        drawing = DraftDrawing(self.model, self.comm, False, kind)
        for n in range(1, drafts + 1):
            tokens = drawing.draw(hidden, state, lengths + n)
            if n < drafts:
                own.tokens[:rows] = tokens
                own.lengths[:rows] = lengths + n
                hidden = self.model.hidden(self.cache, own.decode_step(rows), self.policy)
        own.lengths[:rows] = lengths + 1
        return drawing.draft()


def rows(drafts: int) -> int:
    """Counts the tokens of a step, and of those behind it that may be refused: it begins with the last two."""
    return drafts + 2


def check_draft(vocab: int, draft_vocab: int, layout: HelixLayout, target: Stripes) -> None:
    """Raises ValueError unless a draft model of this vocabulary and layout can propose to a target with such pages."""
    if draft_vocab != vocab:
        raise ValueError(
            f"the draft model has {draft_vocab} token ids and the target {vocab}: speculation.model must be a model of "
            "the target's vocabulary (of the same family, mostly)"
        )
    if layout.world_size != (world_size := target.layout.world_size):
        raise ValueError(
            f"speculation.layout.kvp*tpa = {layout.kvp}*{layout.tpa} = {layout.world_size} ranks, but the target runs "
            f"on {world_size}: the draft model needs all of them (leave speculation.layout unset to derive it)"
        )
    if target.page_tokens % layout.kvp:
        raise ValueError(
            f"speculation.layout.kvp={layout.kvp} ranks cannot share the {target.page_tokens} tokens of a page evenly "
            f"(kv.page_size={target.page_size} on each of layout.kvp={target.layout.kvp}): set kv.page_size to a "
            f"multiple of {layout.kvp // math.gcd(layout.kvp, target.layout.kvp)}"
        )
