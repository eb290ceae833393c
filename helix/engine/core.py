"""The engine: serves requests on all ranks and yields their tokens.

One control plane: rank 0 decides, and broadcasts each decision on the CPU before any rank launches it. A decision
covers a chunk of prompts and a run of decode steps. Rank 0 yields tokens while the next decision is computed: no rank
waits in a step for the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from helix.config import MAX_QUERIES, ScheduleConfig
from helix.engine.block_tables import BlockTables
from helix.engine.decision import Decision, StepKind
from helix.engine.draft_policy import Acceptance, DraftPolicy, draft_sizes
from helix.engine.inbox import Inbox
from helix.engine.pages import PagePool
from helix.engine.prefill_time import PrefillTime, doubling_depth
from helix.engine.prefix import PrefixTree
from helix.engine.request import Request, RequestUpdate
from helix.engine.scheduler import LONGEST_S, RunnerTraits, Scheduler
from helix.engine.serving import Serving
from helix.engine.snapshots import StateSnapshots
from helix.engine.timings import Timings
from helix.worker.autotune import choose_chunks, fill, step_seconds, tried_chunks
from helix.worker.chunk_size import DEEP, LONG, SEQUENCES, SIZES
from helix.worker.model_runner import ModelRunner
from helix.worker.rehearsal import rehearse
from helix.worker.step_tokens import StepTokens
from helix.worker.tiered_cache import TieredCache

LARGE = 2048  # tokens from twice which on chunks use the same kernels, at any depth
RUN_STEPS = 32  # most per decision: pages are allocated for them, however short schedule.run_ms makes runs
BEATS = 4  # messages of an idle rank 0 within the time after which other ranks give up


class Engine:
    """Server of requests on all ranks of a layout; every rank builds one and calls `serve` alike.

    Args:
        runner: executes decisions on this rank.
        serving: settings of the scheduler.
        prefill_chunk: most prompt tokens in one step.
        adaptive: whether rank 0 chooses the drafts of each step, up to the drafter's limit; else all have the limit.
        prefix_cache: whether pages are kept for prompts with the same prefix.
        timeout_s: time that the other ranks wait for a message of rank 0.

    Attributes:
        on_yielded: called on rank 0 when the updates of a step have been yielded.
        draft_sizes: numbers of drafts that a step may have.
        run_steps: most decode steps of a decision.
        step_seconds: (rows, drafts) -> seconds of a step, from `warm_up`.
        timings: statistics of the last call, on rank 0.
        tables: allocators of pages, on rank 0: one, or in mode dp one for each rank.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        schedule: ScheduleConfig | None = None,
        prefill_chunk: int = 1024,
        adaptive: bool = True,
        prefix_cache: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        self.runner = runner
        self.comm = runner.comm
        self.schedule = schedule or ScheduleConfig()
        self.prefill_chunk = prefill_chunk
        self.run_steps = RUN_STEPS
        self.draft_sizes = draft_sizes(runner.drafts, adaptive)
        self.step_seconds: dict[tuple[int, int], float] = {}
        self.prefix_cache = prefix_cache
        self.timeout_s = timeout_s
        self.on_yielded: Callable[[], None] = lambda: None
        self.timings = Timings()
        self._broken: str | None = None  # the error that broke it
        self._calling = False
        self._held: set[int] = set()  # slots in use
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # A page number means a page on every rank (mode dp: one of each rank): rank 0 allocates for all of them.
        self._pages = min(self.comm.all_gather_object(runner.cache.pages))
        self.tables = self._empty_tables()

    @torch.inference_mode()  # around each resumption: the caller's code between two updates is not in it
    def serve(self, inbox: Inbox | None) -> Iterator[RequestUpdate]:
        """Serves an inbox until it is closed and all requests have ended; a collective call.

        The caller on rank 0 must iterate without delay: no further run is launched before it has taken the updates.
        The other ranks give up after `timeout_s` without a message of rank 0.

        An error on rank 0 between steps, or a stop by the caller, ends the call on all ranks and frees all slots. An
        error of any rank in a step, as `observer` may raise, breaks the engine on all of them, since others are waiting
        in that step: new communicators and a new engine are needed.

        Args:
            inbox: that of rank 0 is served, other ranks' are ignored.

        Yields:
            On rank 0, updates of requests: new tokens, prefill progress, or the end. On the other ranks nothing, but
            they must iterate as well.

        Raises:
            RuntimeError: the model gave NaN, a rank failed, the engine is broken, or another call is under way.
        """
        if self._broken is not None:
            self.comm.abort(self._broken)  # others may be waiting for this rank
            raise RuntimeError(
                f"this engine is broken, make a new one over new communicators: it failed with {self._broken}"
            )
        if self._calling:
            raise RuntimeError("a call is under way on this engine: iterate it to its end, or close() it")
        self._calling = True
        self.runner.state.draft_limits.fill_(MAX_QUERIES)  # a new policy does not know those of the last call
        try:
            if self.comm.rank > 0:
                self._follow()
            else:
                assert inbox is not None, "rank 0 serves an inbox"
                yield from self._lead(inbox)
        finally:
            self._calling = False

    @torch.inference_mode()
    def warm_up(
        self,
        variants: Iterable[StepKind],
        later: Iterable[StepKind] = (),
        mark: Callable[[str], None] = lambda phase: None,
        *,
        chunks: bool = False,
    ) -> None:
        """Compiles kernels and captures the steps of every batch size, so that no request waits for that; a collective.

        Args:
            variants: kinds of sampling to capture; the same on every rank.
            later: kinds of sampling whose kernels are compiled now; their steps are captured when they run for the
                second time, which delays that step by about two launches.
            mark: called at the end of each phase, with its name.
            chunks: whether the common sizes of prompt chunks are captured, too.
        """
        runner = self.runner
        tokens = self._pages * runner.placement.stripes.page_tokens
        sizes = sorted({min(1 << slot.bit_length(), runner.max_batch) for slot in range(runner.max_batch)})
        first = runner.policy.from_tokens
        sparse = [False] if first is None else [True] if first == 0 else [False, True]
        kinds, more = (
            [replace(v, drafts=n, sparse=s) for v, n, s in product(sorted(set(of)), self.draft_sizes, sparse)]
            for of in (variants, later)
        )
        if runner.device.type == "cuda":
            steps = (
                replace(kind, rows=rows, chunks=chunks)
                for rows, kind in product(sizes, [*kinds, *more])
                for chunks in tried_chunks(runner, rows)
            )
            rehearse(runner, self._chunks(tokens), steps)
            mark("compile")
        for _ in self.serve(Inbox.of([Request("warm-up", (0, 0), 2)])):
            pass
        # Discards timings taken during warm-up.
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        self.tables = self._empty_tables()  # the timings below write to any page
        mark("first_request")
        if runner.graphs is None:
            return
        if chunks and runner.pads:
            of_chunks = runner.first_sizes(self._room(tokens) // runner.layout.kvp)
            for size in of_chunks:
                runner.capture_chunk(size)
            # Else the first requests would come in chunks of few tokens, as if these took long. The shallowest is last.
            for count, size in {size.tokens: size for size in of_chunks if size.sequences == SEQUENCES[0]}.items():
                if count.bit_count() == 1:
                    self._times.observe(self._times.work(0, count), runner.chunk_seconds(size))
            mark("chunks")
        for rows in sizes:
            longest = max(1, min(runner.max_length, tokens // rows)) - 1
            choose_chunks(runner, rows, longest)
            fill(runner, rows, longest)
            if len(self.draft_sizes) > 1:
                for drafts in self.draft_sizes:
                    kind = StepKind(rows, drafts, chunks=runner.chunks(rows))
                    self.step_seconds[rows, drafts] = step_seconds(runner, kind, kept=True)
            fill(runner, 0, 0)
            for kind in kinds:
                for row_tokens in dict.fromkeys((longest, 0)) if runner.chunks(rows) > 1 else (0,):
                    for _ in range(2):  # once eagerly, once captured; no slot is active, so no state changes
                        runner.decode(replace(kind, rows=rows), row_tokens)
        torch.cuda.synchronize()
        mark("capture")

    def _chunks(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yields (prompts, tokens, depth) of chunks that use different kernels.

        Args:
            tokens: tokens of KV that all pages hold.
        """
        room, deep = self._room(tokens), DEEP * self.runner.layout.kvp
        most = max(min(self.prefill_chunk, room), 1)
        small = [1 << i for i in range(LARGE.bit_length()) if 1 << i <= most]
        yield from ((1, size, 0) for size in sorted({*small, min(2 * LARGE, most), most}))
        yield from ((1, size, min(deep, room - size)) for size in small if size < room)
        slots = self.runner.max_batch
        several = sorted({min(1 << i, slots) for i in range(1, slots.bit_length() + 1)} - {1})
        stripes, shares = self.runner.placement.stripes, not self.runner.drafter.own_pages
        for n, depth in product(several, [0, min(deep, room - 1)]):
            if shares or n * stripes.pages_for(depth + 1) <= self._pages:
                yield n, 1, depth

    def _room(self, tokens: int) -> int:
        return min(tokens, self.runner.max_length) - 1

    def close(self) -> None:
        """Frees captured steps and host memory; to be called before the communicator is closed."""
        self.runner.close()
        self.runner.cache.close()

    # ---- rank 0

    def _lead(self, inbox: Inbox) -> Iterator[RequestUpdate]:
        try:
            yield from self._updates(inbox)
            self._release_all()
        except BaseException as error:
            try:
                self._release_all()
            except Exception as failed:
                if isinstance(error, GeneratorExit):  # its notes would be lost
                    raise
                error.add_note(f"then the other ranks could not be told to end: {type(failed).__name__}: {failed}")
            raise

    def _updates(self, inbox: Inbox) -> Iterator[RequestUpdate]:
        runner = self.runner
        self.timings = timings = Timings(acceptance=Acceptance(runner.drafts))
        policy = DraftPolicy(self.draft_sizes, self.step_seconds)
        traits = RunnerTraits(
            runner.max_batch * runner.layout.dp,
            self.prefill_chunk,
            runner.cache.remedy,
            self.run_steps,
            runner.drafts,
            keep_drawn=not runner.drafter.lags,
            sparse_from=runner.policy.from_tokens,
            lacking=runner.lacking,
            chunk_sizes=tuple(size for size in SIZES if size <= min(runner.longest, LONG)) if runner.pads else (),
            # Each chunk fetches the keys before it from host memory: shorter ones would wait for the link.
            longest_s=math.inf if isinstance(runner.cache, TieredCache) else LONGEST_S,
        )
        scheduler = Scheduler(self.tables, self._times, traits, self.schedule, policy.pace)
        serving = Serving(
            runner,
            scheduler,
            self._times,
            policy,
            timings,
            refusal=self.refusal,
            launch=self._launch,
            beat_s=self.timeout_s / BEATS,
            on_yielded=self.on_yielded,
        )
        try:
            yield from serving.outputs(inbox)
        finally:
            layout, block = runner.layout, runner.placement.append_block
            timings.kv_tokens = [
                sum(
                    layout.local_length(length, k, block, start)
                    for slot, length, start in timings.held
                    if slot % layout.dp == home
                )
                for home in range(layout.dp)
                for k in range(layout.kvp)
            ]

    def _launch(self, decision: Decision) -> list[StepTokens]:
        with self._together():
            self.comm.broadcast_object(decision)
            return self._execute(decision)

    def _execute(self, decision: Decision) -> list[StepTokens]:
        """Launches this rank's share of a decision."""
        layout = self.runner.layout
        self._held = (self._held - {*decision.retire}) | {admission.slot for admission in decision.admit}
        return self.runner.execute(decision.share(layout.dp_rank(self.comm.rank), layout.dp))

    def refusal(self, request: Request) -> str | None:
        """Returns the reason why this engine can never serve a request; None if it can."""
        spec = self.runner.model.spec
        if len(request.prompt) == 0:
            return "the prompt is empty"
        ids = np.asarray(request.prompt)
        outside = ids[(ids < 0) | (ids >= spec.vocab)]
        if len(outside):
            return f"prompt token id {outside[0]} is outside the vocabulary [0, {spec.vocab})"
        if (token := max(request.sampling.logit_bias, default=0)) >= spec.vocab:
            return f"logit_bias token {token} is outside the vocabulary [0, {spec.vocab})"
        if request.max_new_tokens < 1:
            return f"max_new_tokens={request.max_new_tokens} must be at least 1"
        length = len(request.prompt) + request.max_new_tokens
        if length > spec.max_positions:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed the model's "
                f"{spec.context}"
            )
        if length > self.runner.max_length:
            return (
                f"prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {length} tokens of "
                f"KV, and a sequence may have max_length={self.runner.max_length} ({self.runner.cache.remedy})"
            )
        return None

    def _release_all(self) -> None:
        """Frees every slot on every rank and ends their loops; does nothing if the engine is broken."""
        if self._broken is not None:
            return
        with self._together():
            if held := tuple(self._held):
                self.tables = self._empty_tables()  # pages of unread decisions have unknown content
                self.comm.broadcast_object(decision := Decision.nothing(held))
                self._execute(decision)
                self.runner.check()
            self.comm.broadcast_object(None)

    def _empty_tables(self) -> list[BlockTables]:
        runner, times, stripes = self.runner, self._times, self.runner.placement.stripes
        most = self._pages if runner.drafter.own_pages else None
        # A draft model's windows would lack what lies before a snapshot.
        keeps = self.prefix_cache and not runner.drafter.lacking
        places = (runner.cache.snapshots, runner.cache.host_snapshots) if keeps else (0, 0)

        def empty() -> BlockTables:
            tree = PrefixTree(PagePool(self._pages), stripes, times.cost)
            return BlockTables(tree, self.prefix_cache, most, StateSnapshots(*places, stripes.tokens, times.work))

        return [empty() for _ in range(runner.layout.dp)]

    # ---- every rank

    def _follow(self) -> None:
        """Executes rank 0's decisions until it sends None; waits up to `timeout_s` for each."""
        decision: Decision | None = None
        before: torch.cuda.Event | None = None
        with self._together():
            self.comm.limit_waits(self.timeout_s)
            while (decision := self.comm.broadcast_object(decision)) is not None:
                self._execute(decision)
                if before is not None:
                    before.synchronize()  # launches no further ahead than rank 0
                if self.comm.device.type == "cuda":
                    (before := torch.cuda.Event()).record()
                self.runner.check(wait=False)
            self.runner.check()
            self.comm.limit_waits(None)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Marks the engine broken if a collective section raises: the other ranks wait in it and cannot go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise


__all__ = ["Engine", "Request"]
