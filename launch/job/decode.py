"""Decoding of a prompt file: requests to the engine, results to the file, text to the terminal."""

from __future__ import annotations

import gc
from typing import Any

from helix.attention.block_sparse import BlockSparseAttention
from helix.build.buffers import most_slots
from helix.build.engine import build_engine
from helix.build.tiering import of_short_chunks
from helix.control.engine import Engine
from helix.events.decision import StepKind
from helix.events.request import Output, Request
from launch.job.bodies import Desk
from launch.job.report import summary
from launch.job.task import Done, Task


def run(task: Task) -> Done:
    """Runs the plan's prompts on all ranks."""
    plan, comm, tokenizer, results, console = task.plan, task.comm, task.tokenizer, task.results, task.console
    model, draft = task.load()
    config = plan.config
    desk = None if results is None else Desk(config, model.spec, tokenizer, results)
    requests, refusals = ([], []) if desk is None else desk.requests()
    auto, slots = config.decode.max_batch == "auto", most_slots(config, comm.device.type)
    # Only rank 0 has the requests: it says how many come at a time, their KV tokens, and the kinds of steps they need.
    max_batch, wanted, variants = comm.broadcast_object(
        (
            max(min(len(requests), slots), 1),
            _wanted_tokens(requests, model.spec.max_positions, slots),
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
    if desk is not None:
        requests = [desk.fitted(request, engine.runner.max_length) for request in requests]
    for output in _outputs(engine, requests, refusals):
        assert desk is not None  # the other ranks have no outputs
        console.show(output)
        if output.finish_reason is not None:
            desk.add(output)
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
        title = f"{len(results.lines) - refused} served, {refused} refused"
        title += "" if blocks is None else f"; {config.attention.policy} attention (lossy)"
        console.finish(title + (f"; HOP-B: {chosen} chunks" if chosen else ""), measured)
    return measured, comm.broadcast_object(refused)


def _outputs(engine: Engine, requests: list[Request], refusals: list[Output]) -> Any:
    yield from refusals
    yield from engine.generate(requests)


def _wanted_tokens(requests: list[Request], context: int, max_batch: int) -> int:
    """Computes the KV tokens of the largest batch of these requests."""
    lengths = sorted((len(r.prompt) + r.max_new_tokens for r in requests), reverse=True)
    return max(sum([n for n in lengths if n <= context][:max_batch]), 1)
