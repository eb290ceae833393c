"""Warm-up before the first request: compiles kernels, times and captures steps, and chooses HOP-B chunks.

All functions are collectives, to be called while no request is served. They overwrite pages and slots.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from helix.engine.scheduler_output import NewRequest, PrefillChunk, SchedulerOutput
from helix.layers.attention import ShardedAttention
from helix.sampling_params import SamplingParams
from helix.worker.clock import time_each
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import DEEP, SEQUENCES, SHARED_PREFIXES, DecodeGraphKey
from helix.worker.model_runner import ModelRunner
from kernels.attention.split_kv import PartialAttention
from kernels.precompile import precompile

LARGE = 2048  # chunks of at least twice as many tokens use the same kernels, at any context length
CHUNKS = 2, 4, 8  # numbers of HOP-B chunks that `auto` and `best` try
MIN_GAIN = 0.01  # share of a step's time that HOP-B must save under `auto`
SHORTER = 4  # ratio of successive context lengths at which HOP-B is timed

DEFERRED_ROWS = 64  # of captured steps in two parts: sampling 512 rows of 152K tokens takes GBs, which graphs keep
Mark = Callable[[str], None]


@torch.inference_mode()
def warmup(
    runner: ModelRunner,
    kinds: Sequence[DecodeGraphKey],
    later: Sequence[DecodeGraphKey],
    mark: Mark,
    *,
    chunks: bool,
    deferred: Sequence[DecodeGraphKey] = (),
) -> list[tuple[int, float]]:
    """Compiles, times and captures what requests need, on a GPU; elsewhere runs a request.

    Arguments as in `Engine.warmup`; the number of rows in `kinds`, `later` and `deferred` is ignored.

    Args:
        deferred: steps of `later` to capture in two parts, as for requests with a grammar, up to DEFERRED_ROWS rows.

    Returns:
        (tokens, seconds) of captured chunks.
    """
    slots, drafts = runner.sizes.slots, sorted({kind.drafts for kind in kinds})
    sizes = sorted({min(1 << slot.bit_length(), slots) for slot in range(slots)})
    if runner.device.type == "cuda":
        steps = (
            replace(kind, rows=rows, chunks=n)
            for rows, kind in product(sizes, [*kinds, *later])
            for n in tried_chunks(runner, rows)
        )
        precompile_kernels(runner, chunk_shapes(runner), chain(steps, prefix_steps(runner, sizes, drafts)))
        mark("compile")
    run_request(runner)
    mark("first_request")
    if runner.graphs is None:
        return []
    seconds: list[tuple[int, float]] = []
    if chunks and runner.pads_chunks:
        captured = runner.first_sizes(_room(runner) // runner.layout.kvp)
        for size in captured:
            runner.capture_chunk(size)
        # By tokens, the last size is the one with the shortest context.
        for count, size in {size.tokens: size for size in captured if size.sequences == SEQUENCES[0]}.items():
            if count.bit_count() == 1:
                seconds.append((count, runner.chunk_seconds(size)))
        mark("chunks")
    tokens = runner.sizes.pages * runner.placement.stripes.page_tokens
    for rows in sizes:
        longest = max(1, min(runner.sizes.length, tokens // rows)) - 1
        choose_chunks(runner, rows, longest)
        fill(runner, rows, longest)
        if len(drafts) > 1:
            for n in drafts:
                kind = DecodeGraphKey(rows, n, chunks=runner.chunks(rows))
                runner.step_seconds[rows, n] = step_seconds(runner, kind, keep_graph=True)
        fill(runner, 0, 0)
        launches: list[tuple[Callable[[DecodeGraphKey, int], Any], DecodeGraphKey]] = [
            (runner.decode, kind) for kind in kinds
        ]
        if rows <= DEFERRED_ROWS:
            launches += ((runner.decode_deferred, kind) for kind in deferred)
        for launch, kind in launches:
            for row_tokens in dict.fromkeys((longest, 0)) if runner.chunks(rows) > 1 else (0,):
                for _ in range(2):  # eagerly, then captured; no slot is active, so no state changes
                    launch(replace(kind, rows=rows), row_tokens)
    torch.cuda.synchronize()
    mark("capture")
    return seconds


def run_request(runner: ModelRunner) -> None:
    """Runs a request of two tokens to its end."""
    layout, token_ids = runner.layout, np.zeros(2, np.int32)
    pages = np.arange(runner.placement.stripes.pages_for(4 + runner.sizes.drafts), dtype=np.int32)
    admission = NewRequest("warm-up", 0, 2, token_ids, 0, pages, 4, 3, SamplingParams())
    chunk, kind = PrefillChunk(0, 0, 2, last=True, tokens=token_ids), DecodeGraphKey(1)
    for scheduler_output in (
        SchedulerOutput(1, (), (), (), (admission,), (chunk,), 1, kind),
        SchedulerOutput.empty((0,)),
    ):
        for step in runner.execute(scheduler_output.for_dp_rank(layout.dp_rank(runner.comm.rank), layout.dp)):
            step.read()
    runner.check()


def chunk_shapes(runner: ModelRunner) -> Iterator[tuple[int, int, int]]:
    """Yields (prompts, tokens of each, tokens before these) of chunks that use different kernels."""
    room, deep, stripes = _room(runner), DEEP * runner.layout.kvp, runner.placement.stripes
    max_tokens = max(min(runner.sizes.chunk, room), 1)
    small = [1 << i for i in range(LARGE.bit_length()) if 1 << i <= max_tokens]
    yield from ((1, size, 0) for size in sorted({*small, min(2 * LARGE, max_tokens), max_tokens}))
    yield from ((1, size, min(deep, room - size)) for size in small if size < room)
    slots = runner.sizes.slots
    several = sorted({min(1 << i, slots) for i in range(1, slots.bit_length() + 1)} - {1})
    for n, depth in product(several, [0, min(deep, room - 1)]):
        if not runner.drafter.has_own_pages or n * stripes.pages_for(depth + 1) <= runner.sizes.pages:
            yield n, 1, depth


def prefix_steps(runner: ModelRunner, sizes: Sequence[int], drafts: Sequence[int]) -> Iterator[DecodeGraphKey]:
    """Yields steps of `sizes` rows with shared prefixes, if any can save enough: n sequences have at most n - 1."""
    if runner.min_shared_pages > (runner.sizes.slots - 1) * runner.cache.pages:
        return
    for rows, n, prefixes in product(sizes, drafts, SHARED_PREFIXES[1:]):
        if 1 < rows >= prefixes:
            yield from (DecodeGraphKey(rows, n, chunks=c, shared_prefixes=prefixes) for c in tried_chunks(runner, rows))


def _room(runner: ModelRunner) -> int:
    """Returns the maximum tokens before a sampled one, if one sequence has all pages."""
    return min(runner.sizes.pages * runner.placement.stripes.page_tokens, runner.sizes.length) - 1


@torch.inference_mode()
def precompile_kernels(
    runner: ModelRunner, chunks: Iterable[tuple[int, int, int]], steps: Iterable[DecodeGraphKey]
) -> None:
    """Compiles kernels by running prefill chunks and decode steps without launches.

    `chunks` are (prompts, tokens of each, tokens before these).
    """
    graphs, runner.graphs = runner.graphs, None  # nothing is launched, so nothing can be captured
    with precompile():
        for prompts, count, num_cached_tokens in chunks:
            end, slots = num_cached_tokens + count, range(prompts)
            pages = np.arange(runner.placement.stripes.pages_for(end), dtype=np.int32)
            tokens = np.zeros(count, dtype=np.int32)
            token_ids = np.zeros(end, dtype=np.int32)
            admit = [
                NewRequest(
                    "precompile",
                    i,
                    end,
                    token_ids,
                    0,
                    pages,
                    end,
                    end,
                    SamplingParams(),
                    num_cached_tokens,
                    num_cached_tokens,
                )
                for i in slots
            ]
            parts = [PrefillChunk(i, num_cached_tokens, end, last=True, tokens=tokens) for i in slots]
            rows = min(1 << (prompts - 1).bit_length(), runner.sizes.slots)
            # In mode dp the FFN has the rows of all ranks: as many as attention if one rank has all prompts.
            counts = (prompts * count, *[0] * (runner.layout.dp - 1)) if runner.layout.dp > 1 else ()
            runner.execute(
                SchedulerOutput(
                    0, (), (), (), tuple(admit), tuple(parts), 0, DecodeGraphKey(rows), num_tokens_across_dp=counts
                )
            )
            runner.execute(SchedulerOutput.empty(tuple(slots)))
        for kind in steps:
            fill(runner, kind.rows, 1)
            runner.step(kind)
            if kind.drafts:  # prompts sample their first tokens without
                index, dtype = torch.arange(kind.rows, device=runner.device), runner.model.weights.dtype
                hidden = torch.zeros(kind.rows, runner.model.spec.hidden, dtype=dtype, device=runner.device)
                runner.sample_first(runner.model.logits(hidden), kind, index, index)
        fill(runner, 0, 0)
    runner.graphs = graphs


def fill(runner: ModelRunner, rows: int, tokens: int) -> None:
    """Fills the first `rows` slots with sequences of `tokens` arbitrary tokens, and empties the others."""
    state = runner.state
    for tensor in (state.tokens, state.lengths, state.starts, state.limits, state.active, state.block_tables):
        tensor.zero_()
    if rows:
        state.active[:rows] = True
        state.lengths[:rows] = tokens
        state.limits[:rows] = tokens + runner.sizes.drafts + 1
        tables = state.block_tables[:rows]  # distinct pages: shared ones would hit the L2 cache
        num_pages = runner.cache.pages
        first = torch.arange(rows, dtype=torch.int32, device=runner.device) * (num_pages // rows)
        tables.copy_(
            (first[:, None] + torch.arange(tables.shape[1], dtype=torch.int32, device=runner.device)) % num_pages
        )
    runner.drafter.catch_up(state)


def tried_chunks(runner: ModelRunner, rows: int) -> list[int]:
    """Returns the numbers of HOP-B chunks to try for steps of `rows` rows: one unless it is `auto` or `best`."""
    fitting = [n for n in CHUNKS if n <= rows]
    if runner.hopb not in ("auto", "best") or not fitting or runner.layout.kvp == 1 or not runner.comm.capturable:
        return [runner.chunks(rows)]
    return [1, *fitting] if runner.hopb == "auto" else fitting


def choose_chunks(runner: ModelRunner, rows: int, longest: int | None = None) -> None:
    """Chooses the HOP-B chunks of steps of `rows` rows by timing, if it is `auto` or `best`; alike on all ranks.

    `best` takes the fastest number at the longest sequences. `auto` also finds from which length on chunks pay. On a
    CPU nothing overlaps, so there is nothing to choose.

    Args:
        longest: tokens of the longest sequences, with which the slots are filled; None: use the slots' current lengths.
    """
    first, *more = tried = tried_chunks(runner, rows)
    if not more:
        return
    if longest is not None:
        fill(runner, rows, longest)
    kind = DecodeGraphKey(rows, runner.sizes.drafts)
    if runner.hopb == "best":
        times = [step_seconds(runner, replace(kind, chunks=chunks)) for chunks in tried]
        runner.hopb_chunks[rows] = runner.comm.broadcast_object(tried[times.index(min(times))]), 0
        return
    best, limit_s = first, (1 - MIN_GAIN) * step_seconds(runner, kind)
    for chunks in more:
        seconds = step_seconds(runner, replace(kind, chunks=chunks))
        if runner.comm.broadcast_object(seconds >= limit_s):
            break  # more chunks launch more kernels and would not pay either
        best, limit_s = chunks, seconds
    from_tokens = longest or 0
    while best > 1 and longest is not None and from_tokens > 1:
        fill(runner, rows, from_tokens // SHORTER)
        off, on = step_seconds(runner, kind), step_seconds(runner, replace(kind, chunks=best))
        if runner.comm.broadcast_object(on >= (1 - MIN_GAIN) * off):
            break
        from_tokens //= SHORTER
    runner.hopb_chunks[rows] = best, from_tokens


@torch.inference_mode()
def step_seconds(runner: ModelRunner, kind: DecodeGraphKey, steps: int = 8, keep_graph: bool = False) -> float:
    """Times decode steps, sparse if sequences are long enough; returns the median seconds of the slowest rank.

    The slots' tokens and lengths stay unchanged. The captured graph is freed unless `keep_graph`.
    """
    state = runner.state
    before = state.tokens.clone(), state.lengths.clone()

    def restore() -> None:
        state.tokens.copy_(before[0])
        state.lengths.copy_(before[1])

    graphs = runner.graphs
    if graphs is not None and not keep_graph:
        graphs = StepGraphs()
    run = partial(graphs.run, runner.step) if graphs is not None else runner.step
    kind = replace(kind, sparse=runner.sparse_at(int(before[1].max())))

    seconds = slowest_seconds(runner, lambda: run(kind), steps, restore)
    if graphs is not None and not keep_graph:
        graphs.close()
    return seconds


@torch.inference_mode()
def exchange_seconds(runner: ModelRunner, queries: int, times: int = 8) -> float:
    """Times the attention exchanges of a decode step, one per layer for all queries, with nothing in between.

    `queries` are sequences times 1 + drafts. Returns the median seconds of the slowest rank; 0 if kvp is 1.
    """
    if runner.layout.kvp == 1:
        return 0.0
    comm, sent = runner.comm, dict[tuple[int, int], PartialAttention]()
    mixers = [layer.mixer for layer in runner.model.layers if isinstance(layer.mixer, ShardedAttention)]
    shapes = [(sum(mixer.shares), mixer.exchange_width(queries)) for mixer in mixers]
    for shape in shapes:
        out = torch.zeros(queries, *shape, dtype=runner.model.weights.dtype, device=runner.device)
        sent[shape] = PartialAttention(out, torch.zeros(out.shape[:2], device=runner.device))

    def exchange() -> None:
        for mixer, shape in zip(mixers, shapes, strict=True):
            comm.merge_states_exchange(sent[shape], mixer.shares)

    graphs = StepGraphs() if comm.capturable else None
    seconds = slowest_seconds(runner, exchange if graphs is None else partial(graphs.run, exchange), times)
    if graphs is not None:
        graphs.close()
    return seconds


def slowest_seconds(
    runner: ModelRunner, call: Callable[[], Any], times: int, between: Callable[[], Any] = lambda: None
) -> float:
    """Times a collective call; returns the median over `times` calls of the slowest rank's seconds.

    Three untimed calls run first (eager, captured, replayed); `between` runs after each call.
    """
    time_each(call, 3, runner.device, between)
    runner.comm.barrier()
    seconds = time_each(call, times, runner.device, between)
    runner.comm.check()
    ranks = runner.comm.all_gather_object(seconds)
    return statistics.median(max(rank_seconds) for rank_seconds in zip(*ranks, strict=True))
