"""Decoder-only transformer over a Helix layout; model families differ only in their `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from comm import turns
from comm.base import Communicator
from comm.hopb import Pipeline
from comm.pending import PendingSum
from comm.solo import SoloCommunicator
from helix.attention.base import AttentionPolicy
from helix.layers.attention import Attention, AttentionSpec
from helix.layers.embedding import Embedding, Head
from helix.layers.indexer import IndexerSpec
from helix.layers.mixer import LayerPlace, MixerSpec
from helix.layers.mla import MLASpec
from helix.layers.mlp import MLPSpec
from helix.layers.moe import MoESpec
from helix.layers.norm import AllReduceNorm
from helix.layers.rotary import RopeSpec, Rotary
from helix.layers.rows import over_all_ranks
from helix.layers.weights import Formats, Weights, unpacked
from helix.layout import HelixLayout
from helix.memory.keeps import Keeps
from helix.memory.kv_cache import KVCache
from helix.steps.step import Step


@dataclass(frozen=True)
class LayerSpec:
    """Spec of one layer: the mixer of tokens, and the FFN after it."""

    mixer: MixerSpec
    ffn: MLPSpec | MoESpec


@dataclass(frozen=True)
class DecoderSpec:
    """Shape and options of a checkpoint's model.

    Attributes:
        tied: whether the head shares the embedding's weights.
        max_positions: context for which the model was trained, in tokens; `limited_by`: the config key with it.
        dtype: the checkpoint's own dtype, `float32`, `bfloat16` or `float16`.
        eos: token ids that end a sequence.
        unused: prefixes of checkpoint tensors that this model does not use.
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

    @property
    def attention(self) -> AttentionSpec | MLASpec:
        """Attention of the first layer that reads whole sequences, else of the first layer."""
        attending = [layer.mixer for layer in self.layers if layer.mixer.attends]
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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding windows in tokens of the layers that attend, None for full attention."""
        return tuple(layer.mixer.window for layer in self.layers if layer.mixer.attends)

    @property
    def full(self) -> list[int]:
        """Indices of the layers that read whole sequences."""
        return [i for i, layer in enumerate(self.layers) if layer.mixer.attends and layer.mixer.window is None]

    @property
    def context(self) -> str:
        """Phrase about `max_positions` for error messages."""
        return f"context of {self.max_positions} tokens ({self.limited_by} in config.json)"

    def keeps(self, layout: HelixLayout, rank: int, dtype: torch.dtype, kv: str = "auto") -> list[tuple[Keeps, ...]]:
        """Lists the data that each layer keeps on a rank, for a model of `dtype` and this kv.dtype."""
        return [layer.mixer.keeps(layout, rank, dtype, kv) for layer in self.layers]


class DecoderLayer:
    """Pre-norm residual block: attention over KVP x TPA, then the FFN over the same ranks.

    Each sum over ranks is done by the norm that follows it, which reads the whole residual stream anyway. In mode dp
    attention and norms have this rank's sequences alone, and the FFN gathers rows and scatters sums.

    Args:
        comm: the communicator of all ranks.
        own: that of the ranks which attend the same sequences.
    """

    def __init__(
        self,
        weights: Weights,
        comm: Communicator,
        own: Communicator,
        layout: HelixLayout,
        spec: DecoderSpec,
        index: int,
        pipeline: Pipeline,
    ) -> None:
        self.index = index
        self.comm, self._scattered = comm, own is not comm
        name, layer = f"model.layers.{index}", spec.layers[index]
        self.input_norm = AllReduceNorm(weights, own, f"{name}.input_layernorm", spec.hidden, spec.norm_eps)
        self.mixer = layer.mixer.build(weights, own, layout, LayerPlace(name, index, pipeline))
        self.ffn_norm = AllReduceNorm(weights, own, f"{name}.post_attention_layernorm", spec.hidden, spec.norm_eps)
        self.ffn = layer.ffn.build(weights, comm, layout, spec.hidden, name)

    def queries(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        """Computes queries [N, Hq, D] of this TPA slice for a guessed input x [N, H]; appends no keys."""
        assert isinstance(self.mixer, Attention), "latents have no block selection"
        return self.mixer.queries(self.input_norm.of(x), angles, cache, step)

    def feed(self, x: Tensor, step: Step) -> Tensor | PendingSum:
        """Computes the FFN of x [N, H]: a part of a sum over ranks, or in mode dp the whole sum."""
        return over_all_ranks(self.ffn, x, step.counts, self.comm) if self._scattered else self.ffn(x)


class Decoder:
    """Part of the model on this rank.

    Args:
        comm: the communicator of all ranks.
        dtype: dtype of activations, the KV cache, and weights that are not kept in few bits.
        formats: storage of the weights.

    Attributes:
        own: the communicator of the ranks with this rank's sequences: of all ranks, or in mode dp of itself alone.
        pipeline: runs the HOP-B chunks of all layers' attention.
        turns: runs the two halves of long prefill steps.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layout: HelixLayout,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats = unpacked,
    ) -> None:
        self.spec = spec
        self.full = {*spec.full}
        self.own = SoloCommunicator(comm.device) if layout.dp > 1 else comm
        self.weights = weights = Weights(dtype, device, formats)
        rows = layout.vocab_rows(comm.rank, spec.vocab)
        self.embedding = Embedding(weights, "model.embed_tokens", rows, spec.vocab, spec.hidden)
        self.pipeline = Pipeline(device if comm.capturable else None)
        self.turns = turns.Turns(device if comm.capturable else None)
        parts = weights, comm, self.own, layout, spec
        self.layers = [DecoderLayer(*parts, index, self.pipeline) for index in range(len(spec.layers))]
        self.norm = AllReduceNorm(weights, self.own, "model.norm", spec.hidden, spec.norm_eps)
        self.head = Head(weights, None if spec.tied else "lm_head", self.embedding, spec.vocab, spec.hidden)
        self.rotary = Rotary(spec.rope, dtype, device)

    def hidden(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Runs a step through all layers and appends its KV; returns normalised [N, H], the same on all ranks of `own`.

        Args:
            policy: chooses the keys that a query reads in this step; steps of different policies may share a cache.
        """
        # Halves cannot overlap if all layers share the GPU pages of a chunk (cache in host memory), nor with states,
        # which depend on all earlier tokens.
        whole = step.cu_q is None or step.staged is not None or self.own.world_size == 1 or cache.has_states
        if whole or len(step.tokens) < 2 * turns.LEAST:
            *_, normed = self._through(cache, step, policy)
            assert normed is not None
            return normed
        return torch.cat(self.turns.run(*(self._through(cache, half, policy) for half in step.halves())))

    def _through(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> Iterator[Tensor | None]:
        """Yields between the turns of `hidden` (`comm.turns.Turns`): KV is appended a turn before it is attended."""
        x: Tensor | None = None
        parts: Tensor | PendingSum = self.embedding(step.tokens)
        angles = self.rotary.angles(step.positions)
        policy.prepare(step, set(self.spec.windows))
        guesses = policy.guesses and step.cu_q is None
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            normed, x = layer.input_norm(parts, x)
            if guesses and following is not None and following.index in self.full:
                queries = partial(following.queries, x, angles, cache, step)
                policy.guess(queries, cache.layer(following.index), step)
            q = layer.mixer.project(normed, angles, cache, step)
            yield None
            parts = layer.mixer.finish(q, cache, step, policy)
            yield None
            normed, x = layer.ffn_norm(parts, x)
            parts = layer.feed(normed, step)
            yield None
        yield self.norm(parts, x)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [n, V_local] fp32 of this rank's rows of the vocabulary, from hidden states [n, H]."""
        return self.head(hidden)
