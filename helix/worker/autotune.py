"""Timing at start: durations of steps, and the best number of HOP-B chunks.

All functions are collectives, to be called while no request is served.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import torch

from helix.engine.decision import StepKind
from helix.worker.clock import seconds_of_each
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.model_runner import ModelRunner

CHUNKS = 2, 4, 8  # numbers of HOP-B chunks that `auto` tries
GAIN = 0.01  # least share of a step's time that HOP-B must save
SHORTER = 4  # ratio of the lengths at which chunks are timed


def fill(runner: ModelRunner, rows: int, tokens: int) -> None:
    """Fills the first `rows` slots with sequences of `tokens` arbitrary tokens, and empties the others."""
    state = runner.state
    for tensor in (state.tokens, state.lengths, state.starts, state.limits, state.active, state.block_tables):
        tensor.zero_()
    if rows:
        state.active[:rows] = True
        state.lengths[:rows] = tokens
        state.limits[:rows] = tokens + runner.drafts + 1
        tables = state.block_tables[:rows]  # distinct pages: shared ones would be read from the GPU's L2 cache
        most = runner.cache.pages
        first = torch.arange(rows, dtype=torch.int32, device=runner.device) * (most // rows)
        tables.copy_((first[:, None] + torch.arange(tables.shape[1], dtype=torch.int32, device=runner.device)) % most)
    runner.drafter.catch_up(state)


def tried_chunks(runner: ModelRunner, rows: int) -> list[int]:
    """Returns the numbers of HOP-B chunks to try for steps of `rows` rows: one number unless it is `auto`."""
    if runner.hopb != "auto" or runner.layout.kvp == 1 or not runner.comm.capturable:
        return [runner.chunks(rows)]
    return [1, *(n for n in CHUNKS if n <= rows)]


def choose_chunks(runner: ModelRunner, rows: int, longest: int | None = None) -> None:
    """Chooses the HOP-B chunks of steps of `rows` rows if that is `auto`, by timing; alike on all ranks.

    On a CPU nothing overlaps, so there is nothing to choose.

    Args:
        longest: tokens of the longest sequences. The slots are filled with such, and where chunks pay, with shorter
            ones, until they do not: shorter steps are not cut. None: the choice is for the slots' current lengths.
    """
    _, *more = tried_chunks(runner, rows)
    if not more:
        return
    if longest is not None:
        fill(runner, rows, longest)
    kind = StepKind(rows, runner.drafts)
    best, least = 1, (1 - GAIN) * step_seconds(runner, kind)
    for chunks in more:
        seconds = step_seconds(runner, replace(kind, chunks=chunks))
        if runner.comm.broadcast_object(seconds >= least):
            break  # even more chunks cost more launches and would not pay either
        best, least = chunks, seconds
    from_tokens = longest or 0
    while best > 1 and longest is not None and from_tokens > 1:
        fill(runner, rows, from_tokens // SHORTER)
        off, on = step_seconds(runner, kind), step_seconds(runner, replace(kind, chunks=best))
        if runner.comm.broadcast_object(on >= (1 - GAIN) * off):
            break
        from_tokens //= SHORTER
    runner.hopb_chunks[rows] = best, from_tokens


@torch.inference_mode()
def step_seconds(runner: ModelRunner, kind: StepKind, steps: int = 8, kept: bool = False) -> float:
    """Times decode steps, sparse if sequences are long enough; returns the median seconds of the slowest rank.

    The slots' tokens and lengths stay unchanged. The captured graph is freed unless it is `kept`.
    """
    state = runner.state
    before = state.tokens.clone(), state.lengths.clone()

    def restore() -> None:
        state.tokens.copy_(before[0])
        state.lengths.copy_(before[1])

    graphs = runner.graphs
    if graphs is not None and not kept:
        graphs = StepGraphs()
    run = partial(graphs.run, runner.step) if graphs is not None else runner.step
    kind = replace(kind, sparse=runner.sparse_at(int(before[1].max())))

    def step() -> None:
        run(kind)

    seconds_of_each(step, 3, runner.device, restore)  # eagerly, captured, replayed
    runner.comm.barrier()
    seconds = seconds_of_each(step, steps, runner.device, restore)
    runner.comm.check()
    if graphs is not None and not kept:
        graphs.close()
    ranks = runner.comm.all_gather_object(seconds)
    return statistics.median(max(of_ranks) for of_ranks in zip(*ranks, strict=True))
