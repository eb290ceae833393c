"""Requests in, tokens out.

One control plane: rank 0 decides, and broadcasts each decision on the CPU before any rank launches what it says. A
decision covers a chunk of prompts and a run of decode steps. Rank 0 hands tokens out while what comes next is computed:
no rank waits in a step for what a caller does with a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch

from helix.autotune import choose_chunks, fill, step_seconds, tried_chunks
from helix.block_tables import BlockTables
from helix.buffers import doubling_depth
from helix.config import ScheduleConfig
from helix.decision import Decision, StepKind
from helix.inbox import Inbox
from helix.model_runner import ModelRunner, StepTokens
from helix.pages import PagePool
from helix.prefill_time import PrefillTime
from helix.prefix import PrefixTree
from helix.rehearsal import rehearse
from helix.request import Delta, Output, Request
from helix.scheduler import Scheduler
from helix.serving import Serving
from helix.speculation.adaptive import Acceptance, DraftPolicy, draft_sizes
from helix.text import OutputStream
from helix.timings import Timings

T = TypeVar("T")
LARGE_CHUNK = 1024  # tokens: a longer one takes the same kernels
DEEP = 32 << 10  # tokens before a chunk that then takes kernels for many keys
RUN_STEPS = 32  # of a decision, at most: pages are taken for so many, however short schedule.run_ms makes runs
BEATS = 4  # times that the others hear from an idle rank 0 before they give up


class Engine:
    """Serves requests on all ranks of a layout; every rank builds one and calls `generate` or `serve` alike.

    Args:
        runner: this rank's part of all that a decision needs.
        schedule: how requests share the ranks.
        prefill_chunk: the most prompt tokens in one step.
        adaptive: whether rank 0 chooses how many drafts a step has, up to the drafter's limit, or all have that many.
        prefix_cache: whether what was computed is kept for prompts that begin alike.
        timeout_s: so long the other ranks wait for a word of rank 0 in `serve`.
        tokenizer: for text and stop texts of `generate`, on rank 0; without one, tokens alone.
        on_prefill: called on rank 0 with (prompt tokens done, prompt tokens of the requests admitted so far).

    Attributes:
        draft_sizes: how many drafts a step may have.
        run_steps: the most decode steps of a decision.
        step_seconds: (rows, drafts) -> seconds of a step, from `warm_up`.
        timings: of the last call, on rank 0.
        tables: who has which page, on rank 0.
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
        tokenizer: Any | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
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
        self.tokenizer = tokenizer
        self.on_prefill = on_prefill
        self.timings = Timings()
        self._broken: str | None = None  # by what
        self._calling = False
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        # One number is a page on every rank: rank 0 counts for all of them.
        self._pages = min(self.comm.all_gather_object(runner.cache.pages))
        self.tables = self._empty_tables()

    @torch.inference_mode()  # around each resumption: the caller's code between two outputs is not in it
    def generate(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Serves a list of requests, with text; a collective call.

        What rank 0 raises between steps ends the call on all ranks and frees all slots: an error of `requests`, of the
        tokenizer, of `on_prefill` or of a stop by the caller. What any rank raises in a step, as `observer` may, breaks
        the engine on all of them, since others are waiting in that step: it needs new communicators and a new engine.

        Args:
            requests: rank 0's are served, the other ranks' argument is ignored; no two have one id.

        Yields:
            On rank 0, an output for each token of each request, and one for each request that is refused. On the
            other ranks nothing, but they have to iterate as well.

        Raises:
            RuntimeError: the model gave NaN, a rank failed, the engine is broken, or another call is under way.
        """
        yield from self._call(lambda: self._texts(requests), None)

    @torch.inference_mode()
    def serve(self, inbox: Inbox | None) -> Iterator[Delta]:
        """Serves what comes in until the inbox is closed and all has ended; a collective call.

        Whoever iterates on rank 0 takes outputs at once: a run is not followed by another one before they are taken.
        The other ranks give up where they hear nothing of rank 0 for `timeout_s`. Errors are as in `generate`.

        Args:
            inbox: rank 0's; the other ranks' argument is ignored.

        Yields:
            On rank 0, what is new of a request: tokens, how far its prompt is, or why it has ended. Stop texts are
            not looked for.
        """
        assert inbox is not None or self.comm.rank > 0, "rank 0 serves an inbox"
        yield from self._call(lambda: self._deltas(inbox or Inbox()), self.timeout_s)

    @torch.inference_mode()
    def warm_up(
        self,
        variants: Iterable[StepKind],
        later: Iterable[StepKind] = (),
        mark: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """Compiles kernels and captures the steps of every batch size, so that no request waits for it; a collective.

        Args:
            variants: how tokens are to be drawn; the same on every rank.
            later: of sampling that may come: steps whose kernels are compiled now, and which are captured when they run
                for the second time. Who decodes then waits for it, as long as two steps take to be launched.
            mark: called where a phase ends, with its name.
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
        for _ in self.generate([Request("warm-up", (0, 0), 2)]):
            pass
        # What was timed meanwhile says nothing.
        self._times = PrefillTime(doubling_depth(runner.model.spec))
        self.tables = self._empty_tables()  # what follows writes to any page
        mark("first_request")
        if runner.graphs is None:
            return
        for rows in sizes:
            fill(runner, rows, max(1, min(runner.max_length, tokens // rows)) - 1)
            choose_chunks(runner, rows)
            if len(self.draft_sizes) > 1:
                for drafts in self.draft_sizes:
                    kind = StepKind(rows, drafts, chunks=runner.chunks(rows))
                    self.step_seconds[rows, drafts] = step_seconds(runner, kind, kept=True)
            fill(runner, 0, 0)
            for kind in kinds:
                for _ in range(2):  # once eagerly, once captured; no slot is active, so nothing changes
                    runner.decode(replace(kind, rows=rows))
        torch.cuda.synchronize()
        mark("capture")

    def _chunks(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Chunks that take kernels of their own: by tokens, by prompts in one, and by how deep in a context they are.

        Args:
            tokens: of KV that there are pages for.
        """
        room = min(tokens, self.runner.max_length) - 1
        most = max(min(self.prefill_chunk, room), 1)
        sizes = [1 << i for i in range(LARGE_CHUNK.bit_length()) if 1 << i < most]
        yield from ((1, size, 0) for size in (*sizes, most))
        yield from ((1, size, DEEP) for size in sizes if size + DEEP <= room)
        slots = self.runner.max_batch
        several = sorted({min(1 << i, slots) for i in range(1, slots.bit_length() + 1)} - {1})
        yield from product(several, [1], [0, DEEP] if room >= 1 + DEEP else [0])

    def close(self) -> None:
        """Gives captured steps and memory of the host up; to be called before the communicator is closed."""
        self.runner.close()
        self.runner.cache.close()

    # ---- rank 0

    def _lead(self, outputs: Iterator[T]) -> Iterator[T]:
        try:
            yield from outputs
            self._release_all()
        except BaseException as error:
            try:
                self._release_all()
            except Exception as failed:
                if isinstance(error, GeneratorExit):  # which nobody would see
                    raise
                error.add_note(f"then the other ranks could not be told to end: {type(failed).__name__}: {failed}")
            raise

    def _texts(self, requests: Iterable[Request]) -> Iterator[Output]:
        inbox, streams = Inbox(), dict[str | int, OutputStream]()
        for request in requests:
            if reason := self._text_refusal(request, streams):
                yield Output(request.id, len(request.prompt), (), "", "", "error", reason)
            else:
                streams[request.id] = OutputStream(request, self.runner.model.spec.eos, self.tokenizer)
                inbox.submit(request)
        inbox.close()
        for delta in self._deltas(inbox):
            if delta.finish_reason == "error":
                yield Output(delta.id, delta.prompt_tokens, (), "", "", "error", delta.reason)
            for token in delta.new_ids:
                if streams[delta.id].ended:
                    break  # computed behind its stop text, thrown away
                yield (output := streams[delta.id].push(token, delta.logprobs))
                if output.finish_reason is not None:
                    inbox.abort(delta.id)

    def _text_refusal(self, request: Request, streams: dict[str | int, OutputStream]) -> str | None:
        if request.stop and self.tokenizer is None:
            return "stop texts need a tokenizer, and the model directory has none"
        return f"two requests have id={request.id!r}" if request.id in streams else None

    def _deltas(self, inbox: Inbox) -> Iterator[Delta]:
        runner, settings = self.runner, self.schedule
        self.timings = timings = Timings(acceptance=Acceptance(runner.drafts))
        policy = DraftPolicy(self.draft_sizes, self.step_seconds)
        scheduler = Scheduler(
            self.tables,
            self._times,
            max_batch=runner.max_batch,
            prefill_chunk=self.prefill_chunk,
            run_steps=self.run_steps,
            run_s=settings.run_ms / 1e3,
            stall_s=settings.stall_ms / 1e3,
            decode_share=settings.decode_share,
            patience_s=settings.patience_s,
            lease=settings.lease,
            drafts=runner.drafts,
            keep_drawn=not runner.drafter.lags,
            pace=policy.pace,
            sparse_from=runner.policy.from_tokens,
            remedy=runner.cache.remedy,
        )
        serving = Serving(
            runner,
            scheduler,
            self._times,
            policy,
            timings,
            refusal=self.refusal,
            launch=self._launch,
            beat_s=self.timeout_s / BEATS,
            on_prefill=self.on_prefill,
        )
        try:
            yield from serving.outputs(inbox)
        finally:
            layout, block = runner.layout, runner.placement.append_block
            timings.kv_tokens = [
                sum(layout.local_length(length, k, block, start) for length, start in timings.held)
                for k in range(layout.kvp)
            ]

    def _launch(self, decision: Decision) -> list[StepTokens]:
        with self._together():
            self.comm.broadcast_object(decision)
            return self.runner.execute(decision)

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be served by this engine, whatever else it serves; None where it can."""
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
        """Frees every slot on every rank and ends their loops; nothing where the engine is broken."""
        if self._broken is not None:
            return
        with self._together():
            if held := tuple(self.runner.admitted):
                self.tables = self._empty_tables()  # what was under way leaves nothing that can be relied on
                self.comm.broadcast_object(decision := Decision.nothing(held))
                self.runner.execute(decision)
                self.runner.check()
            self.comm.broadcast_object(None)

    def _empty_tables(self) -> BlockTables:
        stripes = self.runner.placement.stripes
        tree = PrefixTree(PagePool(self._pages), stripes, self._times.cost)
        return BlockTables(tree, self.prefix_cache, self._pages if self.runner.drafter.own_pages else None)

    # ---- every rank

    def _call(self, lead: Callable[[], Iterator[T]], patience_s: float | None) -> Iterator[T]:
        """Rank 0's outputs of a call, which the others follow; they wait so long for a word of it."""
        if self._broken is not None:
            self.comm.abort(self._broken)  # others may be waiting for this rank
            raise RuntimeError(
                f"this engine is broken, make a new one over new communicators: it failed with {self._broken}"
            )
        if self._calling:
            raise RuntimeError("a call is under way on this engine: iterate it to its end, or close() it")
        self._calling = True
        try:
            if self.comm.rank == 0:
                yield from self._lead(lead())
            else:
                self._follow(patience_s)
        finally:
            self._calling = False

    def _follow(self, patience_s: float | None) -> None:
        """Does what rank 0 decides until it says that this was all."""
        decision: Decision | None = None
        before: torch.cuda.Event | None = None
        with self._together():
            self.comm.limit_waits(patience_s)
            while (decision := self.comm.broadcast_object(decision)) is not None:
                self.runner.execute(decision)
                if before is not None:
                    before.synchronize()  # no further ahead than rank 0
                if self.comm.device.type == "cuda":
                    (before := torch.cuda.Event()).record()
                self.runner.check(wait=False)
            self.runner.check()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all ranks do alike: others wait for a rank that fails there, so that none of them can go on."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise


__all__ = ["Engine", "Output", "Request"]
