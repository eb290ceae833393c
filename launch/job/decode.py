"""Decoding of a prompt file: requests to the engine, results to the file, text to the terminal."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain
from typing import Any

from helix.attention.block_sparse import BlockSparseAttention
from helix.build.buffers import most_slots
from helix.build.engine import build_engine
from helix.build.tiering import of_short_chunks
from helix.events.decision import StepKind
from helix.events.request import Output, Request
from launch.inputs.prompts import PromptFile
from launch.job.bodies import Desk
from launch.job.report import summary
from launch.job.task import Done, Task

AHEAD = 2  # requests that are read and have not ended, for each that can run
AT_ONCE = 1024, 1 << 20  # requests, and tokens, up to which prompts are read before the first of them runs


def run(task: Task) -> Done:
    """Runs the plan's prompts on all ranks."""
    plan, comm, tokenizer, results, console = task.plan, task.comm, task.tokenizer, task.results, task.console
    model, draft = task.load()
    config = plan.config
    desk = None if results is None else Desk(config, model.spec, tokenizer, results)
    made = iter(()) if desk is None else desk.requests()
    first, whole = _first(made)
    requests = [one for one in first if isinstance(one, Request)]
    auto, slots = config.decode.max_batch == "auto", most_slots(config, comm.device.type)
    context, unread = model.spec.max_positions, 0
    if not whole:
        assert isinstance(plan.prompts, PromptFile), "prompts of a run come from a file"
        unread = plan.prompts.most_tokens(config.decode.max_new_tokens, context, slots)
    # Only rank 0 has the requests: it says how many come at a time, their KV tokens, and the kinds of steps they need.
    max_batch, wanted, variants = comm.broadcast_object(
        (
            max(min(len(requests), slots), 1) if whole else slots,
            max(_wanted_tokens(requests, context, slots), unread),
            {StepKind.of([r.sampling]) for r in requests},
        )
    )
    engine = build_engine(plan.layout, comm, model, config, max_batch, wanted, tokenizer, draft, fewer=auto)
    if auto and engine.runner.max_batch * plan.layout.dp < max_batch:
        console.note(f"decode.max_batch=auto takes {engine.runner.max_batch * plan.layout.dp:,} sequences at a time")
    if config.decode.prefill_chunk == "auto":
        console.note(f"decode.prefill_chunk=auto takes chunks of up to {engine.prefill_chunk:,} prompt tokens")
    if config.kv.tier == "host":
        stored = model.weights.dtype, config.kv.dtype
        if warning := of_short_chunks(model.spec, *stored, engine.prefill_chunk):
            console.note(warning)
    task.phases.mark("build")
    if comm.device.type == "cuda":
        engine.warm_up(variants, mark=task.phases.mark)
    gc.freeze()  # what stays: to look through it again would stop all ranks for some 150 ms
    engine.on_prefill = console.prefill
    total = len(plan.prompts)

    def report(output: Output) -> None:
        assert desk is not None and results is not None  # the other ranks have no outputs
        console.show(output)
        if output.finish_reason is not None:
            desk.add(output)
            console.count(results.count, total)

    def served() -> Iterator[Request]:
        for one in chain(first, made):
            if isinstance(one, Output):
                report(one)
            elif desk is not None:
                yield desk.fitted(one, engine.runner.max_length)

    ahead = None if whole else AHEAD * engine.runner.max_batch * plan.layout.dp
    for output in engine.generate(served(), ahead):
        report(output)
    engine.close()
    bytes_per_token = comm.all_gather_object(engine.runner.cache.bytes_per_token)
    policy = engine.runner.policy
    blocks = comm.all_gather_object(policy.blocks_read()) if isinstance(policy, BlockSparseAttention) else None
    measured: dict[str, Any] = {}
    refused = 0 if desk is None else desk.refused
    if results is not None:
        results.close()
        hopb_chunks = engine.runner.hopb_chunks
        measured = summary(plan.layout, engine.timings, bytes_per_token) | {"hopb_chosen": hopb_chunks}
        measured |= {} if blocks is None else {"blocks_read_per_rank": blocks}
        chosen = ", ".join(f"{rows} rows in {chunks}" for rows, (chunks, _) in hopb_chunks.items() if chunks > 1)
        title = f"{results.count - refused} served, {refused} refused"
        title += "" if blocks is None else f"; {config.attention.policy} attention (lossy)"
        console.finish(title + (f"; HOP-B: {chosen} chunks" if chosen else ""), measured)
    return measured, comm.broadcast_object(refused)


def _first(made: Iterator[Request | Output]) -> tuple[list[Request | Output], bool]:
    """Reads the first prompts; returns what is made of them, and whether these are all."""
    first: list[Request | Output] = []
    tokens = 0
    for one in made:
        first.append(one)
        tokens += len(one.prompt) if isinstance(one, Request) else 0
        if len(first) == AT_ONCE[0] or tokens > AT_ONCE[1]:
            return first, False
    return first, True


def _wanted_tokens(requests: list[Request], context: int, max_batch: int) -> int:
    """Computes the KV tokens of the largest batch of these requests."""
    lengths = sorted((len(r.prompt) + r.max_new_tokens for r in requests), reverse=True)
    return max(sum([n for n in lengths if n <= context][:max_batch]), 1)
