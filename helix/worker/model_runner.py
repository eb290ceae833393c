"""Execution of rank 0's decisions on every rank, over its part of the model and of the cache.

Steps of a decision are launched back to back. Every rank draws tokens from the same gathered values, so they agree, and
only rank 0 reads them.
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
from helix.attention.dense import DenseAttention
from helix.engine.decision import Admission, Decision, Segment
from helix.layers.mla import expanding_rows
from helix.layers.specs import MLASpec
from helix.models.decoder import Decoder
from helix.placement import PromptChunk
from helix.speculation import Draft, Drafter, NoDrafts, accepted_candidates
from helix.worker.clock import Moment, seconds_of_each
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.follower import Begun, Follower, Prefilled, Taken
from helix.worker.graph_keys import (
    DEPTHS,
    LONG,
    SEQUENCES,
    SIZES,
    UNPACKED_DEPTHS,
    ChunkSize,
    Depth,
    StepKind,
    captured_first,
    choosing_depths,
    expanding_depths,
    longest_size,
    padded,
)
from helix.worker.keeps import EngineSizes
from helix.worker.kv_cache import KVCache
from helix.worker.prompt_scores import PromptScores
from helix.worker.sampling import SamplingState, sampled_candidates
from helix.worker.shaping import Shaper
from helix.worker.step import PAST, DecodeState, Step
from helix.worker.step_tokens import StepTokens, Summaries
from helix.worker.transfers import to_device
from kernels.tokens.best_token import best_of_ranks
from kernels.tokens.commit import Candidates


@dataclass(frozen=True)
class ComputedStep:
    """A decode step up to its logits [N, V_local] fp32, with the states that drafters read."""

    logits: Tensor
    states: Tensor
    step: Step
    draft: Draft | None


@dataclass(frozen=True)
class HeldStep:
    """A step whose logits are computed and whose tokens are not drawn yet: the next decision draws them.

    Attributes:
        kind: kind of the step.
        begin: moment at which it could begin.
        computed: moment at which its logits are ready.
    """

    decision: Decision
    kind: StepKind
    step: ComputedStep
    begin: Moment
    computed: Moment


class ModelRunner:
    """Executor of decisions on this rank, with its parts of the model and the cache, and the slots' device state.

    In mode dp slots, pages and decisions are those of this rank's own sequences (`Decision.share`); the tokens that it
    returns are those of all ranks.

    Args:
        model: this rank's part of the model.
        cache: this rank's pages.
        sizes: the engine's sizes.
        policy: chooses the keys that a query reads in `sparse` steps; None: all steps are dense.
        drafter: proposes tokens that decode steps verify.
        hopb: batch chunks whose exchange overlaps the next chunk's attention: none, a number, or as `hopb_chunks` says,
            else none (auto) or two (best).

    Attributes:
        observer: called on every rank before each draw with (slots [n], positions [n] of the tokens to draw, logits
            [n, V_local] fp32), where there is one; steps are not captured then.
        admitted: admissions by slot, of the slots in use.
        step_seconds: (rows, drafts) -> seconds of a step, if timed in advance.
        graphs: captured steps; None if steps cannot be captured.
        hopb_chunks: HOP-B chunks by rows of a step, and tokens per row from which on they pay, as chosen by
            `helix.worker.warm_up`.
        shaper: changes logits as requested; None until the first sequence requests it.
        pads: whether chunks of prompts are padded to few sizes, most of which are captured: unless pages are in host
            memory, or in mode dp. Who follows prompts does so behind a captured chunk.
        longest: tokens of the longest captured chunk.
        depths: depths of captured chunks.
        expanding_rows: rows that read a token from which on its latent is expanded.
        expanding_depths: depths of its captured chunks.
        mark: called at the beginning of each phase of a step with drafts, with its name, and at the end of the step
            with None; for benchmarks.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sizes: EngineSizes,
        *,
        policy: AttentionPolicy | None = None,
        drafter: Drafter | None = None,
        hopb: str = "none",
    ) -> None:
        self.model, self.cache, self.sizes = model, cache, sizes
        self.comm, self.own, self.device = model.comm, model.own, cache.device
        self.placement, self.layout = cache.placement, cache.placement.layout
        self.dense = DenseAttention()
        self.policy = policy or self.dense
        self.drafter = drafter or NoDrafts()
        self.hopb = hopb
        self.observer: Callable[[Tensor, Tensor, Tensor], None] | None = None
        comm, layout, most = self.comm, self.layout, sizes.length + sizes.drafts
        max_pages = self.placement.stripes.pages_for(most)
        history = most + 1 if sizes.drafts else 0
        self.state = DecodeState(sizes.slots, max_pages, self.placement, self.device, history, cache.rings)
        self.step_seconds: dict[tuple[int, int], float] = {}
        self.admitted: dict[int, Admission] = {}
        self.hopb_chunks: dict[int, tuple[int, int]] = {}
        self.mark: Callable[[str | None], None] = lambda phase: None
        self.graphs = StepGraphs() if comm.capturable else None
        cache_follows = bool(cache.rings) or cache.has_states or cache.bounds is not None
        self._followed = cache_follows or self.drafter.follows_prompts
        self.pads = None not in cache.rings and layout.dp == 1 and comm.capturable
        attention = model.spec.attention
        topk = attention.topk if isinstance(attention, MLASpec) else None
        self.depths: Sequence[Depth] = DEPTHS
        self.expanding_rows = math.inf
        self.longest, most = longest_size(sizes.chunk, layout.world_size), max_pages * self.placement.page_size
        if isinstance(attention, MLASpec):
            self.expanding_rows = expanding_rows(attention)
        self.expanding_depths = expanding_depths(layout.kvp, most, self.longest)
        if topk is not None:
            self.depths = choosing_depths(topk, layout.kvp, most, self.longest)
        elif any(t.element_size() == 1 for t in cache.tensors):
            self.depths = UNPACKED_DEPTHS
        self._packed: dict[ChunkSize, Tensor] = {}
        self._chunk_states = torch.empty(0)  # of the last captured chunk
        self.shaper: Shaper | None = None
        self._held: HeldStep | None = None
        self._drafting = True  # whether the last steps had drafts
        self._slots = torch.arange(sizes.slots, device=self.device)

    def chunks(self, rows: int, row_tokens: float = math.inf) -> int:
        """Returns the number of HOP-B chunks of a step of `rows` rows with so many tokens each, on average."""
        if self.layout.kvp == 1 or self.hopb == "none":  # a kvp group of one has nothing to exchange
            return 1
        if self.hopb not in ("auto", "best"):
            return min(int(self.hopb), rows)
        chunks, least = self.hopb_chunks.get(rows, (1 if self.hopb == "auto" else min(2, rows), 0))
        return chunks if row_tokens >= least else 1

    def execute(self, decision: Decision) -> list[StepTokens]:
        """Launches the work of a decision.

        The host does not wait for earlier launches.

        Args:
            decision: in mode dp, this rank's share of it.

        Returns:
            On rank 0, tokens: those of the held step, if any, of the prefill, if any, and of each decode step.
        """
        drawn: list[StepTokens] = []
        begin = Moment(self.device)

        def keep(
            tokens: Tensor,
            slots: Sequence[int] | None = None,
            held: HeldStep | None = None,
            scored: Tensor | None = None,
        ) -> None:
            of = decision if held is None else held.decision
            logprobs = Summaries(self._of_all(self._shaper().summaries) if of.kind.shaped else None, scored)
            if self.comm.rank == 0:
                before = held.begin if held is not None else drawn[-1].end if drawn else begin
                idle = None if held is None else (held.computed, begin)
                drawn.append(StepTokens(tokens, slots, self.check, before, idle, logprobs))

        if self._held is not None:
            if decision.masks:
                self._shaper().allow(decision.masks)
            keep(self._captured(self._draw_held, self._held.kind), held=self._held)
            self._held = None
        if decision.retire:
            gone = [self.state.leaving(slot) for slot in decision.retire]
            for follower in self.followers:
                follower.retire(*gone)
            for slot in decision.retire:
                del self.admitted[slot]
        if decision.tables:
            for follower in self.followers:
                follower.write(*decision.tables)
        if decision.admit:
            self.admit(*decision.admit)
        if decision.captures and (size := self.eager_size) is not None:
            self.capture_chunk(size, known=1)
        if decision.prefill or decision.counts:
            scores = self._scores(decision)
            of_slots = self._by_slot(*self._prefill(decision.prefill, decision, scores))
            keep(*of_slots, scored=None if scores is None else scores.of_all())
        if decision.decode_steps:
            if decision.kind.drafts and not self._drafting:
                self.drafter.catch_up(self.state)
            self._drafting = decision.kind.drafts > 0
        if decision.draft_limits:
            limits = to_device(torch.tensor(decision.draft_limits), self.device)
            self.state.draft_limits[: len(limits)] = limits
        if decision.holds_draw:
            kind = self._in_chunks(decision.kind, decision.row_tokens)
            computed = self._captured(self._compute, kind)
            self._held = HeldStep(decision, kind, computed, drawn[-1].end if drawn else begin, Moment(self.device))
            return drawn
        for _ in range(decision.decode_steps):
            keep(self.decode(decision.kind, decision.row_tokens))
        return drawn

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Sizes of captured chunks, ascending: the scheduler cuts a chunk that time bounds down to one of them."""
        return tuple(size for size in SIZES if size <= min(self.longest, LONG)) if self.pads else ()

    @property
    def lacking(self) -> float:
        """Number of tokens before the end of a prefix hit that are computed again."""
        return max(self.cache.lacking, self.drafter.lacking)

    @property
    def is_computed(self) -> bool:
        """Whether the held step's logits are ready, so that the device waits for the decision that draws it."""
        return self._held is not None and self._held.computed.reached

    def sparse_at(self, tokens: int) -> bool:
        """Returns whether steps of sequences of this length read only a part of the keys."""
        return self.policy.from_tokens is not None and tokens >= self.policy.from_tokens

    def check(self, wait: bool = True) -> None:
        """Checks all collectives of a step, by `Communicator.check`."""
        self.comm.check(wait)
        self.drafter.check(wait)

    @property
    def followers(self) -> list[Follower]:
        """Components that follow the events of sequences, in the order in which events reach them."""
        shaping = [] if self.shaper is None else [self.shaper]
        return [self.state, *shaping, self.cache, self.drafter]

    def admit(self, *admissions: Admission) -> None:
        """Admits sequences to their slots, and copies the pages that they reuse in part."""
        for admission in admissions:
            self.admitted[admission.slot] = admission
            if admission.sampling.is_shaped:
                self._shaper()
            if len(admission.copy_from):
                pages = admission.copy_from, admission.copy_to
                sources, to = (to_device(torch.from_numpy(p), self.device) for p in pages)
                for follower in self.followers:
                    follower.copy(sources, to)
        for follower in self.followers:
            follower.admit(*admissions)

    def _scores(self, decision: Decision) -> PromptScores | None:
        """Returns what scores the tokens of a decision's prompts; None if none is to be."""
        most = max(decision.scored, sum(len(s.scored) for s in decision.prefill))
        return PromptScores(self.model, self.comm, decision.prefill, most, self.layout.dp) if most else None

    def _prefill(
        self, segments: tuple[Segment, ...], decision: Decision, scores: PromptScores | None
    ) -> tuple[Tensor, list[int]]:
        """Launches a chunk of prompts; returns the first tokens [n, 1] of prompts that end with it, and their slots."""
        if not segments:
            self.model.hidden(self.cache, self.state.padding_step(decision.counts), self.policy)
            return self._slots.new_full((1, 1), PAST), [0]
        prompts = [
            PromptChunk(s.slot, s.begin, torch.from_numpy(s.tokens).long(), s.known, s.saves, s.moves) for s in segments
        ]
        each = scores.add if scores is not None and scores.count else None
        hidden, states = self.prompt_states(prompts, decision.counts, each)
        last = [i for i, s in enumerate(segments) if s.last]
        of_all = to_device(torch.tensor([[p.slot, p.written[1]] for p in prompts]), self.device)
        slots, ends = of_all.unbind(1)
        self.state.lengths[slots] = ends
        if not last:
            return self._slots.new_full((1, 1), PAST), [segments[0].slot]
        # The last one again and again, up to a power of two: fewer kernels to compile.
        repeated = last + [last[-1]] * ((1 << (len(last) - 1).bit_length()) - len(last))
        of_last = to_device(torch.tensor(repeated), self.device)
        slots, lengths, n = slots[of_last], ends[of_last], len(last)
        logits, kind = self.model.logits(hidden[of_last]), decision.kind
        self._observe(logits[:n], slots[:n], lengths[:n])
        shaped = self._shaper().shape(logits, slots, torch.full_like(slots, -1), lengths) if kind.shaped else logits
        tokens = best_of_ranks(self._candidates(shaped, lengths, self.state.sampling.rows(slots), kind).pairs)[1]
        if kind.shaped:
            self._shaper().report(logits, tokens, slots, self.own)
        self.state.activate(slots, tokens, lengths)
        for follower in self.followers:
            follower.begun(Begun(slots[:n], tokens[:n], lengths[:n], states[of_last[:n]]))
        return tokens[:n, None], [segments[i].slot for i in last]

    def prompt_states(
        self,
        prompts: list[PromptChunk],
        counts: tuple[int, ...] = (),
        each: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs a chunk of prompts, captured if it can be; returns the last tokens' states, see `Decoder.states`.

        Args:
            counts: see `Step.counts`.
            each: called with the normalised hidden states [N, H] of all tokens, in order, then padding; such a chunk is
                not captured, as only its last tokens' states would be computed to the end.
        """
        state = self.state
        if self.pads:
            size = self.chunk_size(prompts)
            packed = state.packed(prompts, size)
            if size.captured and self.graphs is not None and each is None:
                self._packed.setdefault(size, torch.empty_like(packed)).copy_(packed)
                last, states = self.graphs.run(self._chunk, size, captures=False)
            else:
                last, states = self._computed(state.packed_step(packed, size), each)
        else:
            step = replace(state.prefill_step(prompts, counts), expands=self._expands(prompts))
            last, states = self._computed(step, each)
        if self._followed:
            real = None if states is None else states[: sum(len(p.tokens) for p in prompts)]
            chunk = Prefilled(prompts, state.prompts_span(prompts), state.parts(prompts), real)
            for follower in self.followers:
                follower.prefilled(chunk)
        return last

    def chunk_size(self, prompts: Sequence[PromptChunk]) -> ChunkSize:
        """Returns the size of a prefill step of these prompts: a captured one if its padding costs little."""
        expands = self._expands(prompts)
        depths = self.depths if not expands else self.expanding_depths if len(prompts) == 1 else ()
        keys = self.state.most_keys(prompts)
        return padded([len(p.tokens) for p in prompts], keys, self.longest, depths, expands)

    def _expands(self, prompts: Sequence[PromptChunk]) -> bool:
        """Returns whether it takes fewer products to expand latents: of all sequences as many as of the longest."""
        pairs = sum(len(p.tokens) * (p.begin + len(p.tokens) / 2) for p in prompts)
        longest = max((p.begin + len(p.tokens) for p in prompts), default=0)
        return 0 < self.expanding_rows * len(prompts) * longest <= pairs

    def first_sizes(self, room: int) -> list[ChunkSize]:
        """Returns the sizes to capture before the first request; `room`: most keys of a sequence on a rank."""
        sizes = captured_first(self.longest, room, self.depths)
        if self.expanding_rows < math.inf:  # few of these are left, and of those one prompt's
            sizes = [size for size in sizes if size.tokens < 2 * self.expanding_rows * (size.sequences - 1)]
            expanded = captured_first(self.longest, room, self.expanding_depths)
            of_one = [
                size for size in expanded if size.sequences == SEQUENCES[0] and size.tokens >= self.expanding_rows
            ]
            sizes = sorted([*sizes, *(replace(size, expands=True) for size in of_one)], reverse=True)
        return sizes

    @property
    def eager_size(self) -> ChunkSize | None:
        """A size of chunks that ran eagerly and can be captured in a pause."""
        graphs = self.graphs
        return None if graphs is None else next((s for s in self._packed if not graphs.has(self._chunk, s)), None)

    def capture_chunk(self, size: ChunkSize, known: int = 0) -> None:
        """Runs chunks of a size until they are captured: eagerly before, if none has run.

        Args:
            known: 1: no KV is written; 0: a token of the first page of slot 0 is.
        """
        assert self.graphs is not None
        packed = self.state.packed([PromptChunk(0, 0, torch.zeros(1, dtype=torch.int64), known)], size)
        self._packed.setdefault(size, torch.empty_like(packed)).copy_(packed)
        while not self.graphs.has(self._chunk, size):
            self.graphs.run(self._chunk, size)

    def chunk_seconds(self, size: ChunkSize) -> float:
        """Times a captured chunk, of what it was last run for; a collective."""
        assert self.graphs is not None
        (seconds,) = seconds_of_each(partial(self.graphs.run, self._chunk, size), 1, self.device)
        return seconds

    def _chunk(self, size: ChunkSize) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        last, states = self._computed(self.state.packed_step(self._packed[size], size))
        if states is None:
            return last, None
        # One buffer for all sizes; what it replaces is kept by the captured chunks that write there.
        if len(self._chunk_states) < size.tokens:
            self._chunk_states = torch.empty_like(states)
        return last, self._chunk_states[: size.tokens].copy_(states)

    def _computed(
        self, step: Step, each: Callable[[Tensor], None] | None = None
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Runs a chunk of prompts; returns states as `prompt_states`, and those that the drafter reads."""
        if not self.drafter.reads_states and each is None:
            last = self.model.last_states(self.cache, step, self.policy)
            return (last, last), None
        assert step.cu_q is not None
        hidden, states = self.model.states(self.cache, step, self.policy)
        if each is not None:
            each(hidden)
        ends = step.cu_q[1:] - 1
        return (hidden[ends], states[ends]), states if self.drafter.reads_states else None

    def _by_slot(self, tokens: Tensor, slots: list[int]) -> tuple[Tensor, list[int] | None]:
        """Returns first tokens [n, 1] and their slots; in mode dp those of all ranks, in the order of all slots."""
        if self.layout.dp == 1:
            return tokens, slots
        of_slots = self._slots.new_full((self.sizes.slots, 1), PAST)
        of_slots[to_device(torch.tensor(slots), self.device)] = tokens
        return self._of_all(of_slots), None

    def _of_all(self, x: Tensor) -> Tensor:
        """Gathers x [n, ...] of own slots: [n * dp, ...] in the order of all ranks' slots; a collective in mode dp."""
        return x if self.layout.dp == 1 else self.comm.all_gather(x.contiguous()).transpose(0, 1).flatten(0, 1)

    def decode(self, kind: StepKind, row_tokens: float = math.inf) -> Tensor:
        """Launches a decode step, in HOP-B chunks as `chunks` says; a collective for which the host does not wait.

        Returns:
            Tokens [rows, 1 + drafts], see `DecodeState.commit`; a later step overwrites them. In mode dp of all ranks'
            slots.
        """
        taken: Tensor = self._captured(self.step, self._in_chunks(kind, row_tokens))
        return taken

    def _in_chunks(self, kind: StepKind, row_tokens: float) -> StepKind:
        return replace(kind, chunks=self.chunks(kind.rows, row_tokens))

    def _captured(self, part: Callable[[StepKind], Any], kind: StepKind) -> Any:
        """Runs a part of a step, from a captured graph if possible."""
        if self.graphs is None or self.observer is not None:
            return part(kind)
        return self.graphs.run(part, kind)

    def step(self, kind: StepKind) -> Tensor:
        """Launches all kernels of a step; arguments and result as in `decode`."""
        return self._complete(self._compute(kind), kind)

    def _draw_held(self, kind: StepKind) -> Tensor:
        """Draws the held step; both parts share a graph key, and so the graph's tensors."""
        assert self._held is not None
        return self._complete(self._held.step, kind)

    def _compute(self, kind: StepKind) -> ComputedStep:
        draft = None
        self.mark("draft")
        if kind.drafts:
            draft = self.drafter.propose(self.state, kind)
            draft = replace(draft, tokens=self.state.within_limits(draft.tokens))
        tokens = None if draft is None else draft.tokens
        self.mark("verify")
        step = self.state.decode_step(kind.rows, tokens, kind.chunks)
        policy = self.policy if kind.sparse else self.dense
        if kind.drafts:
            policy = self.drafter.verification or policy
        hidden, states = self.model.states(self.cache, step, policy)
        logits = self.model.logits(hidden)
        self.mark("accept")
        return ComputedStep(logits, states, step, draft)

    def _complete(self, computed: ComputedStep, kind: StepKind) -> Tensor:
        """Draws a computed step's tokens and commits them."""
        state, step, draft, rows, logits = self.state, computed.step, computed.draft, kind.rows, computed.logits
        followers = [f for f in self.followers if f.takes(kind)]
        if self.observer:
            live, owner = step.live, self._slots[:rows].repeat_interleave(step.max_q)
            self._observe(logits[live], owner[live], step.positions[live] + 1)
        # What greedy rows alone do not read is not computed.
        following = step.positions + 1 if kind.stochastic or kind.shaped else step.positions
        slots, shaped = self._slots[:rows], logits
        if kind.shaped:
            shaped = self._shaper().shape(logits, slots, state.uncounted(rows), following)
        drawn = self._candidates(shaped, following, state.sampling.rows(slice(0, rows)), kind, draft)
        taken, before = state.commit(rows, drawn, *((draft.tokens, draft.outcome) if draft is not None else ()))
        if kind.shaped:  # of first tokens alone: sequences with shaping have no drafts
            self._shaper().report(logits[:: step.max_q], taken[:, 0].contiguous(), slots, self.own)
        if followers:
            self.mark("choose")
            span = state.span(rows, before, state.lengths[:rows], step.max_q)
            for follower in followers:
                follower.taken(Taken(kind, span, state.active[:rows], computed.states, taken))
        self.mark(None)
        return self._of_all(taken)

    def _observe(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        if self.observer:
            self.observer(slots, positions, logits)

    def _candidates(
        self, logits: Tensor, positions: Tensor, sampling: SamplingState, kind: StepKind, draft: Draft | None = None
    ) -> Candidates:
        """Draws candidates for the tokens at `positions` [n] from logits [n, V_local]."""
        first = self.model.embedding.rows.start
        if draft is not None and draft.sampled_from is not None:
            return accepted_candidates(
                logits, first, draft.tokens, draft.sampled_from, positions, sampling, self.own, filtered=kind.filtered
            )
        flags = {"stochastic": kind.stochastic, "filtered": kind.filtered}
        return Candidates(sampled_candidates(logits, first, positions, sampling, self.own, **flags))

    def _shaper(self) -> Shaper:
        """Returns the shaper, created at its first use on all ranks alike and kept: captured steps write to it."""
        if self.shaper is None:
            spec = self.model.spec
            self.shaper = Shaper(self.sizes.slots, spec.vocab, self.model.embedding.rows, spec.eos, self.device)
        return self.shaper

    def close(self) -> None:
        """Frees captured steps; to be called before the communicator is closed."""
        if self.graphs is not None:
            self.graphs.close()
