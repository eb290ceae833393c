"""Parts that a config names: layout, shape, weights, processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from comm.emulated import PROCESSES
from comm.loopback import LoopbackWorld
from helix.config import Config, DraftLayoutConfig, LayoutConfig, ModelConfig
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.models import Decoder, DecoderSpec, spec_from_config
from helix.models.loading import Checkpoint, load_spec_config


def make_layout(config: LayoutConfig) -> HelixLayout:
    """Creates the layout; raises ValueError if the widths do not form one."""
    return HelixLayout.create(config.mode, config.kvp, config.tpa, config.tpf, config.ep)


def make_spec(config: Config) -> DecoderSpec:
    """Creates the spec of the model; raises ValueError if the runtime does not know the model."""
    path = None if config.model.path is None else Path(config.model.path)
    return spec_from_config(load_spec_config(path, config.model.config))


def weights_of(spec: DecoderSpec, layout: HelixLayout, rank: int, dtype: torch.dtype) -> Weights:
    """Returns a rank's weight declarations, on the meta device."""
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))  # a place, nothing is sent
    return Decoder(spec, layout, comm, dtype, torch.device("meta")).weights


def check_weights(config: ModelConfig, key: str) -> None:
    """Raises ValueError, naming what to set under `key`, if a model has neither a checkpoint nor random weights."""
    if config.path is None and config.load == "checkpoint":
        place = " in place of model=NAME" if key == "model" else ""
        raise ValueError(
            f"a shape has no weights: set {key}.path=DIR{place}, a checkpoint's directory, or {key}.load=random for "
            "random weights"
        )


def make_checkpoint(
    config: ModelConfig, spec: DecoderSpec, layout: HelixLayout, rank: int
) -> tuple[Checkpoint | None, DecoderSpec]:
    """Opens a model's checkpoint, None for random weights; returns it with the spec that has its head.

    Raises:
        ValueError: the weights do not fit the config.
    """
    if config.load != "checkpoint":
        return None, spec
    assert config.path is not None, "check_weights comes before"
    checkpoint = Checkpoint(Path(config.path))
    spec = checkpoint.with_head(spec)
    checkpoint.check(weights_of(spec, layout, rank, torch.float32).slices, spec.unused)
    return checkpoint, spec


def make_draft_layout(config: DraftLayoutConfig, spec: DecoderSpec, world_size: int) -> HelixLayout:
    """Creates the draft model's layout over `world_size` ranks; raises ValueError if the widths do not form one."""
    kvp, tpa = config.kvp, config.tpa
    if kvp is None and tpa is None:
        widest = max(n for n in range(1, world_size + 1) if world_size % n == 0 and spec.attention.kv_heads % n == 0)
        tpa = world_size if config.mode == "tp" else widest
    if tpa is None:
        tpa = max(1, world_size // max(1, kvp or 1))
    if kvp is None:
        kvp = max(1, world_size // max(1, tpa))
    return HelixLayout.create(config.mode, kvp, tpa, config.tpf, config.ep)


def is_emulated(ranks: int) -> bool:
    """Returns whether GPUs emulate the ranks of a benchmark: there are GPUs, and fewer than ranks."""
    return 0 < torch.cuda.device_count() < ranks


def emulating_processes() -> int:
    """Counts the processes that emulate ranks."""
    return min(PROCESSES, torch.cuda.device_count())


def most_ranks() -> int:
    """Returns the most ranks that this host runs: on CPUs several share a core, to try a layout."""
    return max(32, 8 * (os.cpu_count() or 1))
