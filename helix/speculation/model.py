"""Drafts with a smaller model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from comm.base import Communicator
from helix.attention.dense import DenseAttention
from helix.engine.scheduler_output import BlockTableUpdate, NewRequest
from helix.kv_placement import KVPlacement, PromptChunk, Stripes
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.speculation.base import Draft, Drafter, check_states
from helix.speculation.draft_sampler import DraftSampler
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import KVCache, slot_bytes, without_long_rings
from helix.worker.kv_cache_spec import EngineSizes, KVCacheSpec, dtype_name, page_bytes
from helix.worker.sequence_observer import PrefillCommitted
from helix.worker.step import DecodeState

MAX_CATCH_UP_TOKENS = 1024  # tokens per prefill that catches up with steps without drafts


@dataclass(frozen=True)
class DraftModel:
    """This rank's shard of a draft model, which runs on the target's ranks in its own layout.

    Args:
        comm: over the target's ranks, with the kvp groups of `layout`.
        kv: the target's kv.dtype.
    """

    model: Decoder
    layout: HelixLayout
    comm: Communicator
    kv: str = "auto"

    def placement(self, target: KVPlacement) -> KVPlacement:
        """Returns its cache's placement: a page has the same tokens as the target's page of that number, or fewer."""
        page_size = target.stripes.page_tokens // self.layout.kvp
        append_block = math.gcd(target.append_block, page_size)
        return KVPlacement(self.layout, self.layout.kvp_rank(self.comm.rank), append_block, page_size)

    def page_bytes(self, target: KVPlacement) -> int:
        return sum(page_bytes(layer_specs, self.placement(target).page_size) for layer_specs in self.kv_cache_specs)

    @property
    def kv_cache_specs(self) -> list[tuple[KVCacheSpec, ...]]:
        specs = self.model.spec.kv_cache_specs(
            self.layout, self.comm.rank, dtype_name(self.model.weights.dtype), self.kv
        )
        return without_long_rings(specs)

    def slot_bytes(self, target: KVPlacement, sizes: EngineSizes) -> int:
        """Returns the bytes outside of pages on this rank, for these engine sizes."""
        return slot_bytes(self.kv_cache_specs, self.placement(target), draft_sizes(sizes))


class ModelDrafter(Drafter):
    """Decodes with the draft model, whose own cache uses the target's page numbers.

    The next step overwrites the KV of rejected drafts, as in the target's cache. A step begins with the last two
    tokens: if all drafts were accepted, the draft model has not computed the last one yet.

    Args:
        vocab: size of the target's vocabulary.
        target: placement of the target's cache.

    Raises:
        ValueError: vocabularies or ranks differ, or pages do not divide; on every rank.
    """

    may_lag = True
    wants_prefill_events = True

    def __init__(self, draft: DraftModel, vocab: int, target: KVPlacement, sizes: EngineSizes) -> None:
        super().__init__(sizes.drafts)
        model, layout, comm = draft.model, draft.layout, draft.comm
        check_draft(vocab, model.spec.vocab, layout, target.stripes)
        self.model = model
        self.policy = DenseAttention()
        self.comm = comm
        self.placement = draft.placement(target)
        self.cache = KVCache(draft.kv_cache_specs, self.placement, draft_sizes(sizes), comm.device)
        check_states(self.cache, "model")
        self.recomputed_tokens = self.cache.recomputed_tokens
        self.resumes_from_snapshots = not self.recomputed_tokens  # its own windows lack the tokens before
        # Lengths count only final tokens: later entries may be rejected drafts.
        max_pages = target.stripes.pages_for(sizes.length + sizes.drafts)
        self.sequences = DecodeState(sizes.slots, max_pages, self.placement, comm.device, rings=self.cache.rings)

    def admit(self, *admissions: NewRequest) -> None:
        # Sequences that share pages have the same start.
        starts = [replace(a, start=a.start % self.placement.layout.kvp) for a in admissions]
        self.sequences.admit(*starts)
        self.cache.admit(*starts)

    def write_tables(self, *tables: BlockTableUpdate) -> None:
        self.sequences.write_tables(*tables)

    def copy_pages(self, sources: Tensor, to: Tensor) -> None:
        self.cache.copy_pages(sources, to)

    def on_prefill(self, chunk: PrefillCommitted) -> None:
        self._prefill(chunk.prompts)

    def _prefill(self, prompts: Sequence[PromptChunk]) -> None:
        step = self.sequences.prefill_step(prompts)
        self.model.last_states(self.cache, step, self.policy)
        for prompt in prompts:
            self.sequences.lengths[prompt.slot].fill_(prompt.written[1])
        self.cache.on_prefill(
            PrefillCommitted(prompts, self.sequences.prompts_span(prompts), self.sequences.parts(prompts))
        )

    def catch_up(self, state: DecodeState) -> None:
        active, lengths, num_computed_tokens = (
            t.tolist() for t in (state.active, state.lengths, self.sequences.lengths)
        )
        # The next step begins with the last two tokens.
        while lagging := [
            row for row in range(len(active)) if active[row] and num_computed_tokens[row] < lengths[row] - 1
        ]:
            ends = {
                row: min(num_computed_tokens[row] + max(1, MAX_CATCH_UP_TOKENS // len(lagging)), lengths[row] - 1)
                for row in lagging
            }
            tokens = {row: state.history[row, num_computed_tokens[row] : end].long() for row, end in ends.items()}
            self._prefill([PromptChunk(row, num_computed_tokens[row], tokens[row].cpu()) for row in lagging])
            num_computed_tokens = [ends.get(row, at) for row, at in enumerate(num_computed_tokens)]

    @property
    def paged_tensors(self) -> list[Tensor]:
        return self.cache.paged_tensors

    def check(self, wait: bool = True) -> None:
        self.comm.check(wait)

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        rows, drafts = kind.rows, kind.drafts
        sequences, lengths, last = self.sequences, state.lengths[:rows], state.tokens[:rows, None]
        before = (lengths - 1).clamp(min=0)  # arbitrary in rows that do not decode
        sequences.active[:rows] = state.active[:rows]
        sequences.lengths[:rows] = before
        sequences.tokens[:rows] = state.history[:rows].gather(1, before[:, None])[:, 0]
        hidden = self.model.hidden(self.cache, sequences.decode_step(rows, last), self.policy).unflatten(0, (rows, 2))[
            :, 1
        ]
        sampler = DraftSampler(self.model.logits, self.model.embedding.rows, self.comm, False, kind)
        for n in range(1, drafts + 1):
            tokens = sampler.sample(hidden, state, lengths + n)
            if n < drafts:
                sequences.tokens[:rows] = tokens
                sequences.lengths[:rows] = lengths + n
                hidden = self.model.hidden(self.cache, sequences.decode_step(rows), self.policy)
        sequences.lengths[:rows] = lengths + 1
        return sampler.draft()


def draft_sizes(target: EngineSizes) -> EngineSizes:
    """Returns the draft model's sizes: its steps begin with the last two tokens, and its prefill also catches up."""
    return replace(target, drafts=target.drafts + 1, chunk=max(target.chunk, MAX_CATCH_UP_TOKENS), snapshots=0)


def check_draft(vocab: int, draft_vocab: int, layout: HelixLayout, target: Stripes) -> None:
    """Raises ValueError unless a draft model of this vocabulary and layout fits a target with these pages."""
    if draft_vocab != vocab:
        raise ValueError(
            f"the draft model has {draft_vocab} token ids and the target {vocab}: speculation.model must have the "
            "target's vocabulary (usually a model of the same family)"
        )
    if layout.world_size != (world_size := target.layout.world_size):
        raise ValueError(
            f"speculation.layout.kvp*tpa = {layout.kvp}*{layout.tpa} = {layout.world_size} ranks, but the target runs "
            f"on {world_size}: the draft model must use all of them (leave speculation.layout unset to derive it)"
        )
    if target.page_tokens % layout.kvp:
        raise ValueError(
            f"speculation.layout.kvp={layout.kvp} ranks cannot share the {target.page_tokens} tokens of a page evenly "
            f"(kv.page_size={target.page_size} on each of layout.kvp={target.layout.kvp}): set kv.page_size to a "
            f"multiple of {layout.kvp // math.gcd(layout.kvp, target.layout.kvp)}"
        )
