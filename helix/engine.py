"""Requests in, tokens out.

One control plane: rank 0 schedules, and broadcasts each decision on the CPU before any rank launches what it says. A
decision covers a run of decode steps, which ranks launch back to back; only rank 0 reads tokens, and it has launched
all of a decision before it hands one out: no rank waits in a step for what a caller does with a token. Tokens are drawn
on every rank from the same gathered values, so they are the same everywhere.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comm.base import Communicator
from helix.graphs import StepGraphs, seconds_of_each
from helix.kv_cache import KVCache, Placement
from helix.layout import HelixLayout
from helix.models import Decoder
from helix.request import Output, Request
from helix.sampling import sample
from helix.scheduler import Admission, Decision, Running, Scheduler, Segment
from helix.speculation import Draft, Drafter, accepted_tokens
from helix.speculation.adaptive import Acceptance, DraftPolicy, Outcome, draft_sizes
from helix.step import PAST, DecodeState
from helix.text import OutputStream
from helix.timings import Timings

CHUNKS = 2, 4, 8  # of HOP-B, for `auto` to choose from
GAIN = 0.01  # the least share of a step that cutting it has to save


class Engine:
    """Serves requests on all ranks of a layout; every rank builds one and calls `generate` alike.

    Args:
        model: this rank's part of the model.
        cache: this rank's pages.
        max_batch: slots.
        max_length: the most tokens of one sequence, prompt and new ones.
        token_budget: the most tokens that all sequences may reserve together.
        drafter: proposes tokens that decode steps verify; None for one token a step.
        adaptive: whether rank 0 chooses how many drafts a step has, up to the drafter's limit, or all have that many.
        hopb: chunks of a decode step's batch that take turns in attention and exchange: none, a number, or auto, which
            is none until `choose_chunks`.
        tokenizer: for text and stop texts, on rank 0; without one, tokens alone.
        on_prefill: called on rank 0 with (prompt tokens done, prompt tokens of the requests admitted so far).
        observer: called on every rank before each draw with (slots [n], positions [n] that the tokens will have,
            logits [n, V_local] fp32).

    Attributes:
        admitted: what each slot in use serves.
        chosen: chunks of a step of so many rows, where `choose_chunks` has chosen.
        draft_sizes: how many drafts a step may have.
        seconds: of a step of so many rows with so many drafts, where `warm_up` has timed them.
    """

    def __init__(
        self,
        model: Decoder,
        layout: HelixLayout,
        comm: Communicator,
        cache: KVCache,
        placement: Placement,
        *,
        max_batch: int,
        max_length: int,
        token_budget: int,
        prefill_chunk: int = 1024,
        run_steps: int = 8,
        drafter: Drafter | None = None,
        adaptive: bool = True,
        hopb: str = "none",
        tokenizer: Any | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        observer: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.comm = comm
        self.cache = cache
        self.placement = placement
        self.max_batch = max_batch
        self.max_length = max_length
        self.token_budget = token_budget
        self.prefill_chunk = prefill_chunk
        self.run_steps = run_steps
        self.drafter = drafter
        self.drafts = 0 if drafter is None else drafter.limit
        self.draft_sizes = draft_sizes(self.drafts, adaptive)
        self.seconds: dict[tuple[int, int], float] = {}
        self.hopb = hopb
        self.tokenizer = tokenizer
        self.on_prefill = on_prefill
        self.observer = observer
        self.timings = Timings()
        self.device = cache.device
        max_pages = max(placement.pages(max_length + self.drafts, start) for start in range(layout.kvp))
        history = max_length + self.drafts + 1 if self.drafts else 0
        self.state = DecodeState(max_batch, max_pages, placement, self.device, history)
        self.admitted: dict[int, Admission] = {}
        self._pages: dict[int, list[int]] = {}
        self._drafting = True  # whether the last steps had drafts
        self._broken: str | None = None  # by what
        self._serving = False
        self._slots = torch.arange(max_batch, device=self.device)
        self._graphs = StepGraphs(self._decode) if comm.capturable else None
        self.chosen: dict[int, int] = {}
        # Pages are a host matter of each rank, but admission is rank 0's: it counts for all of them.
        self._kvp_free_pages = self._free_pages_by_kvp_rank()

    @torch.inference_mode()  # around each resumption: the caller's code between two outputs is not in it
    def generate(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Serves requests; a collective call.

        What rank 0 raises between steps ends the call on all ranks and frees all slots: an error of `requests`, of the
        tokenizer, of `on_prefill` or of a stop by the caller. What any rank raises in a step, as `observer` may, breaks
        the engine on all of them, since others are waiting in that step: it needs new communicators and a new engine.

        Args:
            requests: rank 0's are served, the other ranks' argument is ignored.

        Yields:
            On rank 0, an output for each token of each request, and one for each request that is refused. On the
            other ranks nothing, but they have to iterate as well.

        Raises:
            RuntimeError: the model gave NaN, a rank failed, the engine is broken, or another call is under way.
        """
        if self._broken is not None:
            self.comm.abort(self._broken)  # others may be waiting for this rank
            raise RuntimeError(
                f"this engine is broken, make a new one over new communicators: it failed with {self._broken}"
            )
        if self._serving:
            raise RuntimeError("a call of generate is under way on this engine: iterate it to its end, or close() it")
        self._serving = True
        try:
            if self.comm.rank == 0:
                yield from self._lead(requests)
            else:
                self._follow()
        finally:
            self._serving = False

    @torch.inference_mode()
    def warm_up(self, variants: Iterable[tuple[bool, bool]]) -> None:
        """Compiles kernels and captures the steps of every batch size, so that no request waits for it; a collective.

        Args:
            variants: (stochastic, filtered) of the sampling to come; the same on every rank.
        """
        for _ in self.generate([Request("warm-up", (0, 0), 2)]):
            pass
        if self._graphs is None:
            return
        sizes = {min(1 << slot.bit_length(), self.max_batch) for slot in range(self.max_batch)}
        for rows in sorted(sizes):
            self._fill(rows)
            self.choose_chunks(rows)
            if len(self.draft_sizes) > 1:
                chunks = self.chunks(rows)
                self.seconds |= {(rows, n): self.step_seconds(rows, n, chunks, kept=True) for n in self.draft_sizes}
            self._fill(0)
            for (stochastic, filtered), drafts in product(sorted(set(variants)), self.draft_sizes):
                for _ in range(2):  # once eagerly, once captured; no slot is active, so nothing changes
                    self.decode(rows, drafts, stochastic, filtered)
        torch.cuda.synchronize()

    def _fill(self, rows: int) -> None:
        """Where nothing is served yet: as many tokens as can be in the first `rows` slots, whatever they are."""
        state = self.state
        for tensor in (state.tokens, state.lengths, state.starts, state.limits, state.active, state.block_tables):
            tensor.zero_()
        if rows:
            state.active[:rows] = True
            state.lengths[:rows] = max(1, min(self.max_length, self.token_budget // rows)) - 1
            state.limits[:rows] = state.lengths[:rows] + self.drafts + 1
            tables = state.block_tables[:rows]  # different pages: one page would stay in the GPU's cache
            pages = torch.arange(tables.numel(), dtype=torch.int32, device=self.device) % self.cache.pages
            tables.copy_(pages.view_as(tables))

    def chunks(self, rows: int) -> int:
        """Into how many chunks the attention of a step of `rows` rows is cut."""
        if self.layout.kvp == 1 or self.hopb == "none":
            return 1
        return self.chosen.get(rows, 1) if self.hopb == "auto" else min(int(self.hopb), rows)

    def choose_chunks(self, rows: int) -> None:
        """Chooses the chunks of steps of `rows` rows where that is `auto`, by timing at the slots' present lengths.

        A collective; on a CPU, which does one thing at a time, there is nothing to choose.
        """
        if self.hopb != "auto" or self.layout.kvp == 1 or rows < min(CHUNKS) or not self.comm.capturable:
            return
        best, least = 1, (1 - GAIN) * self.step_seconds(rows, self.drafts, 1)
        for chunks in (n for n in CHUNKS if n <= rows):
            seconds = self.step_seconds(rows, self.drafts, chunks)
            if self.comm.broadcast_object(seconds >= least):
                break  # more chunks cost more launches: where these do not pay, others will not
            best, least = chunks, seconds
        self.chosen[rows] = best

    @torch.inference_mode()
    def step_seconds(self, rows: int, drafts: int, chunks: int, steps: int = 8, kept: bool = False) -> float:
        """Median seconds of a greedy decode step of `rows` rows, each step with its slowest rank.

        A collective, to be called between runs of steps. The slots' tokens and lengths stay what they are. What is
        captured for it stays where it is `kept`.
        """
        state = self.state
        before = state.tokens.clone(), state.lengths.clone()

        def restore() -> None:
            state.tokens.copy_(before[0])
            state.lengths.copy_(before[1])

        graphs = self._graphs
        if graphs is not None and not kept:
            graphs = StepGraphs(self._decode)
        run = graphs.run if graphs is not None else self._decode

        def step() -> None:
            run(rows, drafts, False, False, chunks)

        seconds_of_each(step, 3, self.device, restore)  # eagerly, captured, replayed
        self.comm.barrier()
        seconds = seconds_of_each(step, steps, self.device, restore)
        self.comm.check()
        if graphs is not None and not kept:
            graphs.close()
        return statistics.median(max(of_ranks) for of_ranks in zip(*self.comm.all_gather_object(seconds), strict=True))

    def close(self) -> None:
        """Gives captured steps up; to be called before the communicator is closed."""
        if self._graphs is not None:
            self._graphs.close()

    # ---- rank 0

    def _lead(self, requests: Iterable[Request]) -> Iterator[Output]:
        try:
            yield from self._serve(requests)
            self._release_all()
        except BaseException as error:
            try:
                self._release_all()
            except Exception as failed:
                if isinstance(error, GeneratorExit):  # which nobody would see
                    raise
                error.add_note(f"then the other ranks could not be told to end: {type(failed).__name__}: {failed}")
            raise

    def _serve(self, requests: Iterable[Request]) -> Iterator[Output]:
        self.timings = Timings(kv_tokens=[0] * self.layout.kvp, acceptance=Acceptance(self.drafts))
        policy = DraftPolicy(self.draft_sizes, self.seconds)
        scheduler = Scheduler(
            self.placement.pages,
            self._kvp_free_pages,
            self.token_budget,
            self.max_batch,
            self.prefill_chunk,
            self.run_steps,
            self.drafts,
            policy.pace,
        )
        streams: dict[int, OutputStream] = {}
        prompt_tokens = 0
        for request in requests:
            reason = self.refusal(request) or scheduler.submit(request)
            if reason:
                yield Output(request.id, len(request.prompt), (), "", "", "error", reason)
        while (decision := scheduler.decide()) is not None:
            prompt_tokens += sum(len(a.prompt) for a in decision.admit)
            for a in decision.admit:
                streams[a.slot] = OutputStream(scheduler.running[a.slot].request, self.model.spec.eos, self.tokenizer)
            with self._together():
                self.comm.broadcast_object(decision)
                begin = time.perf_counter()
                drawn = self._execute(decision)
            for step_tokens in self._timed(drawn, begin, decision, prompt_tokens, scheduler, policy):
                for slot, token in step_tokens:
                    if scheduler.running[slot].finished:
                        continue  # computed past its stop, thrown away
                    output = streams[slot].push(token)
                    scheduler.took(slot, output.finish_reason is not None)
                    yield output
            self._check()
            for slot in (s.slot for s in scheduler.running.values() if s.finished):
                policy.forget(slot)  # with what it showed in this run
            self._note_kv(scheduler.running.values())

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be served by this engine, whatever else it serves; None where it can."""
        spec = self.model.spec
        if len(request.prompt) == 0:
            return "the prompt is empty"
        ids = np.asarray(request.prompt)
        outside = ids[(ids < 0) | (ids >= spec.vocab)]
        if len(outside):
            return f"prompt token id {outside[0]} is outside the vocabulary [0, {spec.vocab})"
        if request.max_new_tokens < 1:
            return f"max_new_tokens={request.max_new_tokens} must be at least 1"
        length = len(request.prompt) + request.max_new_tokens
        if length > spec.max_positions:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed the model's "
                f"{spec.context}"
            )
        if self.max_length < length <= self.token_budget:  # beyond that the scheduler says why
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed max_length="
                f"{self.max_length}"
            )
        if request.stop and self.tokenizer is None:
            return "stop texts need a tokenizer, and the model directory has none"
        return None

    def _timed(
        self,
        drawn: Sequence[_HostCopy],
        begin: float,
        decision: Decision,
        prompt_tokens: int,
        scheduler: Scheduler,
        policy: DraftPolicy,
    ) -> Iterator[list[tuple[int, int]]]:
        """Passes a decision's tokens on and notes when they came, and which drafts were kept."""
        last, steps = begin, iter(drawn)
        if decision.prefill:
            prefill = next(steps)
            tokens = prefill.read()
            self.timings.prefill_s += prefill.came - last
            last = prefill.came
            self.timings.prefill_tokens += sum(s.end - s.begin for s in decision.prefill)
            if self.on_prefill:
                self.on_prefill(self.timings.prefill_tokens, prompt_tokens)
            yield tokens
        seconds: list[float] = []
        outcomes: list[Outcome] = []
        for step in steps:
            tokens = step.read()
            seconds.append(step.came - last)
            last = step.came
            of_step = [
                Outcome(slot, min(decision.drafts, policy.limit(slot), scheduler.running[slot].left - 1), taken - 1)
                for slot, taken in Counter(slot for slot, _ in tokens).items()
                if not scheduler.running[slot].finished
            ]
            self.timings.step(seconds[-1], decision.drafts, of_step)
            outcomes += of_step
            yield tokens
        policy.observe(decision.rows, decision.drafts, seconds, outcomes)

    def _note_kv(self, running: Iterable[Running]) -> None:
        held = [0] * self.layout.kvp
        for s in running:
            for k in range(self.layout.kvp):
                held[k] += self.layout.local_length(s.cached, k, self.placement.append_block, s.start)
        self.timings.kv_tokens = [max(a, b) for a, b in zip(self.timings.kv_tokens, held, strict=True)]

    def _release_all(self) -> None:
        """Frees every slot on every rank and ends their loops; nothing where the engine is broken."""
        if self._broken is not None:
            return
        with self._together():
            if held := tuple(self.admitted):
                self.comm.broadcast_object(decision := Decision(0, held, (), (), 0, 0, False, False))
                self._execute(decision)
                self._check()
            self.comm.broadcast_object(None)

    # ---- every rank

    def _follow(self) -> None:
        """Does what rank 0 decides until it says that this was all."""
        decision: Decision | None = None
        with self._together():
            while (decision := self.comm.broadcast_object(decision)) is not None:
                self._execute(decision)
                self._check()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all ranks do alike: others wait for a rank that fails there, so that none of them can go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _execute(self, decision: Decision) -> list[_HostCopy]:
        """Launches what a decision says; on rank 0, returns the tokens of the prefill, if any, and of each step."""
        drawn: list[_HostCopy] = []

        def keep(tokens: Tensor, slots: Sequence[int] | None = None) -> None:
            if self.comm.rank == 0:
                drawn.append(_HostCopy(tokens, slots, self._check))

        for slot in decision.retire:
            self.state.retire(slot)
            self.cache.give_back(self._pages.pop(slot))
            del self.admitted[slot]
            if self.drafter is not None:
                self.drafter.retire(slot)
        for admission in decision.admit:
            self.admit(admission)
        if decision.prefill:
            keep(*self._prefill(decision.prefill, decision))
        if self.drafter is not None and decision.decode_steps:
            if decision.drafts and not self._drafting:
                self.drafter.catch_up(self.state)
            self._drafting = decision.drafts > 0
        if decision.draft_limits:
            limits = torch.tensor(decision.draft_limits)
            self.state.draft_limits[: len(limits)] = limits.to(self.device)
        for _ in range(decision.decode_steps):
            keep(self.decode(decision.rows, decision.drafts, decision.stochastic, decision.filtered))
        return drawn

    def _check(self, wait: bool = True) -> None:
        """As `Communicator.check`, of all collectives of a step."""
        self.comm.check(wait)
        if self.drafter is not None:
            self.drafter.check(wait)

    def admit(self, admission: Admission) -> None:
        """Takes a slot and its pages; every rank alike."""
        pages = self.cache.take(self.placement.pages(admission.reserved, admission.start))
        self.admitted[admission.slot] = admission
        self._pages[admission.slot] = pages
        self.state.admit(admission.slot, admission.start, pages, admission.limit, admission.prompt)
        self.state.sampling.set(admission.slot, admission.sampling)
        if self.drafter is not None:
            self.drafter.admit(admission)

    def _prefill(self, segments: tuple[Segment, ...], decision: Decision) -> tuple[Tensor, list[int]]:
        """One chunk of prompts: the first tokens [n, 1] of those that end with it, and their slots."""
        prompts = [
            (s.slot, s.begin, torch.from_numpy(np.asarray(self.admitted[s.slot].prompt[s.begin : s.end])).long())
            for s in segments
        ]
        hidden = self.model.hidden(self.cache, self.state.prefill_step(prompts))
        if self.drafter is not None:
            self.drafter.prefill(self.state, prompts)
        ends = torch.tensor([s.end - s.begin for s in segments]).cumsum(0) - 1
        last = [i for i, s in enumerate(segments) if s.last]
        if not last:
            return self._slots.new_full((1, 1), PAST), [segments[0].slot]
        ending = [segments[i].slot for i in last]
        slots = torch.tensor(ending, device=self.device)
        lengths = torch.tensor([segments[i].end for i in last], device=self.device)
        live = torch.ones_like(slots, dtype=torch.bool)
        tokens = self._draw(
            hidden[ends[last].to(self.device)], slots, lengths, live, decision.stochastic, decision.filtered
        )
        self.state.activate(slots, tokens, lengths)
        return tokens[:, None], ending

    def decode(self, rows: int, drafts: int = 0, stochastic: bool = False, filtered: bool = False) -> Tensor:
        """One decode step of slots [0, rows): tokens [rows, 1 + drafts] as `DecodeState.commit` gives them.

        On every rank; a collective that waits for nothing.

        What it returns is overwritten by a later step.
        """
        if self._graphs is None or self.observer is not None:
            return self._decode(rows, drafts, stochastic, filtered, self.chunks(rows))
        return self._graphs.run(rows, drafts, stochastic, filtered, self.chunks(rows))

    def _decode(self, rows: int, drafts: int, stochastic: bool, filtered: bool, chunks: int) -> Tensor:
        self.model.pipeline.chunks = chunks
        draft = None
        if drafts:
            assert self.drafter is not None
            draft = self.drafter.propose(self.state, rows, drafts, stochastic, filtered)
            draft = replace(draft, tokens=self.state.within_limits(draft.tokens))
        tokens = None if draft is None else draft.tokens
        step = self.state.decode_step(rows, tokens)
        hidden = self.model.hidden(self.cache, step)
        slots = self._slots[:rows].repeat_interleave(step.max_q) if drafts else slice(0, rows)
        drawn = self._draw(hidden, slots, step.positions + 1, step.live, stochastic, filtered, draft).view(rows, -1)
        if draft is not None and draft.outcome is not None:
            drawn[:, :-1] = torch.where(drawn[:, :-1] < 0, drawn[:, :-1], draft.outcome)  # a broken row stays one
        return self.state.commit(drawn, tokens)

    def _draw(
        self,
        hidden: Tensor,
        slots: Tensor | slice,
        positions: Tensor,
        live: Tensor,
        stochastic: bool,
        filtered: bool,
        draft: Draft | None = None,
    ) -> Tensor:
        """Next tokens [n] of `slots`, for global `positions` [n], from hidden [n, H]; rows not `live` are padding."""
        logits = self.model.logits(hidden)
        if self.observer:
            self.observer(self._slots[slots][live], positions[live], logits[live])
        first, sampling = self.model.embedding.rows.start, self.state.sampling
        if draft is not None and draft.sampled_from is not None:
            of_rows = sampling.rows(slice(0, len(draft.tokens)))
            return accepted_tokens(
                logits, first, draft.tokens, draft.sampled_from, positions, of_rows, self.comm, filtered=filtered
            ).flatten()
        return sample(
            logits, first, positions, sampling.rows(slots), self.comm, stochastic=stochastic, filtered=filtered
        )

    def _free_pages_by_kvp_rank(self) -> list[int]:
        free = self.comm.all_gather_object(self.cache.free_pages)
        groups = self.layout.kvp_groups()
        return [min(free[group[k]] for group in groups) for k in range(self.layout.kvp)]


class _HostCopy:
    """A step's tokens on their way to rank 0's host; the other ranks have them on the device and read nothing.

    Args:
        tokens: [n, m], in each row those that a sequence takes, then PAST.
        slots: of the rows; None for 0, 1, ..
        check: called with wait=False once the step has ended; raises where its tokens are none.

    Attributes:
        came: when the tokens were there, by `time.perf_counter`; for those of a GPU, when they were read.
    """

    def __init__(self, tokens: Tensor, slots: Sequence[int] | None, check: Callable[[bool], None]) -> None:
        self._tokens = _to_host(tokens)
        self._slots = range(len(tokens)) if slots is None else slots
        self._check = check
        self._event = torch.cuda.Event() if tokens.is_cuda else None
        if self._event:
            self._event.record()
        self.came = time.perf_counter()

    def read(self) -> list[tuple[int, int]]:
        """(slot, token) of each token."""
        if self._event:
            self._event.synchronize()
            self.came = time.perf_counter()
        self._check(False)
        taken = self._tokens != PAST
        slots = [self._slots[row] for row in taken.nonzero()[:, 0].tolist()]
        return _checked(list(zip(slots, self._tokens[taken].tolist(), strict=True)))


def _to_host(x: Tensor) -> Tensor:
    """A copy that is there once the stream has come so far; pinned, so that the host need not wait for it."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=x.is_cuda)


def _checked(tokens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if min((token for _, token in tokens), default=0) < 0:
        raise RuntimeError(
            "the model's logits are NaN: a weight, an activation or a rank's partial attention is not a number "
            "(try model.dtype=float32; if it stays, the checkpoint or this machine is at fault; where another rank "
            "says that it waited for one, that is the cause)"
        )
    return tokens


__all__ = ["Engine", "Output", "Request"]
