"""`layout=auto`: the layout that the planner takes for the prompts of a run, or what is timed.

Every rank computes it for itself, from what all of them see, before they meet; ranks then compare what they chose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf

import torch

from helix.config import Config, LayoutConfig
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.simulate.plan import Question, plan
from helix.simulate.points import Options, Sparse, Tier
from launch.inputs import parts
from launch.inputs.hardware import hardware_of
from launch.inputs.prompts import Prompt

TEXT_BYTES = 4  # a token of text, about; counting them takes the tokenizer, which rank 0 alone loads


def ranks(config: Config) -> int:
    """How many processes a run without a launcher has: the ranks of its layout, under `auto` every GPU (one on a CPU).

    Raises:
        ValueError: the widths form no layout, or one of more ranks than this host can run; or GPUs are to emulate
            ranks and there is none.
    """
    layout = config.layout
    if config.comm.backend == "emulated":
        if not (processes := parts.emulating_processes()):
            raise ValueError("comm.backend=emulated: GPUs emulate ranks of a larger layout, and this machine has none")
        return processes
    if layout.mode == "auto":
        return 1 if config.comm.backend == "gloo" else max(torch.cuda.device_count(), 1)
    world_size = HelixLayout.create(layout.mode, layout.kvp, layout.tpa, layout.tpf, layout.ep).world_size
    if world_size > (most := parts.most_ranks()):
        raise ValueError(
            f"layout.kvp*tpa = {layout.kvp}*{layout.tpa} = {world_size} ranks, and this host runs {most} at most: set "
            "layout.kvp and layout.tpa to fewer, or spread the ranks over hosts (launch/agent.sh)"
        )
    return world_size


def choose(
    config: Config,
    spec: DecoderSpec,
    prompts: Sequence[Prompt],
    world_size: int,
    device: str | None,
    load: tuple[int, int],
) -> tuple[HelixLayout, str]:
    """The layout, and why it was taken.

    Args:
        prompts: what is decoded.
        device: name of the GPU, None on a CPU.
        load: without prompts, sequences and tokens of each.

    Raises:
        ValueError: widths are set as well, nobody has described the device, or nothing fits on it.
    """
    widths = ("kvp", "tpa", "tpf", "ep")
    if given := [f"layout.{key}" for key in widths if getattr(config.layout, key) != getattr(LayoutConfig(), key)]:
        raise ValueError(f"layout=auto chooses {', '.join(given)} itself: leave unset, or set layout=helix")
    if device is None:
        tpa = max(n for n in range(1, world_size + 1) if world_size % n == 0 and spec.attention.kv_heads % n == 0)
        chosen = HelixLayout.create("helix", world_size // tpa, tpa)
        allowed = f"tpa as wide as {spec.attention.kv_heads} KV heads and {world_size} ranks allow, kvp the rest"
        return chosen, f"on CPUs nothing is predicted: {allowed}"
    hardware = hardware_of(device)
    if config.comm.backend == "nccl":
        hardware = hardware.over_nccl()
    batch, length = workload(config, prompts) if prompts else load
    options = planned(config, spec)
    ranking = plan(Question(spec, hardware, world_size, length, batch, options=options))
    sparse = options.sparse is not None and length >= options.sparse.from_tokens
    attention = f", {config.attention.policy} attention" if sparse else ""
    work = f"{batch} x {length:,} tokens on {world_size} x {hardware.name}{attention}"
    return ranking.choices[0].layout, f"{work}: {ranking.reason} {ranking.verdict}"


def workload(config: Config, prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Sequences at a time and tokens of each: of the longest prompt with its new tokens."""
    new = config.decode.max_new_tokens
    # What is no number will be refused, with its request.
    limits = (prompt.options.get("max_tokens") for prompt in prompts)
    lengths = [_tokens(p) + (n if isinstance(n, int) else new) for p, n in zip(prompts, limits, strict=True)]
    return min(len(prompts), config.decode.max_batch), max(lengths)


def planned(config: Config, spec: DecoderSpec) -> Options:
    """What the planner is told of a config: dtypes, the cache, and which keys are read.

    Raises:
        ValueError: steps in this dtype are not predicted.
    """
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype == "float32":
        raise ValueError("steps in model.dtype=float32 are not predicted: set model.dtype=bfloat16, or the layout")
    # fp16 has as many bytes as bf16, and is as fast.
    kv = config.kv
    # What is hot, nobody knows before: nothing is counted on.
    tier = Tier(0.0, kv.host_bytes or inf, kv.gpu_bytes) if kv.tier == "host" else None
    return Options(
        "bf16", "bf16", "bf16", sparse=budget(config), tier=tier, memory_fraction=kv.memory_fraction,
        page_size=config.blocks.page,
    )  # fmt: skip


def budget(config: Config) -> Sparse | None:
    """What a block-sparse step reads by this config; None where attention is dense."""
    a = config.attention
    if a.policy == "dense":
        return None
    return Sparse(a.topk, a.sink_blocks, a.local_blocks, a.block, a.choice, a.from_tokens)


def _tokens(prompt: Prompt) -> int:
    if prompt.ids is not None:
        return len(prompt.ids)
    text = prompt.text if prompt.body is None else json.dumps(prompt.body)
    return -(-len((text or "").encode()) // TEXT_BYTES)
