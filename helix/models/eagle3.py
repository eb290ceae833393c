"""EAGLE-3: a draft layer with its own checkpoint that reads three of the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from helix.layers.specs import AttentionSpec, RopeSpec
from helix.models import llama
from helix.models.hf import load_hf_config
from helix.models.spec import DecoderSpec, LayerSpec

# Some files name the layer's class, which says less than their tensors.
ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM",
)  # fmt: skip
UNUSED = ("d2t", "t2d")  # vocabulary maps, not weights
PREFIXES = {"model.": ""}  # of tensors in some files -> as others name them
NUM_AUX = 3
OPTIONS = (
    "use_aux_hidden_state", "num_aux_hidden_states", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual",
)  # fmt: skip


@dataclass(frozen=True)
class Eagle3Spec:
    """Shape and options of a draft layer's checkpoint.

    Attributes:
        layer: attention over concatenated embeddings and states, and FFN.
        name: of the layer in the checkpoint.
        vocab: size of its head; None: the target's head.
        aux_hidden_state_layers: layers of the target whose inputs it reads.
        source: how config.json names these layers, for messages.
        own_embedding: whether the checkpoint has an embedding.
        normed_residual: whether the residual stream begins with normalized states.
        max_positions: latest tokens that it reads: its training length, or its sliding window.
        aux_norms: names of norms of the target's states, each of an equal part of them. EAGLE-3.1 has one per layer.
        normed_output: whether the next draft reads normalized states.
    """

    hidden: int
    layer: LayerSpec
    name: str
    rope: RopeSpec
    norm_eps: float
    vocab: int | None
    aux_hidden_state_layers: tuple[int, ...]
    source: str
    own_embedding: bool
    normed_residual: bool
    max_positions: int
    aux_norms: tuple[str, ...] = ()
    normed_output: bool = False


def read(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec) -> Eagle3Spec:
    """Reads the `config.json` of a draft layer for a target.

    Args:
        shapes: shapes of the checkpoint's tensors.

    Raises:
        ValueError: the checkpoint is not EAGLE-3's, or not for this target.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not any(name in ARCHITECTURES for name in names):
        raise ValueError(f"config.json: architectures={names!r:.100} must name one of {', '.join(ARCHITECTURES)}")
    name = "midlayer" if any(name.startswith("midlayer.") for name in shapes) else "layers.0"
    if missing := [tensor for tensor in ("fc.weight", f"{name}.hidden_norm.weight") if tensor not in shapes]:
        raise ValueError(f"not an EAGLE-3 checkpoint ({names!r:.100}): it has no {' and no '.join(missing)}")
    speculators = "speculators_model_type" in config
    if speculators:
        layer_config = config.get("transformer_layer_config") or {}
        if not isinstance(layer_config, Mapping):
            raise ValueError(f"config.json: transformer_layer_config={layer_config!r:.100} must be an object")
        config = {**config, **layer_config}
    options = {key: _option(config, key) for key in OPTIONS}
    for key, supported in (("use_aux_hidden_state", True), ("num_aux_hidden_states", NUM_AUX)):
        if options[key] not in (None, supported):
            raise ValueError(f"config.json: {key}={options[key]!r:.100} is not supported; supported: {supported}")
    if options["norm_before_fc"] and options["fc_norm"]:
        raise ValueError("config.json: norm_before_fc and fc_norm are both true, but a layer has one or the other")
    aux_norms = ["input_norm"] if options["norm_before_fc"] else []
    aux_norms += [f"fc_norm.{i}" for i in range(NUM_AUX)] if options["fc_norm"] else []
    left, window = ["architectures"], None
    if config.get("layer_types") == ["sliding_attention"]:
        left, window = [*left, "layer_types"], config.get("sliding_window")
        if type(window) is not int or window <= 0:
            raise ValueError(f"config.json: sliding_window={window!r:.100} must be a positive integer")
    of = llama.spec(load_hf_config("llama", {k: v for k, v in config.items() if k not in left}))
    if len(of.layers) != 1:
        raise ValueError(f"config.json: num_hidden_layers={len(of.layers)} must be 1")
    attention = of.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    own_embedding, head = "embed_tokens.weight" in shapes, shapes.get("lm_head.weight")
    if head and (vocab := config.get("draft_vocab_size") or head[0]) != head[0]:
        raise ValueError(f"config.json: draft_vocab_size={vocab!r:.100}, but lm_head.weight has {head[0]} rows")
    if of.vocab != target.vocab:
        raise ValueError(f"config.json: vocab_size={of.vocab}, but the target has {target.vocab} token ids")
    if (size := config.get("target_hidden_size") or target.hidden) != target.hidden:
        raise ValueError(f"config.json: target_hidden_size={size}, but the target's hidden size is {target.hidden}")
    if of.hidden != target.hidden and not (own_embedding and head):
        raise ValueError(
            f"config.json: hidden_size={of.hidden} differs from the target's {target.hidden}, so it cannot share the "
            "target's embedding and head: the checkpoint needs embed_tokens.weight and lm_head.weight"
        )
    aux_hidden_state_layers, source = _aux_hidden_state_layers(config, len(target.layers), speculators)
    return Eagle3Spec(
        of.hidden,
        LayerSpec(replace(attention, inputs=2 * of.hidden), of.layers[0].ffn),
        name,
        of.rope,
        of.norm_eps,
        head[0] if head else None,
        aux_hidden_state_layers,
        source,
        own_embedding,
        bool(options["norm_before_residual"]),
        min(of.max_positions, window or of.max_positions),
        tuple(aux_norms),
        bool(options["norm_output"]),
    )


def _option(config: Mapping[str, Any], key: str) -> Any:
    # Some files have the layer's options in an object.
    options = config.get("eagle_config")
    value = options.get(key) if isinstance(options, Mapping) else None
    return config.get(key) if value is None else value


def _aux_hidden_state_layers(config: Mapping[str, Any], layers: int, speculators: bool) -> tuple[tuple[int, ...], str]:
    """Returns the layers whose inputs are read, and how config.json names them.

    Some files list these layers, others the layers before them. Most have the usual ones, which decides it; else
    speculators lists the former, SpecForge the latter. A mistake would only cost acceptance.
    """
    usual = 2, layers // 2, layers - 3
    given = _option(config, "eagle_aux_hidden_state_layer_ids")
    if given in (None, []):
        return usual, "the usual ones"
    if (
        not isinstance(given, list)
        or len(given) != NUM_AUX
        or not all(type(i) is int and 0 <= i < layers for i in given)
    ):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids={given!r:.100} must be {NUM_AUX} of the target's {layers} "
            "layers"
        )
    after = tuple(i + 1 for i in given)
    if tuple(given) == usual or (speculators and after != usual):
        return tuple(given), f"{given} in config.json"
    return after, f"after {given} in config.json"


def with_eagle3(target: DecoderSpec, spec: Eagle3Spec) -> DecoderSpec:
    """Adds the draft layer to the target's spec, for the cache: all tokens stay in pages, whatever its window."""
    return replace(target, draft=spec.layer, aux_hidden_state_layers=spec.aux_hidden_state_layers)
