"""Parts that a config names: layout, shape, weights, processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from comm.base import Communicator
from helix.config import Config, DraftLayoutConfig, LayoutConfig, ModelConfig, SpeculationConfig
from helix.layers.attention import AttentionSpec
from helix.layers.weights import Formats, Weights, unpacked
from helix.layout import HelixLayout
from helix.models import Decoder, DecoderSpec, spec_from_config
from helix.models.eagle3 import UNUSED, Eagle3Layer, Eagle3Spec, drafted_by
from helix.models.eagle3 import read as read_eagle3
from helix.models.loading import Checkpoint, load_spec_config, read_config, weights_of
from helix.models.overrides import check_overrides, ignored_overrides
from helix.models.quantized import WeightFormat, rounded


def make_layout(config: LayoutConfig) -> HelixLayout:
    """Creates the layout; raises ValueError if the widths do not form one."""
    return HelixLayout.create(config.mode, config.kvp, config.tpa, config.tpf, config.ep, config.dp)


def make_spec(config: Config, key: str = "model") -> DecoderSpec:
    """Creates the spec of the model.

    Args:
        key: where the model is set, which errors name.

    Raises:
        ValueError: the runtime does not know the model or an override of its config, or it lacks a drafter.
    """
    model = config.model
    if model.path is not None and "architectures" in model.config:
        shape = "" if key != "model" else ", or model=NAME, a shape that sets it"
        raise ValueError(
            f"{key}.config.architectures={model.config['architectures']} cannot replace the architecture of a "
            f"checkpoint ({key}.path={model.path}): leave it out{shape}"
        )
    check_overrides(stored_config(model), model.config, f"{key}.config")
    spec = spec_from_config(resolved_config(model))
    if config.speculation.drafter == "eagle3":
        return drafted_by(spec, make_eagle3(config.speculation, spec)[0])
    return spec.with_mtp() if config.speculation.drafter == "mtp" else spec


def make_eagle3(config: SpeculationConfig, target: DecoderSpec) -> tuple[Eagle3Spec, Checkpoint]:
    """Opens the checkpoint of speculation.drafter=eagle3; raises ValueError if it is not for this target."""
    if config.path is None:
        raise ValueError("speculation=eagle3 needs speculation.path=DIR, the directory of the draft layer's checkpoint")
    path = Path(config.path)
    try:
        checkpoint = Checkpoint(path)
        return read_eagle3(read_config(path), checkpoint.shapes, target), checkpoint
    except ValueError as error:
        raise ValueError(f"the draft layer (speculation.path={path}): {error}") from error


def load_eagle3(
    config: SpeculationConfig, target: Decoder, layout: HelixLayout, comm: Communicator, *, check: bool = False
) -> Eagle3Layer:
    """Builds and loads this rank's part of the draft layer of speculation.drafter=eagle3.

    Args:
        target: part of the target on this rank.
        check: whether to check the checkpoint's tensors instead of loading them.

    Raises:
        ValueError: the checkpoint is not for this target or layout.
    """
    spec, checkpoint = make_eagle3(config, target.spec)
    attention = spec.layer.mixer
    assert isinstance(attention, AttentionSpec)
    try:
        layout.check_heads(attention.q_heads, attention.kv_heads)
        window = min(config.window or spec.max_positions, target.spec.max_positions)
        if window in target.spec.windows:
            raise ValueError(f"its window of {window} tokens is one of the target's: set another speculation.window")
        d2t = checkpoint.whole("d2t") if "d2t" in checkpoint.files else None
        ids = None if d2t is None else d2t + torch.arange(len(d2t))
        weights = Weights(target.weights.dtype, target.weights.device)
        layer = Eagle3Layer(weights, comm, layout, spec, target, ids, window)
        if check:
            checkpoint.check(weights.slices, UNUSED)
        else:
            checkpoint.load(weights)
        return layer
    except ValueError as error:
        raise ValueError(f"the draft layer (speculation.path={config.path}): {error}") from error


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
    checkpoint = Checkpoint(Path(config.path), stored_format(config))
    spec = checkpoint.as_stored(spec)
    checkpoint.check(weights_of(spec, layout, rank, torch.float32).slices, spec.unused)
    return checkpoint, spec


def make_formats(config: ModelConfig, checkpoint: Checkpoint | None, on_gpu: bool) -> Formats:
    """Returns the storage of a model's matrices, as model.weights names it."""
    if config.weights == "bf16" or (config.weights == "auto" and not on_gpu):
        return unpacked
    stored = stored_format(config)
    if stored is None:
        return rounded if config.weights == "fp8" else unpacked
    return stored.kept if checkpoint is None else checkpoint.kept


def stored_format(config: ModelConfig) -> WeightFormat | None:
    """Returns the format of a model's quantised weights; None if they are not quantised."""
    return WeightFormat.from_config(resolved_config(config).get("quantization_config"))


def stored_config(config: ModelConfig) -> dict[str, Any]:
    """Returns what a model's checkpoint has as its config; empty for a shape without a checkpoint."""
    return {} if config.path is None else read_config(Path(config.path))


def resolved_config(config: ModelConfig) -> dict[str, Any]:
    """Returns a model's config as it is run: that of its text part, with overrides."""
    return load_spec_config(None if config.path is None else Path(config.path), config.config)


def models_of(config: Config) -> dict[str, ModelConfig]:
    """Returns the models of a run by the key under which they are set: the target, and the draft model if any."""
    draft = {"speculation.model": config.speculation.model} if config.speculation.drafter == "model" else {}
    return {"model": config.model, **draft}


def ignored(config: Config) -> list[str]:
    """Describes the overrides of models' configs that change nothing, a line each."""
    return [
        line
        for key, model in models_of(config).items()
        for line in ignored_overrides(stored_config(model), model.config, f"{key}.config")
    ]


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
