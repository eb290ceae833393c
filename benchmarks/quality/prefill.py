"""Loads a checkpoint on ranks that are threads of this process, and prefills prompts once for several policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.ranks.request_allocator import RequestAllocator
from comm.base import Communicator
from helix.config import ModelConfig, SpeculationConfig
from helix.kv_placement import KVPlacement, PromptChunk
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.models.eagle3 import with_eagle3
from helix.models.loading import Checkpoint
from helix.setup.parts import make_eagle3, make_formats
from helix.speculation import Drafter, NoDrafts
from helix.tokenizer import load_tokenizer
from helix.worker.kv_cache import KVCache, free_bytes, with_bounds
from helix.worker.kv_cache_spec import EngineSizes, dtype_name, token_bytes
from helix.worker.model_runner import ModelRunner
from helix.worker.sequence_observer import PrefillCommitted
from launch.inputs.compose import ROOT

CHUNK = 1024  # prompt tokens per sequence and prefill step
TOGETHER = 16  # sequences per prefill step
CACHE_SHARE = 0.5  # share of free memory for the cache of one batch of prompts


@dataclass(frozen=True)
class EvalSetup:
    """A checkpoint and its ranks.

    Attributes:
        device: cuda or cpu.
        layer: config of an mtp or eagle3 draft layer, if any.
        weights: as model.weights.
    """

    path: Path
    layout: HelixLayout
    dtype: torch.dtype
    device: str
    layer: SpeculationConfig | None = None
    weights: Literal["auto", "bf16", "fp8"] = "bf16"

    @classmethod
    def create(cls, model: str, kvp: int, dtype: str | None, layer: SpeculationConfig | None = None) -> EvalSetup:
        """Uses the demo model (`demo`) or a directory's checkpoint, on a GPU if there is one.

        Args:
            dtype: torch's name; None: the checkpoint's on a GPU, float32 on a CPU.
        """
        path = ROOT / "assets/demo-model" if model == "demo" else Path(model)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        setting = cls(path, HelixLayout.create("helix", kvp), torch.float32, device, layer)
        checkpoint_dtype = setting.spec().dtype if device == "cuda" else "float32"
        return replace(setting, dtype=getattr(torch, dtype or checkpoint_dtype))

    def spec(self) -> DecoderSpec:
        """Returns the model's spec; raises ValueError if the draft layer does not match the model."""
        spec = spec_from_config(read_config(self.path))
        if self.layer is None:
            return spec
        return spec.with_mtp() if self.layer.drafter == "mtp" else with_eagle3(spec, make_eagle3(self.layer, spec))

    def load(self, comm: Communicator, activations: Literal["auto", "fp8"] = "auto") -> Decoder:
        """Loads this rank's shard of the model; `activations` as model.activations."""
        checkpoint = Checkpoint(self.path)
        config = ModelConfig(path=str(self.path), weights=self.weights, activations=activations)
        formats = make_formats(config, checkpoint, self.device == "cuda")
        model = Decoder(checkpoint.as_stored(self.spec()), self.layout, comm, self.dtype, comm.device, formats)
        checkpoint.load(model.weights)
        return model

    def tokenizer(self) -> Any:
        """Loads the tokenizer; raises ValueError if there is none."""
        tokenizer = load_tokenizer(self.path)
        if tokenizer is None:
            raise ValueError(f"model={self.path} has no tokenizer.json")
        return tokenizer

    def fitting(self, length: int) -> int:
        """Returns how many prompts form a batch whose cache fits."""
        spec = self.spec()
        cache_specs = spec.kv_cache_specs(self.layout, 0, dtype_name(self.dtype))
        token_kv_bytes = sum(map(token_bytes, cache_specs)) * self.layout.tpa
        return max(1, int(CACHE_SHARE * free_bytes(torch.device(self.device)) / (length * token_kv_bytes)))


def prefilled(
    model: Decoder,
    placement: KVPlacement,
    comm: Communicator,
    prompts: Sequence[Tensor],
    room: int,
    max_length: int,
    *,
    kv: str = "auto",
    bounded: bool = False,
    parts: int = 1,
    limit: int = 0,
    make_drafter: Callable[[KVCache, EngineSizes], Drafter] = lambda cache, sizes: NoDrafts(),
) -> ModelRunner:
    """Makes a runner that has prefilled all but each prompt's [n] last token, one per slot, with `room` tokens each.

    Args:
        max_length: of the runner.
        kv: KV dtype, as kv.dtype.
        bounded: with page bounds, which are not updated.
        parts: subblocks per page with bounds of their own.
        limit: maximum drafts per step, which room is left for.
        make_drafter: makes the drafter that observes the prompts.
    """
    n, layout, dtype = len(prompts), placement.layout, dtype_name(model.weights.dtype)
    pages = n * placement.stripes.pages_for(room)
    cache_specs = model.spec.kv_cache_specs(layout, comm.rank, dtype, kv)
    cache_specs = with_bounds(cache_specs, dtype, parts) if bounded else cache_specs
    sizes = EngineSizes(n, max_length, TOGETHER * CHUNK, limit, pages, snapshots=n)
    cache = KVCache(cache_specs, placement, sizes, comm.device)
    drafter = make_drafter(cache, sizes)
    runner = ModelRunner(model, cache, sizes, drafter=drafter)
    allocator = RequestAllocator(runner)
    for slot, prompt in enumerate(prompts):
        runner.admit(allocator.new_request(slot, room, prompt=prompt.cpu().numpy().astype(np.int32)))
    for first in range(0, n, TOGETHER):
        slots = range(first, min(first + TOGETHER, n))
        for begin in range(0, max(len(prompts[slot]) for slot in slots), CHUNK):
            chunks = [PromptChunk(slot, begin, prompts[slot][:-1][begin : begin + CHUNK].cpu()) for slot in slots]
            if chunks := [chunk for chunk in chunks if len(chunk.tokens)]:
                step = runner.state.prefill_step(chunks)
                _, states = model.states(cache, step, runner.dense)
                read = PrefillCommitted(chunks, runner.state.prompts_span(chunks), runner.state.parts(chunks), states)
                cache.on_prefill(read)
                drafter.on_prefill(read)
    if cache.snapshots:
        cache.save_snapshots([PromptChunk(slot, 0, prompt, snapshot_index=slot) for slot, prompt in enumerate(prompts)])
    return runner


def restart(runner: ModelRunner) -> None:
    """Restores states and windows to what they were after the prompts, whatever has been decoded since."""
    if runner.cache.snapshots:
        runner.cache.admit(*(replace(request, snapshot_index=slot) for slot, request in runner.requests.items()))
