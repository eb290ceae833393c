"""A model as data: the shapes and options in which model families differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, NamedTuple

from helix.layers.specs import AttentionSpec, IndexerSpec, MixerSpec, MLASpec, MLPSpec, MoESpec, RopeSpec
from helix.layout import HelixLayout
from helix.worker.kv_cache_spec import KVCacheSpec


@dataclass(frozen=True)
class LayerSpec:
    """Token mixer and FFN of a layer, and its RoPE (None: the model's)."""

    mixer: MixerSpec
    ffn: MLPSpec | MoESpec
    rope: RopeSpec | None = None


class NextTokenNames(NamedTuple):
    """Tensor names of an MTP layer and its inputs; {} is the number of the model's layers."""

    layer: str = "model.layers.{}"
    token_norm: str = "model.layers.{}.enorm"
    state_norm: str = "model.layers.{}.hnorm"
    join: str = "model.layers.{}.eh_proj"
    norm: str = "model.layers.{}.shared_head.norm"


NEXTN_NAMES = NextTokenNames()  # the last layer, as DeepSeek-V3 has it


@dataclass(frozen=True)
class DecoderSpec:
    """Shape and options of a checkpoint's model.

    Attributes:
        tied: whether the head shares the embedding's weights.
        max_positions: context length of the model, in tokens; `limited_by`: the config key that sets it.
        dtype: of the checkpoint: `float32`, `bfloat16` or `float16`.
        eos: token ids that end a sequence.
        unused: prefixes of checkpoint tensors to ignore.
        norms: position of norms: before, after or around each sublayer.
        weight_offset: added to norm weights.
        embedding_scale, logit_scale: factors on embeddings and logits.
        round_embedding_scale: whether to round `embedding_scale` to the activations' dtype.
        nextn: the checkpoint's multi-token prediction (MTP) layer, if any.
        nextn_names: names of its tensors.
        nextn_shared_topk: tokens that its indexer selects for the first draft of a step and later drafts reuse; 0: each
            draft selects.
        draft: draft layer after the last layer, which caches KV in the model's pages; None: there is none.
        aux_hidden_state_layers: layers whose inputs the draft layer reads, in order; the number of layers stands for
            the last output. Empty: it reads the normalized output.
    """

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    tied: bool
    max_positions: int
    limited_by: str
    dtype: str
    eos: tuple[int, ...]
    unused: tuple[str, ...] = ()
    norms: Literal["before", "after", "around"] = "before"
    weight_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    round_embedding_scale: bool = False
    nextn: LayerSpec | None = None
    nextn_names: NextTokenNames = NEXTN_NAMES
    nextn_shared_topk: int = 0
    draft: LayerSpec | None = None
    aux_hidden_state_layers: tuple[int, ...] = ()

    @property
    def ropes(self) -> list[RopeSpec]:
        """Distinct RoPEs of the layers, the model's first."""
        found = [self.rope]
        for layer in self.layers:
            if layer.rope is not None and layer.rope not in found:
                found.append(layer.rope)
        return found

    @property
    def attention(self) -> AttentionSpec | MLASpec:
        """Attention of the first layer with full attention, else of the first with attention."""
        attending = [layer.mixer for layer in self.layers if layer.mixer.is_attention]
        found = next((mixer for mixer in attending if mixer.window is None), attending[0])
        assert isinstance(found, AttentionSpec | MLASpec)
        return found

    @property
    def attentions(self) -> Counter[AttentionSpec | MLASpec]:
        """Counts the layers with each distinct attention."""
        mixers = (layer.mixer for layer in self.layers)
        return Counter(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | MLASpec))

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Distinct numbers of query and KV heads of attention layers."""
        return [*dict.fromkeys((mixer.q_heads, mixer.kv_heads) for mixer in self.attentions)]

    @property
    def kv_heads(self) -> int:
        """Number whose divisors divide the KV heads of every attention layer."""
        return gcd(*(kv_heads for _, kv_heads in self.heads))

    @property
    def full_layers_differ(self) -> bool:
        """Whether layers with full attention differ in heads or sizes, for what needs them to be alike."""
        full = {self.layers[i].mixer for i in self.full}
        return len({(m.q_heads, m.kv_heads, m.head_dim) for m in full if isinstance(m, AttentionSpec)}) > 1

    @property
    def experts(self) -> MoESpec | None:
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoESpec)), None)

    @property
    def indexers(self) -> list[IndexerSpec]:
        mixers = [layer.mixer for layer in self.layers]
        return [m.indexer for m in mixers if isinstance(m, MLASpec) and m.indexer is not None]

    @property
    def selecting_layers(self) -> dict[int, int]:
        """By layer with DSA: the layer whose indexer selects for it."""
        found: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mixer, MLASpec) and layer.mixer.topk is not None:
                found[i] = i if layer.mixer.indexer is not None else found[i - 1]
        return found

    @property
    def most_sharing_layers(self) -> int:
        """The most layers for which one indexer selects."""
        return max(Counter(self.selecting_layers.values()).values())

    def without_indexers(self) -> DecoderSpec:
        """Returns the spec with DSA layers that reuse another layer's selection."""

        def alone(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            return replace(layer, mixer=replace(mixer, indexer=None)) if isinstance(mixer, MLASpec) else layer

        return replace(self, layers=tuple(map(alone, self.layers)))

    def with_stored_selections(self) -> DecoderSpec:
        """Returns the spec with indexers that store what they select, for `speculation=sparse`."""

        def stored(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            if not isinstance(mixer, MLASpec) or mixer.indexer is None or mixer.topk is None:
                return layer
            return replace(layer, mixer=replace(mixer, indexer=replace(mixer.indexer, stored_topk=mixer.topk)))

        return replace(self, layers=tuple(map(stored, self.layers)))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window, in tokens, of each attention layer; None for full attention."""
        return tuple(layer.mixer.window for layer in self.layers if layer.mixer.is_attention)

    @property
    def full(self) -> list[int]:
        """Indices of the layers with full attention."""
        return [i for i, layer in enumerate(self.layers) if layer.mixer.is_attention and layer.mixer.window is None]

    @property
    def has_states(self) -> bool:
        """Whether some layers have recurrent states instead of a KV cache."""
        return not all(layer.mixer.is_attention for layer in self.layers)

    @property
    def context(self) -> str:
        return f"context of {self.max_positions} tokens ({self.limited_by} in config.json)"

    def stretched(self, tokens: int) -> str:
        """Returns the settings with which YaRN stretches the context to `tokens`; empty if RoPE is scaled already."""
        if self.rope.kind != "default":
            return ""
        key, factor = "model.config.rope_scaling", -(-tokens // self.max_positions)
        settings = f"rope_type=yarn {key}.factor={factor} {key}.original_max_position_embeddings={self.max_positions}"
        return f", or stretch it with YaRN: {key}.{settings}"

    def kv_cache_specs(
        self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto"
    ) -> list[tuple[KVCacheSpec, ...]]:
        """Lists what each layer caches on a rank; `dtype` is the model's, `kv` is kv.dtype."""
        specs = [layer.mixer.kv_cache_specs(layout, rank, dtype, kv) for layer in self.stack]
        if self.draft is not None:  # its next row reads the target's state of the token before
            width = self.hidden * max(len(self.aux_hidden_state_layers), 1)
            specs[-1] += (KVCacheSpec("target_state", (width,), dtype, "prompt"),)
        return specs

    @property
    def stack(self) -> tuple[LayerSpec, ...]:
        return self.layers if self.draft is None else (*self.layers, self.draft)

    def with_mtp(self) -> DecoderSpec:
        """Returns the spec with the MTP layer as draft layer; ValueError if the model has none."""
        if self.nextn is None:
            raise ValueError(
                "speculation.drafter=mtp: config.json names no multi-token prediction layer that is supported "
                "(num_nextn_predict_layers in DeepSeek-V3 and similar models, mtp_num_hidden_layers in Qwen3.5): set "
                "speculation=ngram or another drafter"
            )
        name = self.nextn_names.layer.format(len(self.layers))
        shared = (f"{name}.{part}" for part in ("embed_tokens.", "shared_head.head.", "shared_head.weight"))
        others = (prefix for prefix in self.unused if not f"{name}.".startswith(prefix))
        return replace(self, draft=self.nextn, unused=(*others, *shared))
