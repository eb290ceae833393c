"""A model as data: its layers' shapes, and its options; families differ in these alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from helix.layers.specs import AttentionSpec, IndexerSpec, MixerSpec, MLASpec, MLPSpec, MoESpec, RopeSpec
from helix.layout import HelixLayout
from helix.worker.kv_cache_spec import KVCacheSpec


@dataclass(frozen=True)
class LayerSpec:
    """Spec of one layer: the mixer of tokens, and the FFN after it.

    Attributes:
        rope: its own RoPE; None: the model's.
    """

    mixer: MixerSpec
    ffn: MLPSpec | MoESpec
    rope: RopeSpec | None = None


class NextTokenNames(NamedTuple):
    """Names of a layer for multi-token prediction and of what is around it; {} is the number of the model's layers."""

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
        max_positions: context for which the model was trained, in tokens; `limited_by`: the config key with it.
        dtype: the checkpoint's own dtype, `float32`, `bfloat16` or `float16`.
        eos: token ids that end a sequence.
        unused: prefixes of checkpoint tensors that this model does not use.
        norms: placement of norms: before, after or around each half of a layer.
        weight_offset: number that gains of norms have more than their tensors.
        embedding_scale, logit_scale: factors on what is embedded, and on logits.
        round_embedding_scale: whether the first is rounded to the dtype of activations.
        nextn: layer for multi-token prediction that checkpoints have behind the last one; None: they have none.
        nextn_names: names of its tensors.
        nextn_shared_topk: tokens that its indexer chooses for the first draft of a step, and the others read; 0: each
            reads its own.
        draft: layer behind the last one that drafts, and keeps data in the model's pages; None: nothing is drafted so.
        aux_hidden_state_layers: layers whose inputs the draft layer reads, in order; their number: the last output.
            Empty: it reads the normalised output.
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
        """Different RoPEs of the layers, and the model's first."""
        found = [self.rope]
        for layer in self.layers:
            if layer.rope is not None and layer.rope not in found:
                found.append(layer.rope)
        return found

    @property
    def attention(self) -> AttentionSpec | MLASpec:
        """Attention of the first layer that reads whole sequences, else of the first layer."""
        attending = [layer.mixer for layer in self.layers if layer.mixer.is_attention]
        found = next((mixer for mixer in attending if mixer.window is None), attending[0])
        assert isinstance(found, AttentionSpec | MLASpec)
        return found

    @property
    def experts(self) -> MoESpec | None:
        """Spec of the experts; None in a dense model."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoESpec)), None)

    @property
    def indexers(self) -> list[IndexerSpec]:
        """Indexers of the layers that choose tokens (DSA)."""
        mixers = [layer.mixer for layer in self.layers]
        return [m.indexer for m in mixers if isinstance(m, MLASpec) and m.indexer is not None]

    def without_indexers(self) -> DecoderSpec:
        """Returns the spec of layers that read what others chose."""

        def alone(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            return replace(layer, mixer=replace(mixer, indexer=None)) if isinstance(mixer, MLASpec) else layer

        return replace(self, layers=tuple(map(alone, self.layers)))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding windows in tokens of the layers that attend, None for full attention."""
        return tuple(layer.mixer.window for layer in self.layers if layer.mixer.is_attention)

    @property
    def full(self) -> list[int]:
        """Indices of the layers that read whole sequences."""
        return [i for i, layer in enumerate(self.layers) if layer.mixer.is_attention and layer.mixer.window is None]

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state of each sequence in place of its tokens."""
        return not all(layer.mixer.is_attention for layer in self.layers)

    @property
    def context(self) -> str:
        """Phrase about `max_positions` for error messages."""
        return f"context of {self.max_positions} tokens ({self.limited_by} in config.json)"

    def kv_cache_specs(
        self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto"
    ) -> list[tuple[KVCacheSpec, ...]]:
        """Lists the data that each layer keeps on a rank, for a model of `dtype` and this kv.dtype."""
        return [layer.mixer.kv_cache_specs(layout, rank, dtype, kv) for layer in self.stack]

    @property
    def stack(self) -> tuple[LayerSpec, ...]:
        """All layers, the one that drafts included."""
        return self.layers if self.draft is None else (*self.layers, self.draft)

    def with_mtp(self) -> DecoderSpec:
        """Returns the spec with the layer for multi-token prediction.

        Raises:
            ValueError: the model has none.
        """
        if self.nextn is None:
            raise ValueError(
                "speculation.drafter=mtp: config.json names no layer for multi-token prediction "
                "(num_nextn_predict_layers of DeepSeek-V3 and its kin, mtp_num_hidden_layers of Qwen3.5): "
                "set speculation=ngram or another drafter"
            )
        name = self.nextn_names.layer.format(len(self.layers))
        shared = (f"{name}.{part}" for part in ("embed_tokens.", "shared_head.head.", "shared_head.weight"))
        others = (prefix for prefix in self.unused if not f"{name}.".startswith(prefix))
        return replace(self, draft=self.nextn, unused=(*others, *shared, f"model.layers.{len(self.layers) + 1}."))
