"""Drafting by one layer more, which reads the target's hidden states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helix.attention.dense import DenseAttention
from helix.engine.decision import Admission, TableWrite
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.placement import PromptChunk
from helix.speculation.base import Draft, Drafter
from helix.speculation.drawing import DraftDrawing
from helix.worker.follower import Begun, Prefilled, Taken
from helix.worker.graph_keys import StepKind
from helix.worker.keeps import EngineSizes
from helix.worker.kv_cache import KVCache
from helix.worker.step import DecodeState, Step
from helix.worker.transfers import to_device


class LayerDrafter(Drafter):
    """Drafter by a layer behind the target's last one, whose keys and values lie in the target's pages.

    Row i of the layer takes the target's state of token i and the token behind it, so that the last row of a prompt's
    chunk waits for the next token. A first draft comes from the row of the last token in the cache, a further one from
    a row that takes the layer's own state and the draft before. Once drafts are verified, the keys of all that were
    kept are written anew from the target's states. Nobody reads a state but the last one: of the other rows, and of
    prompts, only keys are computed.

    Args:
        layer: its part on this rank.
        model, cache: the target's.
        sizes: the engine's sizes.
        noise: shared: a draft is drawn with the target's noise of its position; own: see `DraftDrawing`.
    """

    reads_states = True
    follows_prompts = True

    def __init__(self, layer: DraftLayer, model: Decoder, cache: KVCache, sizes: EngineSizes, noise: str) -> None:
        super().__init__(sizes.drafts)
        # The last row of a hit belongs to the token after it: it is written again, of an exact state.
        self.lacking = cache.lacking + 1
        self.layer = layer
        self.comm = model.comm
        self.cache = cache
        self.noise = noise
        self.policy = DenseAttention()
        slots, placement, dtype = sizes.slots, cache.placement, model.weights.dtype
        most = placement.stripes.pages_for(sizes.length + sizes.drafts)
        self.sequences = DecodeState(slots, most, placement, cache.device, rings=cache.rings)
        # Its own, from which first drafts come; and the target's, of the last token of a prompt's chunk.
        self._states, self._ends = (
            torch.zeros(slots, width, dtype=dtype, device=cache.device) for width in (layer.width, layer.read)
        )
        self._read: dict[int, int] = {}  # tokens of a slot's prompt up to that one
        # What the rows of first drafts read, if further drafts read the same: see `Step.chosen`.
        width = min(layer.choice, most * placement.page_size)
        self._choice = tuple(
            torch.zeros(slots, *size, dtype=torch.int32, device=cache.device) for size in ((width,), (), ())
        )

    def admit(self, *admissions: Admission) -> None:
        self.sequences.admit(*admissions)
        for admission in admissions:
            self._read.pop(admission.slot, None)

    def write(self, *tables: TableWrite) -> None:
        self.sequences.write(*tables)

    def prefilled(self, chunk: Prefilled) -> None:
        assert chunk.states is not None
        counts = [len(p.tokens) for p in chunk.prompts]
        prompts, states = [], []
        for p, of_tokens in zip(chunk.prompts, chunk.states.split(counts), strict=True):
            known = max(p.known - 1, 0)  # rows of a hit, which states that lack their windows would spoil for all
            if self._read.get(p.slot) == p.begin:  # it goes on where a chunk ended
                states.append(self._ends[p.slot : p.slot + 1])
                prompts.append(PromptChunk(p.slot, p.begin - 1, p.tokens, known))
            elif len(p.tokens) > 1:
                prompts.append(PromptChunk(p.slot, p.begin, p.tokens[1:], known))
            states.append(of_tokens[:-1])
            self._read[p.slot] = p.end
        if prompts:
            step = replace(self.sequences.prefill_step(prompts), chooses=False)
            self.layer.append(self.cache, step, torch.cat(states), own=False)
        rows = to_device(torch.tensor(counts).cumsum(0) - 1, chunk.states.device)
        slots = to_device(torch.tensor([p.slot for p in chunk.prompts]), chunk.states.device)
        self._ends[slots] = chunk.states[rows]

    def begun(self, begun: Begun) -> None:
        own, slots = self.sequences, begun.slots
        own.active.fill_(False)
        own.active.index_fill_(0, slots, True)
        own.lengths[slots] = begun.lengths - 1
        own.tokens[slots] = begun.tokens
        states = torch.zeros_like(self._ends)
        states[slots] = begun.states
        step = own.decode_step(len(states))
        self._states[slots] = self._ahead(step, states)[slots]
        if self.layer.choice:
            assert step.chosen is not None
            for kept, of_rows in zip(self._choice, step.chosen, strict=True):
                kept[slots] = of_rows[slots]

    def catch_up(self, state: DecodeState) -> None:
        # Rows are all there; but sequences that only steps are timed with come without events.
        self.sequences.block_tables.copy_(state.block_tables)
        self.sequences.starts.copy_(state.starts)

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        rows, lengths = kind.rows, state.lengths[: kind.rows]
        drawing = DraftDrawing(self.layer.logits, self.layer.vocab_rows, self.comm, self.noise == "shared", kind)
        states = self._states[:rows]
        tokens = drawing.draw(states, state, lengths + 1)
        if kind.drafts > 1:
            ahead = state.steps_ahead(rows, kind.drafts - 1)
            choice = tuple(kept[:rows] for kept in self._choice)
            for n in range(kind.drafts - 1):
                step = ahead.step(n, tokens)
                states = self._ahead(step.reading(choice) if self.layer.choice else step, states, own=True)
                tokens = drawing.draw(states, state, lengths + n + 2)
        return drawing.draft()

    def takes(self, kind: StepKind) -> bool:
        return True

    def taken(self, step: Taken) -> None:
        rows, own = step.kind.rows, self.sequences
        own.active[:rows] = step.tokens[:, 0] >= 0
        own.lengths[:rows] = step.span.before
        own.tokens[:rows] = step.tokens[:, 0]
        verified = own.decode_step(rows, step.tokens[:, 1:] if step.kind.drafts else None)
        parts = self.layer.append(self.cache, verified, step.states, own=False)
        last = (step.span.after - step.span.before - 1).clamp(min=0)
        at = verified.slots * verified.max_q + last
        own.lengths[:rows] += last
        newest = own.decode_step(rows)
        self.policy.prepare(newest, {self.layer.window})
        if verified.chosen is not None:
            to = [kept[:rows] for kept in self._choice] if self.layer.choice else [None] * 3
            newest = newest.reading(
                tuple(torch.index_select(x, 0, at, out=of_rows) for x, of_rows in zip(verified.chosen, to, strict=True))
            )
        queries, x = (of_rows.index_select(0, at) for of_rows in parts)  # last: attention reads what is older early
        self._states[:rows] = self.layer.attend(queries, x, self.cache, newest, self.policy)

    def _ahead(self, step: Step, states: Tensor, own: bool = False) -> Tensor:
        self.policy.prepare(step, {self.layer.window})
        return self.layer.attend(*self.layer.append(self.cache, step, states, own=own), self.cache, step, self.policy)
