"""EAGLE-3: one layer with a checkpoint of its own that drafts from three of the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comm.base import Communicator
from comm.hopb import Pipeline
from helix.attention.base import AttentionPolicy
from helix.layers.attention import AttentionSpec
from helix.layers.embedding import Embedding
from helix.layers.linear import RowParallel
from helix.layers.mixer import LayerPlace
from helix.layers.norm import AllReduceNorm
from helix.layers.rotary import RopeSpec, Rotary
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.memory.kv_cache import KVCache
from helix.models import llama
from helix.models.decoder import Decoder, DecoderSpec, LayerSpec
from helix.models.hf import read_as
from helix.steps.step import Step
from kernels.dense.linear import linear

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel")
UNUSED = ("d2t", "t2d")  # tensors that are no weights
TAPS = 3


@dataclass(frozen=True)
class Eagle3Spec:
    """Shape and options of a draft layer's checkpoint.

    Attributes:
        layer: its attention, which reads embeddings and states side by side, and its FFN.
        name: name of the layer in the checkpoint.
        vocab: token ids of its head; None: the target's head.
        taps: layers of the target whose inputs it reads.
        named: how config.json names these, for messages.
        own_embedding: whether it has an embedding of its own.
        normed_residual: whether the residual stream begins with normalised states.
    """

    hidden: int
    layer: LayerSpec
    name: str
    rope: RopeSpec
    norm_eps: float
    vocab: int | None
    taps: tuple[int, ...]
    named: str
    own_embedding: bool
    normed_residual: bool
    max_positions: int


def read(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: DecoderSpec) -> Eagle3Spec:
    """Reads the `config.json` of a draft layer for a target.

    Args:
        shapes: shapes of the checkpoint's tensors.

    Raises:
        ValueError: the layer is of another kind, or not for this target.
    """
    names = config.get("architectures") or []
    if not set(names) & {*ARCHITECTURES}:
        raise ValueError(f"config.json: architectures={names!r:.100} must name one of {', '.join(ARCHITECTURES)}")
    speculators = "speculators_model_type" in config
    config = {**config, **(config.get("transformer_layer_config") or {})} if speculators else config
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if config.get(key):
            raise ValueError(f"config.json: {key}={config[key]!r} is not supported")
    of = llama.spec(read_as("llama", {k: v for k, v in config.items() if k != "architectures"}))
    if len(of.layers) != 1:
        raise ValueError(f"config.json: num_hidden_layers={len(of.layers)} must be 1")
    attention = of.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    own_embedding, vocab = "embed_tokens.weight" in shapes, config.get("draft_vocab_size")
    if of.vocab != target.vocab:
        raise ValueError(f"config.json: vocab_size={of.vocab}, and the target has {target.vocab} token ids")
    if (size := config.get("target_hidden_size") or target.hidden) != target.hidden:
        raise ValueError(f"config.json: target_hidden_size={size}, and the target's states have {target.hidden}")
    if of.hidden != target.hidden and not (own_embedding and "lm_head.weight" in shapes):
        raise ValueError(
            f"config.json: hidden_size={of.hidden} is not the target's {target.hidden}, whose embedding and head it "
            "shares: it needs embed_tokens.weight and lm_head.weight of its own"
        )
    taps, named = _taps(config, len(target.layers), speculators)
    return Eagle3Spec(
        of.hidden,
        LayerSpec(replace(attention, inputs=2 * of.hidden), of.layers[0].ffn),
        "midlayer" if any(name.startswith("midlayer.") for name in shapes) else "layers.0",
        of.rope,
        of.norm_eps,
        (vocab or of.vocab) if "lm_head.weight" in shapes else None,
        taps,
        named,
        own_embedding,
        bool(config.get("norm_before_residual")),
        of.max_positions,
    )


def _taps(config: Mapping[str, Any], layers: int, speculators: bool) -> tuple[tuple[int, ...], str]:
    """Returns the layers whose inputs are read, and how config.json names them.

    Some files name them so, others the layers before them. Most have the usual ones, which tell; else files of
    speculators do the former, and those of SpecForge the latter. The wrong ones would cost acceptance alone.
    """
    usual = 2, layers // 2, layers - 3
    options = config.get("eagle_config")
    given = (options if isinstance(options, Mapping) else config).get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        return usual, "the usual ones"
    if not isinstance(given, list) or len(given) != TAPS or not all(type(i) is int and 0 <= i < layers for i in given):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids={given!r:.100} must be {TAPS} of the target's {layers} "
            "layers"
        )
    after = tuple(i + 1 for i in given)
    if tuple(given) == usual or (speculators and after != usual):
        return tuple(given), f"{given} in config.json"
    return after, f"behind {given} in config.json"


def drafted_by(target: DecoderSpec, spec: Eagle3Spec) -> DecoderSpec:
    """Returns the target's spec with the layer, as memory sees it: all tokens stay in pages, whatever its window."""
    return replace(target, draft=spec.layer, taps=spec.taps)


class Eagle3Layer:
    """A `DraftLayer` on this rank; its states are residual streams, the model's combined by a projection.

    Args:
        window: latest tokens of a sequence that it reads.
        ids: target's token ids of the head's rows [draft_vocab] int64, ascending; None: all, or the target's head.

    Raises:
        ValueError: the ids do not ascend.

    Source:
        EAGLE-3 (https://arxiv.org/abs/2503.01840).
    """

    def __init__(
        self,
        weights: Weights,
        comm: Communicator,
        layout: HelixLayout,
        spec: Eagle3Spec,
        target: Decoder,
        ids: Tensor | None,
        window: int,
    ) -> None:
        hidden, name, eps = spec.hidden, spec.name, spec.norm_eps
        self.spec, self.window = spec, window
        self.read, self.width, self.vocab_rows = len(spec.taps) * target.spec.hidden, hidden, target.embedding.rows
        self.choice = 0
        self._columns = layout.ffn_columns(comm.rank, self.read)
        self.join = RowParallel(weights, comm, "fc", self._columns, self.read, hidden, False)
        self.embedding = target.embedding
        if spec.own_embedding:
            self.embedding = Embedding(weights, "embed_tokens", self.vocab_rows, target.spec.vocab, hidden)
        self.input_norm = AllReduceNorm(weights, comm, f"{name}.input_layernorm", hidden, eps)
        self.state_norm = AllReduceNorm(weights, comm, f"{name}.hidden_norm", hidden, eps)
        place = LayerPlace(name, len(target.spec.layers), Pipeline(None))
        assert isinstance(spec.layer.mixer, AttentionSpec)
        self.mixer = replace(spec.layer.mixer, window=window).build(weights, comm, layout, place)
        self.ffn_norm = AllReduceNorm(weights, comm, f"{name}.post_attention_layernorm", hidden, eps)
        self.ffn = spec.layer.ffn.build(weights, comm, layout, hidden, name)
        self.norm = AllReduceNorm(weights, comm, "norm", hidden, eps)
        self._rotary = Rotary(spec.rope, weights.dtype, weights.device)
        self._head: Tensor = target.head.weight
        self._ids: Tensor | None = None
        if spec.vocab is not None:
            ids = torch.arange(spec.vocab) if ids is None else ids
            if len(ids) != spec.vocab or not bool((ids[1:] > ids[:-1]).all()):
                raise ValueError(f"d2t must give {spec.vocab} ascending token ids")
            first, end = (int(torch.searchsorted(ids, i)) for i in (self.vocab_rows.start, self.vocab_rows.stop))
            self._head = weights.parameter(end - first, hidden)
            weights.bind(self._head, "lm_head.weight", (spec.vocab, hidden), range(first, end))
            self._ids = (ids[first:end] - self.vocab_rows.start).to(weights.device)

    @property
    def about(self) -> str:
        """Line about what it reads, in which a mistake would cost acceptance alone."""
        taps = ", ".join(map(str, self.spec.taps))
        return (
            f"drafts read what enters layers {taps} of the model ({self.spec.named}), and the latest {self.window:,} "
            f"tokens (its config.json has max_position_embeddings={self.spec.max_positions}; see speculation.window)"
        )

    def append(self, cache: KVCache, step: Step, states: Tensor, *, own: bool) -> tuple[Any, Tensor]:
        if own:
            normed, x = self.state_norm.of(states), states
        else:
            parts = self.join(states[:, self._columns.start : self._columns.stop].contiguous())
            normed, x = self.state_norm(parts, None)
        both = torch.cat((self.input_norm(self.embedding(step.tokens), None)[0], normed), 1)
        q = self.mixer.project(both, self._rotary.angles(step.positions), cache, step)
        return q, normed if self.spec.normed_residual else x

    def attend(self, queries: Any, x: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        normed, x = self.ffn_norm(self.mixer.finish(queries, cache, step, policy), x)
        return self.norm(self.ffn(normed), x)[1]

    def logits(self, states: Tensor) -> Tensor:
        normed = self.norm.of(states)
        if self._ids is None:
            return linear(normed, self._head).float()
        out = torch.full((len(states), len(self.vocab_rows)), -torch.inf, device=states.device)
        return out.index_copy_(1, self._ids, linear(normed, self._head).float()) if len(self._ids) else out
