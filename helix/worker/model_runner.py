"""Executes rank 0's batches on every rank.

Steps of a batch are launched back to back. Every rank samples from the same gathered candidates, so all agree on the
tokens, and only rank 0 copies them to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.attention.dense import PREFIX_ROWS, DenseAttention
from helix.config import HopBChunks
from helix.engine.scheduler_output import NewRequest, PrefillChunk, SchedulerOutput
from helix.kv_placement import PromptChunk
from helix.layers.mla import min_rows_to_expand
from helix.layers.specs import MLASpec
from helix.models.decoder import Decoder
from helix.speculation import Draft, Drafter, NoDrafts, accepted_candidates
from helix.worker.clock import TimedEvent, time_each
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import (
    CONTEXT_BUCKETS,
    LONG,
    SEQUENCES,
    SIZES,
    UNPACKED_BUCKETS,
    ContextBucket,
    DecodeGraphKey,
    PrefillGraphKey,
    expansion_buckets,
    max_captured_size,
    padded_size,
    selection_buckets,
    sizes_to_capture,
)
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.logits_processor import LogitsProcessor
from helix.worker.prompt_scores import PromptScores
from helix.worker.sampling import SamplingState, sampled_candidates
from helix.worker.sequence_observer import FirstTokenSampled, PrefillCommitted, SequenceObserver, StepCommitted
from helix.worker.slabs import Slabs
from helix.worker.step import PLACEHOLDER_TOKEN_ID, DecodeState, Step
from helix.worker.step_tokens import StepTokens, Summaries
from helix.worker.transfers import to_device
from kernels.tokens.best_token import best_of_ranks
from kernels.tokens.commit import Candidates

# Reads of a layer that shared prefixes must save, of keys and values and of latents, by H200 timings: launches, and
# queries that share nothing, take as long.
MIN_SHARED_BYTES, MIN_SHARED_LATENT_BYTES = 40e6, 130e6


@dataclass(frozen=True)
class ComputedStep:
    """A decode step up to its logits [N, V_local] fp32, with the hidden states that drafters read."""

    logits: Tensor
    states: Tensor
    step: Step
    draft: Draft | None


@dataclass(frozen=True)
class PendingSample:
    """A step whose logits are computed and whose tokens the next batch samples.

    Attributes:
        begin: when the step could begin.
        computed: when its logits are ready.
    """

    scheduler_output: SchedulerOutput
    kind: DecodeGraphKey
    step: ComputedStep
    begin: TimedEvent
    computed: TimedEvent


class ModelRunner:
    """Executes batches on this rank: its shard of the model, its part of the KV cache, and its device state.

    In mode dp, slots, pages and batches are those of this rank's sequences (`SchedulerOutput.for_dp_rank`); the tokens
    that it returns are of all ranks.

    Args:
        policy: selects the keys that queries read in `sparse` steps; None: all steps are dense.
        hopb: batch chunks whose attention overlaps the exchange of the chunk before: none, a number, auto or best; see
            `chunks`.
        shared_prefix: whether decode attention reads pages that sequences share once: auto, always or none.
        slabs: host memory of the prefix cache, if any.

    Attributes:
        logits_hook: if set, called on every rank before sampling with (slots [n], positions [n] of the tokens to
            sample, logits [n, V_local] fp32); steps are not captured then.
        step_seconds: (rows, drafts) -> seconds of a step, if timed in advance.
        hopb_chunks: rows of a step -> (HOP-B chunks, tokens per row from which on they pay), set by
            `helix.worker.warmup`.
        logits_processor: None until the first request needs it.
        pads_chunks: prefill chunks are padded to few sizes, most of which are captured; not with KV offload or in mode
            dp.
        min_rows_to_expand: expand latents to keys and values if each is read by at least this many rows.
        mark: called with the name of each phase of a step as it begins, and with None at the end; for benchmarks.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sizes: EngineSizes,
        *,
        policy: AttentionPolicy | None = None,
        drafter: Drafter | None = None,
        hopb: HopBChunks = "none",
        shared_prefix: str = "auto",
        slabs: Slabs | None = None,
    ) -> None:
        self.model, self.cache, self.sizes = model, cache, sizes
        self.comm, self.attn_group, self.device = model.comm, model.attn_group, cache.device
        self.placement, self.layout = cache.placement, cache.placement.layout
        self.dense = DenseAttention()
        self.policy = policy or self.dense
        self.drafter = drafter or NoDrafts()
        self.hopb, self.shared_prefix, self.slabs = hopb, shared_prefix, slabs
        self.logits_hook: Callable[[Tensor, Tensor, Tensor], None] | None = None
        comm, layout, limit = self.comm, self.layout, sizes.length + sizes.drafts
        max_pages = self.placement.stripes.pages_for(limit)
        history = limit + 1 if sizes.drafts else 0
        self.state = DecodeState(sizes.slots, max_pages, self.placement, self.device, history, cache.rings)
        self.step_seconds: dict[tuple[int, int], float] = {}
        self.requests: dict[int, NewRequest] = {}
        self.hopb_chunks: dict[int, tuple[int, int]] = {}
        self.mark: Callable[[str | None], None] = lambda phase: None
        self.graphs = StepGraphs() if comm.capturable else None
        cache_follows = bool(cache.rings) or cache.has_states or cache.bounds is not None
        self._observes_prefill = cache_follows or self.drafter.wants_prefill_events
        self.pads_chunks = None not in cache.rings and layout.dp == 1 and comm.capturable
        attention = model.spec.attention
        topk = attention.topk if isinstance(attention, MLASpec) else None
        self.context_buckets: Sequence[ContextBucket] = CONTEXT_BUCKETS
        self.min_rows_to_expand = math.inf
        self.max_captured_tokens, limit = (
            max_captured_size(sizes.chunk, layout.world_size),
            max_pages * self.placement.page_size,
        )
        if isinstance(attention, MLASpec):
            self.min_rows_to_expand = min_rows_to_expand(attention)
        self.expansion_buckets = expansion_buckets(layout.kvp, limit, self.max_captured_tokens)
        if topk is not None:
            self.context_buckets = selection_buckets(topk, layout.kvp, limit, self.max_captured_tokens)
        elif any(t.element_size() == 1 for t in cache.tensors):
            self.context_buckets = UNPACKED_BUCKETS
        self._packed: dict[PrefillGraphKey, Tensor] = {}
        self._chunk_states = torch.empty(0)  # written by captured chunks
        self.logits_processor: LogitsProcessor | None = None
        self._pending_sample: PendingSample | None = None
        self._drafting = True  # the last steps had drafts
        self._slots = torch.arange(sizes.slots, device=self.device)

    def chunks(self, rows: int, row_tokens: float = math.inf) -> int:
        """Returns the number of HOP-B chunks of a step of `rows` rows with `row_tokens` tokens each, on average."""
        if self.layout.kvp == 1 or self.hopb == "none":  # kvp=1 has no exchange to overlap
            return 1
        if isinstance(self.hopb, int):
            return min(self.hopb, rows)
        chunks, min_tokens = self.hopb_chunks.get(rows, (1 if self.hopb == "auto" else min(2, rows), 0))
        return chunks if row_tokens >= min_tokens else 1

    def execute(self, scheduler_output: SchedulerOutput) -> list[StepTokens]:
        """Launches a batch, in mode dp this rank's part of it, without waiting for earlier launches.

        Returns:
            On rank 0, the tokens of the deferred sample, if any, of the prefill chunk, if any, and of each decode step.
        """
        if self.slabs is not None:
            self.slabs.beside_steps = scheduler_output.decode_steps > 0
        outputs = self._launch(scheduler_output)
        if self.slabs is not None:
            self.slabs.start(scheduler_output.moves, "store")
            if scheduler_output.drains_moves:
                self.slabs.drain()
        return outputs

    def _launch(self, scheduler_output: SchedulerOutput) -> list[StepTokens]:
        outputs: list[StepTokens] = []
        begin = TimedEvent(self.device)

        def record(
            tokens: Tensor,
            slots: Sequence[int] | None = None,
            pending: PendingSample | None = None,
            scored: Tensor | None = None,
        ) -> None:
            output = scheduler_output if pending is None else pending.scheduler_output
            logprobs = Summaries(
                self._all_gather_dp(self._get_logits_processor().summaries) if output.kind.process_logits else None,
                scored,
            )
            if self.comm.rank == 0:
                before = pending.begin if pending is not None else outputs[-1].end if outputs else begin
                idle = None if pending is None else (pending.computed, begin)
                outputs.append(StepTokens(tokens, slots, self.check, before, idle, logprobs))

        if self._pending_sample is not None:
            if scheduler_output.token_bitmasks:
                self._get_logits_processor().set_bitmasks(scheduler_output.token_bitmasks)
            record(self._sample_deferred(), pending=self._pending_sample)
            self._pending_sample = None
        if scheduler_output.released_slots:
            released = [self.state.release_event(slot) for slot in scheduler_output.released_slots]
            for observer in self.observers:
                observer.release(*released)
            for slot in scheduler_output.released_slots:
                del self.requests[slot]
        if scheduler_output.slot_moves:
            self._move_slots(*zip(*scheduler_output.slot_moves, strict=True))
        if scheduler_output.table_updates:
            for observer in self.observers:
                observer.write_tables(*scheduler_output.table_updates)
        if scheduler_output.new_requests:
            self.admit(*scheduler_output.new_requests)
        if self.slabs is not None:
            # After the copies of admissions: these may read pages that were evicted for the moves.
            self.slabs.start(scheduler_output.moves, "load")
        if scheduler_output.capture_graph and (size := self.eager_size) is not None:
            self.capture_chunk(size, num_cached_tokens=1)
        if scheduler_output.prefill_chunks or scheduler_output.num_tokens_across_dp:
            scores = self._scores(scheduler_output)
            slot_tokens = self._by_slot(*self._prefill(scheduler_output.prefill_chunks, scheduler_output, scores))
            record(*slot_tokens, scored=None if scores is None else scores.all_ranks())
        if scheduler_output.decode_steps:
            self.state.set_prefixes(scheduler_output.shared_prefixes)
            if scheduler_output.kind.drafts and not self._drafting:
                self.drafter.catch_up(self.state)
            self._drafting = scheduler_output.kind.drafts > 0
        if scheduler_output.draft_limits:
            limits = to_device(torch.tensor(scheduler_output.draft_limits), self.device)
            self.state.draft_limits[: len(limits)] = limits
        if scheduler_output.defers_sampling:
            self._defer_sampling(scheduler_output, outputs[-1].end if outputs else begin)
            return outputs
        for _ in range(scheduler_output.decode_steps):
            record(self.decode(scheduler_output.kind, scheduler_output.row_tokens))
        return outputs

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Sizes of captured chunks, ascending, to which the scheduler trims chunks."""
        return tuple(size for size in SIZES if size <= min(self.max_captured_tokens, LONG)) if self.pads_chunks else ()

    @property
    def recomputed_tokens(self) -> float:
        """Number of tokens before the end of a prefix hit that are computed again."""
        return max(self.cache.recomputed_tokens, self.drafter.recomputed_tokens)

    @property
    def is_computed(self) -> bool:
        """Whether the device waits for the next batch: the logits whose sampling is deferred are ready."""
        return self._pending_sample is not None and self._pending_sample.computed.reached

    @property
    def min_shared_pages(self) -> float:
        """Minimum page reads of a layer that a shared prefix must save; infinite: all sequences read their own."""
        if self.shared_prefix == "none" or None in self.cache.rings:  # with KV offload steps read pages of rings
            return math.inf
        if self.shared_prefix == "always":
            return 1
        spec, page_bytes = self.model.spec.attention, self.cache.layer_page_bytes
        if isinstance(spec, MLASpec):
            heads = -(-spec.q_heads // self.layout.tpa)
            if spec.topk is not None or 2 * heads >= PREFIX_ROWS:  # each reads its own, or products take the time
                return math.inf
        least = MIN_SHARED_LATENT_BYTES if isinstance(spec, MLASpec) else MIN_SHARED_BYTES
        return least / page_bytes if page_bytes else math.inf

    @property
    def min_sharing_rows(self) -> float:
        """Minimum share of the decoding sequences that a shared prefix must have.

        Over FP8 caches the general kernel reads prefixes, which fills the GPU only if most rows have work.
        """
        return 0.5 if self.shared_prefix == "auto" and self.cache.is_fp8 else 0.0

    def sparse_at(self, tokens: int) -> bool:
        return self.policy.from_tokens is not None and tokens >= self.policy.from_tokens

    def check(self, wait: bool = True) -> None:
        self.comm.check(wait)
        self.drafter.check(wait)

    @property
    def observers(self) -> list[SequenceObserver]:
        """Components that follow the events of sequences, in the order in which they are called."""
        processors = [] if self.logits_processor is None else [self.logits_processor]
        return [self.state, *processors, self.cache, self.drafter]

    @property
    def moves_slots(self) -> bool:
        """Whether sequences can change their slots: drafters and caches in host memory do not move what they keep."""
        return not self.sizes.drafts and not self.cache.fetches

    def _move_slots(self, sources: tuple[int, ...], to: tuple[int, ...]) -> None:
        for observer in self.observers:
            observer.move_slots(sources, to)
        for source, slot in zip(sources, to, strict=True):
            self.requests[slot] = self.requests.pop(source)

    def admit(self, *admissions: NewRequest) -> None:
        for admission in admissions:
            self.requests[admission.slot] = admission
            if admission.sampling.needs_logits_processor:
                self._get_logits_processor()
            if len(admission.copy_from):
                pages = admission.copy_from, admission.copy_to
                sources, to = (to_device(torch.from_numpy(p), self.device) for p in pages)
                for observer in self.observers:
                    observer.copy_pages(sources, to)
        for observer in self.observers:
            observer.admit(*admissions)

    def _scores(self, scheduler_output: SchedulerOutput) -> PromptScores | None:
        limit = max(
            scheduler_output.max_logprob_tokens, sum(len(s.logprob_token_ids) for s in scheduler_output.prefill_chunks)
        )
        return (
            PromptScores(self.model, self.comm, scheduler_output.prefill_chunks, limit, self.layout.dp)
            if limit
            else None
        )

    def _prefill(
        self, chunks: tuple[PrefillChunk, ...], scheduler_output: SchedulerOutput, scores: PromptScores | None
    ) -> tuple[Tensor, list[int]]:
        """Launches a prefill chunk; returns the first tokens [n, 1] of prompts that end with it, and their slots."""
        if not chunks:
            self.model.hidden(self.cache, self.state.padding_step(scheduler_output.num_tokens_across_dp), self.policy)
            return self._slots.new_full((1, 1), PLACEHOLDER_TOKEN_ID), [0]
        prompts = [
            PromptChunk(
                s.slot, s.begin, torch.from_numpy(s.tokens).long(), s.num_cached_tokens, s.snapshot_index, s.evict_to
            )
            for s in chunks
        ]
        on_hidden = scores.add if scores is not None and scores.count else None
        hidden, states = self.prompt_states(prompts, scheduler_output.num_tokens_across_dp, on_hidden)
        last = [i for i, s in enumerate(chunks) if s.last]
        packed = to_device(torch.tensor([[p.slot, p.written[1]] for p in prompts]), self.device)
        slots, ends = packed.unbind(1)
        self.state.lengths[slots] = ends
        if not last:
            return self._slots.new_full((1, 1), PLACEHOLDER_TOKEN_ID), [chunks[0].slot]
        # Repeat the last one up to a power of two: fewer kernels to compile.
        repeated = last + [last[-1]] * ((1 << (len(last) - 1).bit_length()) - len(last))
        last_rows = to_device(torch.tensor(repeated), self.device)
        slots, lengths, n = slots[last_rows], ends[last_rows], len(last)
        logits = self.model.logits(hidden[last_rows])
        self._observe(logits[:n], slots[:n], lengths[:n])
        tokens = self.sample_first(logits, scheduler_output.kind, slots, lengths)
        self.state.activate(slots, tokens, lengths)
        for observer in self.observers:
            observer.on_first_token(FirstTokenSampled(slots[:n], tokens[:n], lengths[:n], states[last_rows[:n]]))
        return tokens[:n, None], [chunks[i].slot for i in last]

    def prompt_states(
        self,
        prompts: list[PromptChunk],
        counts: tuple[int, ...] = (),
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs a prefill chunk, captured if possible; returns the last tokens' states, see `Decoder.states`.

        Args:
            counts: see `Step.num_tokens_across_dp`.
            on_hidden: called with the normalized hidden states [N, H] of all tokens in order, then padding. Such a
                chunk is not captured, since captured ones compute the last layer for last tokens only.
        """
        state = self.state
        if self.pads_chunks:
            size = self.chunk_size(prompts)
            packed = state.packed(prompts, size)
            if size.captured and self.graphs is not None and on_hidden is None:
                self._packed.setdefault(size, torch.empty_like(packed)).copy_(packed)
                last, states = self.graphs.run(self._chunk, size, captures=False)
            else:
                last, states = self._computed(state.packed_step(packed, size), on_hidden)
        else:
            step = replace(state.prefill_step(prompts, counts), expands=self._expands(prompts))
            last, states = self._computed(step, on_hidden)
        if self._observes_prefill:
            real = None if states is None else states[: sum(len(p.tokens) for p in prompts)]
            chunk = PrefillCommitted(prompts, state.prompts_span(prompts), state.parts(prompts), real)
            for observer in self.observers:
                observer.on_prefill(chunk)
            self.cache.save_snapshots(prompts)
        return last

    def chunk_size(self, prompts: Sequence[PromptChunk]) -> PrefillGraphKey:
        """Returns the size of a prefill step of these prompts: a captured one if its padding costs little."""
        expands = self._expands(prompts)
        buckets = self.context_buckets if not expands else self.expansion_buckets if len(prompts) == 1 else ()
        keys = self.state.max_keys(prompts)
        return padded_size([len(p.tokens) for p in prompts], keys, self.max_captured_tokens, buckets, expands)

    def _expands(self, prompts: Sequence[PromptChunk]) -> bool:
        """Returns whether expanding latents saves multiplications; it expands each sequence to the longest length."""
        pairs = sum(len(p.tokens) * (p.begin + len(p.tokens) / 2) for p in prompts)
        longest = max((p.begin + len(p.tokens) for p in prompts), default=0)
        return 0 < self.min_rows_to_expand * len(prompts) * longest <= pairs

    def first_sizes(self, room: int) -> list[PrefillGraphKey]:
        """Returns the sizes to capture before the first request; `room`: maximum keys of a sequence on a rank."""
        sizes = sizes_to_capture(self.max_captured_tokens, room, self.context_buckets)
        if self.min_rows_to_expand < math.inf:  # long chunks expand latents: capture these for one prompt instead
            sizes = [size for size in sizes if size.tokens < 2 * self.min_rows_to_expand * (size.sequences - 1)]
            expanded = sizes_to_capture(self.max_captured_tokens, room, self.expansion_buckets)
            single = [
                size for size in expanded if size.sequences == SEQUENCES[0] and size.tokens >= self.min_rows_to_expand
            ]
            sizes = sorted([*sizes, *(replace(size, expands=True) for size in single)], reverse=True)
        return sizes

    @property
    def eager_size(self) -> PrefillGraphKey | None:
        """A size of chunks that ran eagerly and can be captured in a pause."""
        graphs = self.graphs
        return None if graphs is None else next((s for s in self._packed if not graphs.has(self._chunk, s)), None)

    def capture_chunk(self, size: PrefillGraphKey, num_cached_tokens: int = 0) -> None:
        """Captures chunks of a size, after an eager run if none has run.

        Args:
            num_cached_tokens: 1: no KV is written; 0: one token in the first page of slot 0 is overwritten.
        """
        assert self.graphs is not None
        packed = self.state.packed([PromptChunk(0, 0, torch.zeros(1, dtype=torch.int64), num_cached_tokens)], size)
        self._packed.setdefault(size, torch.empty_like(packed)).copy_(packed)
        while not self.graphs.has(self._chunk, size):
            self.graphs.run(self._chunk, size)

    def chunk_seconds(self, size: PrefillGraphKey) -> float:
        """Times a captured chunk, with the input of its last run; a collective."""
        assert self.graphs is not None
        (seconds,) = time_each(partial(self.graphs.run, self._chunk, size), 1, self.device)
        return seconds

    def _chunk(self, size: PrefillGraphKey) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        last, states = self._computed(self.state.packed_step(self._packed[size], size))
        if states is None:
            return last, None
        # One buffer for all sizes. Smaller ones stay alive in the graphs that write to them.
        if len(self._chunk_states) < size.tokens:
            self._chunk_states = torch.empty_like(states)
        return last, self._chunk_states[: size.tokens].copy_(states)

    def _computed(
        self, step: Step, on_hidden: Callable[[Tensor], None] | None = None
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Runs a prefill chunk; returns states as `prompt_states` does, and those that the drafter reads."""
        if not self.drafter.needs_hidden_states and on_hidden is None:
            last = self.model.last_states(self.cache, step, self.policy)
            return (last, last), None
        assert step.cu_q is not None
        hidden, states = self.model.states(self.cache, step, self.policy)
        if on_hidden is not None:
            on_hidden(hidden)
        ends = step.cu_q[1:] - 1
        return (hidden[ends], states[ends]), states if self.drafter.needs_hidden_states else None

    def _by_slot(self, tokens: Tensor, slots: list[int]) -> tuple[Tensor, list[int] | None]:
        """Returns first tokens [n, 1] and their slots; in mode dp, tokens of all slots of all ranks, and None."""
        if self.layout.dp == 1:
            return tokens, slots
        slot_tokens = self._slots.new_full((self.sizes.slots, 1), PLACEHOLDER_TOKEN_ID)
        slot_tokens[to_device(torch.tensor(slots), self.device)] = tokens
        return self._all_gather_dp(slot_tokens), None

    def _all_gather_dp(self, x: Tensor) -> Tensor:
        """Gathers x [n, ...] of local slots -> [n * dp, ...] in order of all ranks' slots; collective in mode dp."""
        return x if self.layout.dp == 1 else self.comm.all_gather(x.contiguous()).transpose(0, 1).flatten(0, 1)

    def decode(self, kind: DecodeGraphKey, row_tokens: float = math.inf) -> Tensor:
        """Launches a decode step, in HOP-B chunks as `chunks` says; a collective that does not wait for the device.

        Returns:
            Tokens [rows, 1 + drafts], see `DecodeState.commit`, in mode dp of all ranks' slots; a later step overwrites
            them.
        """
        committed: Tensor = self._captured(self.step, self._in_chunks(kind, row_tokens))
        return committed

    def decode_deferred(self, kind: DecodeGraphKey, row_tokens: int) -> None:
        """Launches both parts of a decode step whose sampling is deferred; a collective, for warm-up."""
        step = replace(SchedulerOutput.empty(), kind=kind, row_tokens=row_tokens)
        self._defer_sampling(step, TimedEvent(self.device))
        self._sample_deferred()
        self._pending_sample = None

    def _defer_sampling(self, scheduler_output: SchedulerOutput, begin: TimedEvent) -> None:
        kind = self._in_chunks(scheduler_output.kind, scheduler_output.row_tokens)
        computed = self._captured(self._compute, kind.up_to_logits)
        self._pending_sample = PendingSample(scheduler_output, kind, computed, begin, TimedEvent(self.device))

    def sample_first(self, logits: Tensor, kind: DecodeGraphKey, slots: Tensor, lengths: Tensor) -> Tensor:
        """Samples the first tokens [n] of prompts of `lengths` [n] tokens from logits [n, V_local], without drafts."""
        processed = logits
        if kind.process_logits:
            processed = self._get_logits_processor().process(logits, slots, torch.full_like(slots, -1), lengths)
        tokens = best_of_ranks(self._candidates(processed, lengths, self.state.sampling.rows(slots), kind).pairs)[1]
        if kind.process_logits:
            self._get_logits_processor().record_logprobs(logits, tokens, slots, self.attn_group)
        return tokens

    def _sample_deferred(self) -> Tensor:
        assert self._pending_sample is not None
        tokens: Tensor = self._captured(self._sample_pending, self._pending_sample.kind)
        return tokens

    def _in_chunks(self, kind: DecodeGraphKey, row_tokens: float) -> DecodeGraphKey:
        return replace(kind, chunks=self.chunks(kind.rows, row_tokens))

    def _captured(self, part: Callable[[DecodeGraphKey], Any], kind: DecodeGraphKey) -> Any:
        if self.graphs is None or self.logits_hook is not None:
            return part(kind)
        return self.graphs.run(part, kind)

    def step(self, kind: DecodeGraphKey) -> Tensor:
        return self._complete(self._compute(kind), kind)

    def _sample_pending(self, kind: DecodeGraphKey) -> Tensor:
        """Samples the pending step, whose first part is captured no later: a captured sampling reads its tensors."""
        assert self._pending_sample is not None
        return self._complete(self._pending_sample.step, kind)

    def _compute(self, kind: DecodeGraphKey) -> ComputedStep:
        draft = None
        self.mark("draft")
        if kind.drafts:
            draft = self.drafter.propose(self.state, kind)
            draft = replace(draft, tokens=self.state.within_limits(draft.tokens))
        tokens = None if draft is None else draft.tokens
        self.mark("verify")
        step = self.state.decode_step(kind.rows, tokens, kind.chunks, kind.shared_prefixes)
        policy = self.policy if kind.sparse else self.dense
        if kind.drafts:
            policy = self.drafter.verify_policy or policy
        hidden, states = self.model.states(self.cache, step, policy)
        logits = self.model.logits(hidden)
        self.mark("accept")
        return ComputedStep(logits, states, step, draft)

    def _complete(self, computed: ComputedStep, kind: DecodeGraphKey) -> Tensor:
        state, step, draft, rows, logits = self.state, computed.step, computed.draft, kind.rows, computed.logits
        observers = [f for f in self.observers if f.observes_step(kind)]
        if self.logits_hook:
            live, owner = step.live, self._slots[:rows].repeat_interleave(step.max_q)
            self._observe(logits[live], owner[live], step.positions[live] + 1)
        # Greedy sampling reads no positions: skip the addition.
        following = step.positions + 1 if kind.stochastic or kind.process_logits else step.positions
        slots, processed = self._slots[:rows], logits
        if kind.process_logits:
            processed = self._get_logits_processor().process(logits, slots, state.uncounted(rows), following)
        candidates = self._candidates(processed, following, state.sampling.rows(slice(0, rows)), kind, draft)
        committed, before = state.commit(
            rows, candidates, *((draft.tokens, draft.forced_tokens) if draft is not None else ())
        )
        if kind.process_logits:  # first tokens only: sequences with processed logits have no drafts
            self._get_logits_processor().record_logprobs(
                logits[:: step.max_q], committed[:, 0].contiguous(), slots, self.attn_group
            )
        if observers:
            self.mark("choose")
            span = state.span(rows, before, state.lengths[:rows], step.max_q)
            for observer in observers:
                observer.on_step(StepCommitted(kind, span, state.active[:rows], computed.states, committed))
        self.mark(None)
        return self._all_gather_dp(committed)

    def _observe(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        if self.logits_hook:
            self.logits_hook(slots, positions, logits)

    def _candidates(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingState,
        kind: DecodeGraphKey,
        draft: Draft | None = None,
    ) -> Candidates:
        first = self.model.embedding.rows.start
        if draft is not None and draft.sampled_from is not None:
            return accepted_candidates(
                logits,
                first,
                draft.tokens,
                draft.sampled_from,
                positions,
                sampling,
                self.attn_group,
                filtered=kind.filtered,
            )
        flags = {"stochastic": kind.stochastic, "filtered": kind.filtered}
        return Candidates(sampled_candidates(logits, first, positions, sampling, self.attn_group, **flags))

    def _get_logits_processor(self) -> LogitsProcessor:
        """Returns the logits processor, created at its first use on all ranks alike; captured steps write to it."""
        if self.logits_processor is None:
            spec = self.model.spec
            self.logits_processor = LogitsProcessor(
                self.sizes.slots, spec.vocab, self.model.embedding.rows, spec.eos, self.device
            )
        return self.logits_processor

    def close(self) -> None:
        """Frees captured graphs and slabs; call it before closing the communicator."""
        if self.slabs is not None:
            self.slabs.close()
        if self.graphs is not None:
            self.graphs.close()
