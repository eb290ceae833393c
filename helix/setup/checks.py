"""Validation of a config against its layout, its model and its draft model, and the checkpoints of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from comm.base import Communicator
from comm.loopback import LoopbackWorld
from helix.config import Config, ModelConfig, SpeculationConfig
from helix.files import read_json, read_text
from helix.layers.specs import AttentionSpec
from helix.layers.weights import ModelShard, Weights
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.decoder import Decoder
from helix.models.draft_layer import Eagle3Layer
from helix.models.eagle3 import UNUSED
from helix.models.loading import Checkpoint, weights_of
from helix.placement import Stripes
from helix.setup.parts import check_latents, check_weights, make_draft_layout, make_eagle3, make_spec, stored_format
from helix.speculation import check_draft
from helix.tokenizer import has_tokenizer


@dataclass(frozen=True)
class CheckedDraft:
    """The draft model of a checked run; attributes as there."""

    layout: HelixLayout
    spec: DecoderSpec
    checkpoint: Checkpoint | None


def check_layout(layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if the model cannot be spread over the layout."""
    layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
    experts = None if spec.experts is None else spec.experts.experts
    if layout.ep > 1 and experts is None:
        raise ValueError(f"layout.ep={layout.ep} but the model has no experts: set layout.ep=1")
    if experts is not None and layout.ep > experts:
        raise ValueError(
            f"layout.ep={layout.ep} but the model has {experts} experts, so that some ranks would hold none: "
            f"set layout.ep to {experts} or less, and the rest splits each expert (layout.tpf)"
        )


def check_attention(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if queries cannot choose the blocks that they read."""
    attention = config.attention
    if attention.policy == "dense":
        return
    what = f"attention.policy={attention.policy}"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses by the keys of heads, and the model has latents (MLA): set attention=dense")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set attention=dense")
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    least = 1 + -(-drafts // attention.block)
    if attention.local_blocks < least:
        raise ValueError(
            f"attention.local_blocks={attention.local_blocks} blocks of attention.block={attention.block} tokens do "
            f"not hold an unfinished block and speculation.gamma={drafts} drafts: set at least {least}"
        )
    if attention.choice == "local":
        return
    if attention.block != config.blocks.append:
        raise ValueError(
            f"attention.choice=global compares blocks of all ranks: attention.block={attention.block} must be "
            f"kv.append_block={config.blocks.append} (or set attention.choice=local)"
        )
    if config.hopb.may_cut:
        raise ValueError(
            f"attention.choice=global exchanges in the middle of attention, which {config.hopb} would cut: set "
            "hopb=off or attention.choice=local"
        )
    if layout.tpa > spec.attention.kv_heads:
        raise ValueError(
            f"attention.choice=global needs all query heads of a KV head on one rank; layout.tpa={layout.tpa} splits "
            f"those of the model's {spec.attention.kv_heads} KV heads: set a tpa of at most {spec.attention.kv_heads}"
        )


def check_self_drafts(config: Config, spec: DecoderSpec) -> None:
    """Raises ValueError if a model cannot draft for itself over few of its keys."""
    if config.speculation.drafter != "sparse":
        return
    what = "speculation.drafter=sparse"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses keys of heads, and the model has latents (MLA): set speculation=ngram")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set speculation=ngram")
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} is verified over all keys, and attention.policy={config.attention.policy} reads a part of them: "
            "set attention=dense, or speculation=ngram"
        )
    page = config.blocks.page
    if page & (page - 1) or 1 < page < 16:
        raise ValueError(f"{what} takes pages of 1 token or of a power of two from 16 on, not kv.page_size={page}")


def check_own_sequences(config: Config, layout: HelixLayout) -> None:
    """Raises ValueError if ranks that attend sequences of their own (mode dp) cannot do what the config wants."""
    if layout.mode != "dp":
        return
    what = f"layout.mode=dp with {layout.dp} ranks"
    if config.speculation.drafter != "none":
        raise ValueError(
            f"{what} draws one token a step, and speculation.drafter={config.speculation.drafter} several: set "
            "speculation=none or layout.mode=helix"
        )
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} reads all keys, and attention.policy={config.attention.policy} a part of them: set "
            "attention=dense or layout.mode=helix"
        )
    if config.hopb.may_cut:
        raise ValueError(f"{what} exchanges nothing in attention that {config.hopb} could overlap: set hopb=off")


def check_states(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if layers that keep a state of each sequence cannot do what the config wants."""
    if not spec.has_states:
        if config.kv.host_snapshots:
            raise ValueError(
                f"kv.host_snapshots={config.kv.host_snapshots} are copies of states, and the model's layers keep none: "
                "leave it out"
            )
        return
    if config.kv.host_snapshots and config.speculation.drafter in ("mtp", "eagle3"):
        raise ValueError(
            f"kv.host_snapshots={config.kv.host_snapshots} are for prefix hits, which models with states do not have "
            f"with speculation.drafter={config.speculation.drafter}: leave it out, or set speculation=ngram"
        )
    why = "is not supported for models whose layers keep states (Gated DeltaNet)"
    if layout.mode == "dp":
        raise ValueError(f"layout.mode=dp {why}: set layout.mode=helix")
    if config.speculation.drafter == "sparse":
        raise ValueError(f"speculation.drafter=sparse {why}: set speculation=ngram")


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
    spec = make_eagle3(config, target.spec)
    attention = spec.layer.mixer
    assert isinstance(attention, AttentionSpec)
    try:
        layout.check_heads(attention.q_heads, attention.kv_heads)
        window = min(config.window or spec.max_positions, target.spec.max_positions)
        if window in target.spec.windows:
            raise ValueError(f"its window of {window} tokens is one of the target's: set another speculation.window")
        checkpoint = Checkpoint(Path(str(config.path)))
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


def check_eagle3(config: Config, layout: HelixLayout, target: DecoderSpec, rank: int) -> None:
    """Raises ValueError if the layer of speculation.drafter=eagle3 is not for this target and layout."""
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))  # a place, nothing is sent
    model = Decoder(target, layout, comm, torch.float32, torch.device("meta"))
    load_eagle3(config.speculation, model, layout, comm, check=True)


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


def make_draft(config: Config, of_target: HelixLayout, target: DecoderSpec, rank: int) -> CheckedDraft:
    """Checks the draft model; raises ValueError unless it can propose to the target."""
    speculation = config.speculation
    try:
        if speculation.model.path is None and not speculation.model.config:
            raise ValueError("speculation=model needs speculation.model.path=DIR")
        spec = make_spec(replace(config, model=speculation.model), "speculation.model")
        check_weights(speculation.model, "speculation.model")
        check_latents(config, spec)
        if spec.has_states:
            raise ValueError("a model whose layers keep states (Gated DeltaNet) cannot draft: set speculation=ngram")
        layout = make_draft_layout(speculation.layout, spec, of_target.world_size)
        stripes = Stripes(of_target, *config.blocks)
        check_draft(target.vocab, spec.vocab, layout, stripes)
        check_layout(layout, spec)
        if has_tokenizer(config.model.path) and has_tokenizer(speculation.model.path):
            check_tokenizers(Path(str(config.model.path)), Path(str(speculation.model.path)))
        checkpoint, spec = make_checkpoint(speculation.model, spec, layout, rank)
        return CheckedDraft(layout, spec, checkpoint)
    except ValueError as error:
        raise ValueError(f"the draft model (speculation.model and speculation.layout): {error}") from error


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ValueError if a token id stands for different texts in the target and the draft model."""
    files = [path / "tokenizer.json" for path in (target, draft)]
    if read_text(files[0]) == read_text(files[1]):
        return
    ours, theirs = (_token_ids(file) for file in files)
    differing = sorted(text for text in {*ours, *theirs} if ours.get(text) != theirs.get(text))
    if differing:
        text = differing[0]
        raise ValueError(
            f"the tokenizers in {target} and {draft} differ in {len(differing)} tokens, such as {text!r}: id "
            f"{ours.get(text, 'none')} and {theirs.get(text, 'none')}; a draft model has to share the target's tokens"
        )


def _token_ids(file: Path) -> dict[str, int]:
    content = read_json(file)
    try:
        vocab = content["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        return ids | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} has no vocabulary of the tokenizers library") from error
