"""Opens and checks the checkpoints of a run: the model, its draft model and its draft layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from comm.base import Communicator
from comm.loopback import LoopbackWorld
from helix.checks import check_latents, check_layout, check_weights
from helix.config import Config, ModelConfig, SpeculationConfig
from helix.files import read_json, read_text
from helix.kv_placement import Stripes
from helix.layers.specs import AttentionSpec
from helix.layers.weights import ModelShard, Weights
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.decoder import Decoder
from helix.models.draft_layer import Eagle3Layer
from helix.models.eagle3 import PREFIXES, UNUSED
from helix.models.loading import Checkpoint, weights_of
from helix.setup.parts import make_draft_layout, make_eagle3, make_spec, stored_format
from helix.speculation import check_draft
from helix.tokenizer import has_tokenizer


@dataclass(frozen=True)
class CheckedDraft:
    """The draft model of a checked run."""

    layout: HelixLayout
    spec: DecoderSpec
    checkpoint: Checkpoint | None


def load_eagle3(
    config: SpeculationConfig, target: Decoder, layout: HelixLayout, comm: Communicator, *, check: bool = False
) -> Eagle3Layer:
    """Builds and loads this rank's shard of the EAGLE-3 draft layer.

    Args:
        target: this rank's shard of the target.
        check: whether to check the checkpoint's tensors instead of loading them.

    Raises:
        ValueError: the checkpoint is not for this target or layout.
    """
    spec = make_eagle3(config, target.spec)
    attention = spec.layer.mixer
    assert isinstance(attention, AttentionSpec)
    try:
        layout.check_heads(attention.q_heads, attention.kv_heads)
        window = min(config.window or spec.max_positions, target.spec.max_positions)
        if window in target.spec.windows:
            raise ValueError(
                f"its window of {window} tokens equals a window of the target: set another speculation.window"
            )
        checkpoint = Checkpoint(Path(str(config.path)), prefixes=PREFIXES)
        d2t = checkpoint.whole("d2t") if "d2t" in checkpoint.files else None
        ids = None if d2t is None else d2t + torch.arange(len(d2t))
        weights = Weights(target.weights.dtype, target.weights.device)
        layer = Eagle3Layer(ModelShard(weights, comm, layout), spec, target, ids, window)
        if check:
            checkpoint.check(weights.slices, UNUSED)
        else:
            checkpoint.load(weights)
        return layer
    except ValueError as error:
        raise ValueError(f"the draft layer (speculation.path={config.path}): {error}") from error


def check_eagle3(config: Config, layout: HelixLayout, target: DecoderSpec) -> None:
    """Raises ValueError if the EAGLE-3 layer does not fit this target and layout."""
    comm = LoopbackWorld(layout.world_size).communicator(0, layout.kvp_group(0))  # only for its rank
    model = Decoder(target, layout, comm, torch.float32, torch.device("meta"))
    load_eagle3(config.speculation, model, layout, comm, check=True)


def open_checkpoint(config: ModelConfig, spec: DecoderSpec) -> tuple[Checkpoint | None, DecoderSpec]:
    """Opens a model's checkpoint (None for random weights); returns it, and the spec completed by its tensors.

    Raises:
        ValueError: its files cannot be read.
    """
    if config.load != "checkpoint":
        return None, spec
    assert config.path is not None, "call check_weights first"
    checkpoint = Checkpoint(Path(config.path), stored_format(config))
    return checkpoint, checkpoint.as_stored(spec)


def check_tensors(checkpoint: Checkpoint | None, spec: DecoderSpec) -> None:
    """Raises ValueError unless a checkpoint has exactly the model's tensors."""
    if checkpoint is not None:
        checkpoint.check(weights_of(spec, HelixLayout.create(), 0, torch.float32).slices, spec.unused)


def make_draft(config: Config, target_layout: HelixLayout, target: DecoderSpec) -> CheckedDraft:
    """Creates the draft model's layout, spec and checkpoint; ValueError if it cannot draft for the target."""
    speculation = config.speculation
    try:
        if speculation.model.path is None and not speculation.model.config:
            raise ValueError(
                "speculation=model needs speculation.model.path, the draft model's directory: set "
                "speculation.model.path=DIR"
            )
        spec = make_spec(replace(config, model=speculation.model), "speculation.model")
        check_weights(speculation.model, "speculation.model")
        check_latents(config, spec)
        if spec.has_states:
            raise ValueError("a model with recurrent states (Gated DeltaNet) cannot draft: set speculation=ngram")
        layout = make_draft_layout(speculation.layout, spec, target_layout.world_size)
        check_draft(target.vocab, spec.vocab, layout, Stripes(target_layout, *config.blocks))
        check_layout(layout, spec)
        checkpoint, spec = open_checkpoint(speculation.model, spec)
        return CheckedDraft(layout, spec, checkpoint)
    except ValueError as error:
        raise ValueError(f"the draft model (speculation.model and speculation.layout): {error}") from error


def check_draft_files(config: Config, draft: CheckedDraft) -> None:
    """Raises ValueError if the draft model's tokenizer differs from the target's, or its weights are incomplete."""
    target, model = config.model.path, config.speculation.model.path
    try:
        if has_tokenizer(target) and has_tokenizer(model):
            check_tokenizers(Path(str(target)), Path(str(model)))
        check_tensors(draft.checkpoint, draft.spec)
    except ValueError as error:
        raise ValueError(f"the draft model (speculation.model and speculation.layout): {error}") from error


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ValueError if any token id means different texts in the target and the draft model."""
    files = [path / "tokenizer.json" for path in (target, draft)]
    if read_text(files[0]) == read_text(files[1]):
        return
    ours, theirs = (_token_ids(file) for file in files)
    differing = sorted(text for text in {*ours, *theirs} if ours.get(text) != theirs.get(text))
    if differing:
        text = differing[0]
        raise ValueError(
            f"the tokenizers in {target} and {draft} differ in {len(differing)} tokens, such as {text!r}: id "
            f"{ours.get(text, 'none')} and {theirs.get(text, 'none')}; a draft model must share the target's tokens"
        )


def _token_ids(file: Path) -> dict[str, int]:
    content = read_json(file)
    try:
        vocab = content["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        return ids | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} has no vocabulary of the tokenizers library") from error
