"""Resolves `layout=auto`: the planner's first choice for the prompts of a run, or for a benchmark.

Every rank computes it by itself before ranks connect, from inputs that all see; ranks then compare the results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import gcd, inf
from typing import TYPE_CHECKING

from helix.config import Config, LayoutConfig
from helix.layers.specs import AttentionSpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.formats import draft_matrices, stored_matrices
from helix.planner.plan import PlanQuery, plan
from helix.planner.points import LayerDrafts, Offload, Options, Sparse
from helix.setup.buffers import max_slots
from helix.setup.parts import make_eagle3, make_formats
from launch.inputs.hardware import hardware_of

if TYPE_CHECKING:
    from launch.inputs.prompt_files import PromptLine  # at runtime, planning works without the request schemas

KV_DTYPES = {"auto": "bf16", "fp8": "e4m3", "fp8_all": "e4m3_all", "k16v8": "k16v8"}  # the planner's names
TEXT_BYTES = 4  # estimated bytes of text per token; an exact count needs the tokenizer, which only rank 0 loads


def choose(
    config: Config,
    spec: DecoderSpec,
    prompts: Sequence[PromptLine],
    world_size: int,
    device: str | None,
    load: tuple[int, int],
) -> tuple[HelixLayout, str]:
    """Chooses the layout; returns it with the reason.

    Args:
        prompts: prompts to decode.
        device: name of the GPU; None on a CPU.
        load: number of sequences and tokens per sequence, if there are no prompts.

    Raises:
        ValueError: widths are also set, there is no description of the device, or nothing fits on it.
    """
    widths = ("kvp", "tpa", "tpf", "ep")
    if given := [f"layout.{key}" for key in widths if getattr(config.layout, key) != getattr(LayoutConfig(), key)]:
        them = "it" if len(given) == 1 else "them"
        raise ValueError(f"layout=auto chooses {' and '.join(given)} itself: leave {them} out, or set layout=helix")
    if device is None:
        kv_heads = spec.kv_heads
        tpa = gcd(kv_heads, world_size)
        layout = HelixLayout.create("helix", world_size // tpa, tpa)
        allowed = f"the largest tpa that divides {kv_heads} KV heads and {world_size} ranks"
        return layout, f"no predictions on CPUs: {allowed}; kvp is the rest"
    hardware = hardware_of(device)
    if config.comm.backend == "nccl":
        hardware = hardware.over_nccl()
    batch, length = workload(config, prompts) if prompts else load
    options = planner_options(config, spec)
    # A drafting layer takes about as much memory and time as a layer of the model: plan for it as one.
    ranking = plan(
        PlanQuery(replace(spec, layers=spec.stack, draft=None), hardware, world_size, length, batch, options=options)
    )
    sparse = options.sparse is not None and length >= options.sparse.from_tokens
    attention = f", {config.attention.policy} attention" if sparse else ""
    work = f"{batch} x {length:,} tokens on {world_size} x {hardware.name}{attention}"
    return ranking.choices[0].layout, f"{work}: {ranking.reason} {ranking.verdict}"


def workload(config: Config, prompts: Sequence[PromptLine]) -> tuple[int, int]:
    """Returns the number of concurrent sequences, and the largest number of prompt and new tokens of a sequence."""
    new = config.decode.max_tokens
    # A max_tokens that is not a number is refused later, with its request.
    limits = (prompt.options.get("max_tokens") for prompt in prompts)
    lengths = [_tokens(p) + (n if isinstance(n, int) else new) for p, n in zip(prompts, limits, strict=True)]
    return min(len(prompts), max_slots(config, "cuda")), max(lengths)


def planner_options(config: Config, spec: DecoderSpec) -> Options:
    """Returns the planner's options for a config: dtypes, KV cache, sparse attention.

    Raises:
        ValueError: the planner does not predict this dtype.
    """
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype == "float32":
        raise ValueError("the planner does not predict model.dtype=float32: set model.dtype=bfloat16, or the layout")
    # fp16 has the size and speed of bf16.
    kv = config.kv
    # The hit rate of resident blocks is not known in advance: assume 0.
    offload = Offload(0.0, kv.offload_host_bytes or inf, kv.offload_gpu_bytes) if kv.offload == "host" else None
    return Options(
        "bf16", KV_DTYPES[kv.dtype], "bf16", sparse=budget(config), offload=offload,
        matrices=stored_matrices(spec, make_formats(config.model, None, on_gpu=True)),
        memory_fraction=kv.memory_fraction, page_size=config.blocks.page,
        prompt_chunk=None if config.decode.prefill_chunk == "auto" else int(config.decode.prefill_chunk),
        snapshots=(None if kv.snapshots == "auto" else kv.snapshots) if kv.prefix_cache else 0,
    )  # fmt: skip


def layer_drafts(config: Config, spec: DecoderSpec) -> LayerDrafts | None:
    """Returns the drafting layer of a spec from `make_spec` for the planner; None with other drafters.

    Raises:
        ValueError: the layer's checkpoint cannot be read.
    """
    if spec.draft is None:
        return None
    draft_spec = replace(spec, layers=(spec.draft,), nextn=None, draft=None, aux_hidden_state_layers=())
    formats = make_formats(config.model, None, on_gpu=True)
    if config.speculation.drafter == "mtp":
        matrices = draft_matrices(spec, formats)
        return LayerDrafts(draft_spec, 2 * spec.hidden, 2 * spec.hidden, True, matrices)
    eagle3 = make_eagle3(config.speculation, spec)
    assert isinstance(spec.draft.mixer, AttentionSpec)
    layer = replace(
        spec.draft, mixer=replace(spec.draft.mixer, window=config.speculation.window or eagle3.max_positions)
    )
    draft_spec = replace(draft_spec, layers=(layer,), hidden=eagle3.hidden, vocab=eagle3.vocab or spec.vocab)
    return LayerDrafts(draft_spec, len(eagle3.aux_hidden_state_layers) * spec.hidden, 0, eagle3.vocab is None)


def budget(config: Config) -> Sparse | None:
    """Returns what a block-sparse step reads; None if attention is dense."""
    a = config.attention
    if a.policy == "dense":
        return None
    subblocks = a.parts, a.candidate_blocks
    return Sparse(a.num_blocks, a.sink_blocks, a.local_blocks, a.block, a.choice, a.from_tokens, *subblocks)


def _tokens(prompt: PromptLine) -> int:
    if prompt.ids is not None:
        return len(prompt.ids)
    text = prompt.text if prompt.body is None else json.dumps(prompt.body)
    return -(-len((text or "").encode()) // TEXT_BYTES)
