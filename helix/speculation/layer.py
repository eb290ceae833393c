"""Drafts with an additional layer that reads the target's hidden states (MTP, EAGLE-3)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helix.attention.dense import DenseAttention
from helix.engine.scheduler_output import BlockTableUpdate, NewRequest
from helix.kv_placement import PromptChunk
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.speculation.base import Draft, Drafter
from helix.speculation.draft_sampler import DraftSampler
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.sequence_observer import FirstTokenSampled, PrefillCommitted, StepCommitted
from helix.worker.step import DecodeState, Step
from helix.worker.transfers import to_device


class LayerDrafter(Drafter):
    """Drafts with a layer on top of the target's last one, with its KV in the target's pages.

    Row i of the layer reads the target's state of token i and token i + 1, so the last row of a prompt chunk waits for
    the next token. The first draft comes from the row of the last token in the cache, later ones from the layer's own
    state and the previous draft. After verification, the KV of accepted tokens is rewritten from the target's states.
    Only the last state is used: for other rows, and for prompts, the layer computes only KV.

    Args:
        model, cache: the target's.
        noise: shared: drafts use the target's noise; own: see `DraftSampler`.
    """

    needs_hidden_states = True
    wants_prefill_events = True

    def __init__(self, layer: DraftLayer, model: Decoder, cache: KVCache, sizes: EngineSizes, noise: str) -> None:
        super().__init__(sizes.drafts)
        # The last row of a prefix hit depends on the token after it, and is recomputed from an exact state.
        self.recomputed_tokens = cache.recomputed_tokens + 1
        self.layer = layer
        self.comm = model.comm
        self.cache = cache
        self.noise = noise
        self.policy = DenseAttention()
        slots, placement, dtype = sizes.slots, cache.placement, model.weights.dtype
        max_pages = placement.stripes.pages_for(sizes.length + sizes.drafts)
        self.sequences = DecodeState(slots, max_pages, placement, cache.device, rings=cache.rings)
        # The layer's states, for first drafts; and the target's, of the last token of a prompt chunk.
        self._states = torch.zeros(slots, layer.width, dtype=dtype, device=cache.device)
        self._prompt_states = cache.layer(len(model.spec.layers)).tensors["target_state"][:slots]
        self._num_read: dict[int, int] = {}  # prompt tokens up to that one, by slot
        # The first drafts' selection, which later drafts reuse: see `Step.selected`.
        width = min(layer.shared_topk, max_pages * placement.page_size)
        self._selected = tuple(
            torch.zeros(slots, *size, dtype=torch.int32, device=cache.device) for size in ((width,), (), ())
        )

    def admit(self, *admissions: NewRequest) -> None:
        self.sequences.admit(*admissions)
        for admission in admissions:
            self._num_read.pop(admission.slot, None)
            if admission.snapshot_index >= 0:  # the snapshot has that state
                self._num_read[admission.slot] = admission.num_computed_tokens

    def write_tables(self, *tables: BlockTableUpdate) -> None:
        self.sequences.write_tables(*tables)

    def on_prefill(self, chunk: PrefillCommitted) -> None:
        assert chunk.states is not None
        counts = [len(p.tokens) for p in chunk.prompts]
        prompts, states = [], []
        for p, token_states in zip(chunk.prompts, chunk.states.split(counts), strict=True):
            num_cached = max(p.num_cached_tokens - 1, 0)  # keep rows of a prefix hit: these states lack windows
            if self._num_read.get(p.slot) == p.begin:  # continues the previous chunk
                states.append(self._prompt_states[p.slot : p.slot + 1])
                prompts.append(PromptChunk(p.slot, p.begin - 1, p.tokens, num_cached))
            elif len(p.tokens) > 1:
                prompts.append(PromptChunk(p.slot, p.begin, p.tokens[1:], num_cached))
            states.append(token_states[:-1])
            self._num_read[p.slot] = p.end
        if prompts:
            step = replace(self.sequences.prefill_step(prompts), selects=False)
            self.layer.append(self.cache, step, torch.cat(states), from_draft=False)
        rows = to_device(torch.tensor(counts).cumsum(0) - 1, chunk.states.device)
        slots = to_device(torch.tensor([p.slot for p in chunk.prompts]), chunk.states.device)
        self._prompt_states[slots] = chunk.states[rows]

    def on_first_token(self, begun: FirstTokenSampled) -> None:
        sequences, slots = self.sequences, begun.slots
        sequences.active.fill_(False)
        sequences.active.index_fill_(0, slots, True)
        sequences.lengths[slots] = begun.lengths - 1
        sequences.tokens[slots] = begun.tokens
        states = torch.zeros_like(self._prompt_states)
        states[slots] = begun.states
        step = sequences.decode_step(len(states))
        self._states[slots] = self._run_layer(step, states)[slots]
        if self.layer.shared_topk:
            assert step.selected is not None
            for buffer, row_values in zip(self._selected, step.selected, strict=True):
                buffer[slots] = row_values[slots]

    def catch_up(self, state: DecodeState) -> None:
        # The KV is complete; but sequences that only time steps have no events.
        self.sequences.block_tables.copy_(state.block_tables)
        self.sequences.starts.copy_(state.starts)

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        rows, lengths = kind.rows, state.lengths[: kind.rows]
        sampler = DraftSampler(self.layer.logits, self.layer.vocab_rows, self.comm, self.noise == "shared", kind)
        states = self._states[:rows]
        tokens = sampler.sample(states, state, lengths + 1)
        if kind.drafts > 1:
            draft_steps = state.draft_steps(rows, kind.drafts - 1)
            selected = tuple(buffer[:rows] for buffer in self._selected)
            for n in range(kind.drafts - 1):
                step = draft_steps.step(n, tokens)
                states = self._run_layer(
                    step.with_selection(selected) if self.layer.shared_topk else step, states, from_draft=True
                )
                tokens = sampler.sample(states, state, lengths + n + 2)
        return sampler.draft()

    def observes_step(self, kind: DecodeGraphKey) -> bool:
        return True

    def on_step(self, step: StepCommitted) -> None:
        rows, sequences = step.kind.rows, self.sequences
        sequences.active[:rows] = step.tokens[:, 0] >= 0
        sequences.lengths[:rows] = step.span.before
        sequences.tokens[:rows] = step.tokens[:, 0]
        verified = sequences.decode_step(rows, step.tokens[:, 1:] if step.kind.drafts else None)
        parts = self.layer.append(self.cache, verified, step.states, from_draft=False)
        last = (step.span.after - step.span.before - 1).clamp(min=0)
        at = verified.slots * verified.max_q + last
        sequences.lengths[:rows] += last
        newest = sequences.decode_step(rows)
        self.policy.prepare(newest, {self.layer.window})
        if verified.selected is not None:
            to = [buffer[:rows] for buffer in self._selected] if self.layer.shared_topk else [None] * 3
            newest = newest.with_selection(
                tuple(
                    torch.index_select(x, 0, at, out=row_values)
                    for x, row_values in zip(verified.selected, to, strict=True)
                )
            )
        queries, x = (
            row_values.index_select(0, at) for row_values in parts
        )  # last, since attention reads older tensors early
        self._states[:rows] = self.layer.attend(queries, x, self.cache, newest, self.policy)

    def _run_layer(self, step: Step, states: Tensor, from_draft: bool = False) -> Tensor:
        self.policy.prepare(step, {self.layer.window})
        return self.layer.attend(
            *self.layer.append(self.cache, step, states, from_draft=from_draft), self.cache, step, self.policy
        )
