"""Decode steps over a cache full of random data: what a step costs at a length that nobody wants to prefill first."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from comm.base import Communicator
from helix.engine import Timings
from helix.models import Decoder
from helix.sampling import SamplingParams
from helix.scheduler import Admission
from launch.decode import build_engine
from launch.plan import Plan
from launch.report import Console, summary

WARM_UP = 3


def time_steps(plan: Plan, comm: Communicator, model: Decoder, console: Console) -> dict[str, Any]:
    """Times `bench.steps` decode steps of `bench.batch` sequences that each hold `bench.length` tokens.

    A step counts with the time of its slowest rank.

    Raises:
        ValueError: bench.length is beyond the model's context, or the cache does not fit; on every rank alike.
    """
    config, bench, layout = plan.config, plan.config.bench, plan.layout
    reserved = bench.length + WARM_UP + bench.steps
    if reserved > model.spec.max_positions:
        raise ValueError(
            f"bench.length={bench.length} and {WARM_UP + bench.steps} steps exceed the model's context of "
            f"{model.spec.max_positions}: set model.config.max_position_embeddings"
        )
    sized = replace(config, kv=replace(config.kv, tokens=bench.batch * reserved))
    engine = build_engine(layout, comm, model, sized, bench.batch, bench.batch * reserved)
    generator = torch.Generator(comm.device).manual_seed(config.seed + comm.rank)
    for cache in (engine.cache.keys, engine.cache.values):
        for layer in cache:
            layer.normal_(generator=generator)
    for slot in range(bench.batch):
        engine.admit(Admission(slot, slot, (), slot % layout.kvp, reserved, SamplingParams()))
    slots = torch.arange(bench.batch, device=comm.device)
    engine.state.activate(slots, torch.zeros_like(slots), torch.full_like(slots, bench.length))

    seconds = []
    with torch.inference_mode(), console.progress("decode steps", WARM_UP + bench.steps) as advance:
        for step in range(WARM_UP + bench.steps):
            comm.barrier()
            begin = time.perf_counter()
            engine.decode(bench.batch)
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(max(comm.all_gather_object(time.perf_counter() - begin)))
            advance(step + 1)
    engine.close()
    tokens = [0] * layout.kvp
    for slot in range(bench.batch):
        for k in range(layout.kvp):
            tokens[k] += layout.local_length(reserved, k, config.kv.append_block, slot % layout.kvp)
    timings = Timings(ttl_s=seconds[WARM_UP:], decode_tokens=bench.batch * bench.steps, kv_tokens=tokens)
    measured = summary(layout, timings, comm.all_gather_object(engine.cache.bytes_per_token))
    memory = torch.cuda.max_memory_allocated() if comm.device.type == "cuda" else None
    measured["captured"] = comm.capturable
    measured["weight_bytes_per_rank"] = comm.all_gather_object(model.weights.bytes)
    measured["max_allocated_bytes_per_rank"] = comm.all_gather_object(memory)
    console.finish(f"{bench.batch} x {bench.length:,} tokens of random KV", measured)
    return measured
