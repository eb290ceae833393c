"""Creates the layouts, specs and weight formats that a config names. Free of torch: the planner uses them, too."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import Any

from helix.config import Config, DraftLayoutConfig, LayoutConfig, ModelConfig, SpeculationConfig
from helix.layers.specs import Formats, Fp8Activations, unquantized
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import CheckpointFiles, WeightFormat, fp8_format, read_config
from helix.models.eagle3 import PREFIXES, Eagle3Spec, with_eagle3
from helix.models.eagle3 import read as read_eagle3
from helix.models.overrides import check_overrides, ignored_overrides, load_spec_config


def make_layout(config: LayoutConfig) -> HelixLayout:
    """Creates the layout; ValueError if the widths do not form one."""
    return HelixLayout.create(config.mode, config.kvp, config.tpa, config.tpf, config.ep, config.dp)


def make_spec(config: Config, key: str = "model") -> DecoderSpec:
    """Creates the spec of a model.

    Args:
        key: setting of the model, for messages.

    Raises:
        ValueError: the model or an override of its config is unknown, or it lacks the drafter's layer.
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
        return with_eagle3(spec, make_eagle3(config.speculation, spec))
    if config.speculation.drafter == "sparse" and config.speculation.policy == "any":
        return spec.with_stored_selections()
    return spec.with_mtp() if config.speculation.drafter == "mtp" else spec


def make_eagle3(config: SpeculationConfig, target: DecoderSpec) -> Eagle3Spec:
    """Reads the EAGLE-3 spec; ValueError if its checkpoint is not for this target."""
    if config.path is None:
        raise ValueError(
            "speculation=eagle3 needs speculation.path, the directory of the draft layer's checkpoint: set "
            "speculation.path=DIR"
        )
    path = Path(config.path)
    try:
        files = CheckpointFiles(path, prefixes=PREFIXES)
        return read_eagle3(read_config(path), files.shapes, target)
    except ValueError as error:
        raise ValueError(f"the draft layer (speculation.path={path}): {error}") from error


def make_formats(config: ModelConfig, checkpoint: CheckpointFiles | None, on_gpu: bool) -> Formats:
    """Returns the quantized formats of a model's matrices, from model.weights and model.activations."""
    formats = _stored_formats(config, checkpoint, on_gpu)
    return Fp8Activations(formats) if config.activations == "fp8" else formats


def _stored_formats(config: ModelConfig, checkpoint: CheckpointFiles | None, on_gpu: bool) -> Formats:
    if config.weights == "bf16" or (config.weights == "auto" and not on_gpu):
        return unquantized
    stored = stored_format(config)
    if stored is None:
        return fp8_format if config.weights == "fp8" else unquantized
    return stored.matrix_format if checkpoint is None else checkpoint.matrix_format


def stored_format(config: ModelConfig) -> WeightFormat | None:
    """Returns the checkpoint's quantization format; None if it is not quantized."""
    return WeightFormat.from_config(resolved_config(config).get("quantization_config"))


def stored_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the checkpoint's config; empty for a shape without a checkpoint."""
    return {} if config.path is None else read_config(Path(config.path))


def resolved_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config of a model's text part, with overrides."""
    return load_spec_config(None if config.path is None else Path(config.path), config.config)


def models_of(config: Config) -> dict[str, ModelConfig]:
    """Returns the target, and the draft model if any, by the key that sets them."""
    draft = {"speculation.model": config.speculation.model} if config.speculation.drafter == "model" else {}
    return {"model": config.model, **draft}


def ignored(config: Config) -> list[str]:
    """Lists, a line each, the overrides of models' configs that have no effect."""
    return [
        line
        for key, model in models_of(config).items()
        for line in ignored_overrides(stored_config(model), model.config, f"{key}.config")
    ]


def make_draft_layout(config: DraftLayoutConfig, spec: DecoderSpec, world_size: int) -> HelixLayout:
    """Creates the draft model's layout over `world_size` ranks; ValueError if the widths do not form one."""
    kvp, tpa = config.kvp, config.tpa
    if kvp is None and tpa is None:
        tpa = world_size if config.mode == "tp" else gcd(spec.kv_heads, world_size)
    if tpa is None:
        tpa = max(1, world_size // max(1, kvp or 1))
    if kvp is None:
        kvp = max(1, world_size // max(1, tpa))
    return HelixLayout.create(config.mode, kvp, tpa, config.tpf, config.ep)
