"""A layer of a decoder: its mixer and its FFN, with the norms around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from comm.dual_batch_overlap import DualBatchOverlap
from comm.partial import PartialSum
from helix.attention.base import AttentionPolicy
from helix.layers.attention import Attention
from helix.layers.ffn import dp_ffn, make_ffn
from helix.layers.gated_delta import GatedDeltaNet
from helix.layers.mla import MLA
from helix.layers.norm import AllReduceNorm, ResidualNorm
from helix.layers.rotary import Angles
from helix.layers.specs import AttentionSpec, GatedDeltaSpec, MLASpec
from helix.layers.weights import ModelShard
from helix.models.spec import DecoderSpec
from helix.worker.kv_cache import KVCache
from helix.worker.row_shard import all_gather_rows
from helix.worker.step import Step


class Mixer(Protocol):
    """A rank's shard of a layer's token mixer (attention or recurrent).

    Built from a `ModelShard`, the mixer's spec (`helix.layers.specs`), and the layer's index and name.
    """

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Any:
        """Computes the queries for `finish` from x [N, H], the same on every rank; appends to the cache."""

    def finish(self, q: Any, cache: KVCache, step: Step, policy: AttentionPolicy) -> PartialSum:
        """Returns this rank's partial sum [N, H] of the output.

        May overlap the second micro-batch of a prefill step, and so reads only tokens appended before.
        """


Parts = Tensor | PartialSum  # a rank's partial sum [N, H]
MIXERS: dict[type[Any], Callable[[ModelShard, Any, int, str], Mixer]] = {
    AttentionSpec: Attention,
    MLASpec: MLA,
    GatedDeltaSpec: GatedDeltaNet,
}


@dataclass
class ForwardPass:
    """State of a step that all layers share.

    Attributes:
        overlap: overlaps communication with kernels.
        angles: of the step's positions, one per RoPE of the model.
        prefetches: whether the policy prefetches for the next layer.
        aux_hidden_states: inputs [N, H] of the layers that a draft layer reads, by layer; filled as the layers run.
    """

    cache: KVCache
    step: Step
    policy: AttentionPolicy
    overlap: DualBatchOverlap
    angles: list[Angles] = field(default_factory=list)
    prefetches: bool = False
    aux_hidden_states: dict[int, Tensor] = field(default_factory=dict)


class DecoderLayer:
    """Residual block: attention over KVP x TPA, then the FFN over the same ranks, with norms.

    The norm after each sublayer does its all-reduce, since it reads the whole residual stream anyway. In mode dp
    attention and norms process only this rank's sequences; the FFN all-gathers rows and reduce-scatters sums.

    Args:
        shard: with the communicator of all ranks.
        attn_shard: with the communicator of the ranks that attend the same sequences.
        before: post-norm of the previous layer, if any.
        name: prefix of its tensors, if it is not one of the model's own layers.

    Attributes:
        full: whether queries read whole sequences.
        runs: how often it ran, or was launched.
    """

    next_layer: DecoderLayer | None = None
    runs = 0

    def __init__(
        self,
        shard: ModelShard,
        attn_shard: ModelShard,
        spec: DecoderSpec,
        index: int,
        before: AllReduceNorm | None,
        name: str = "",
    ) -> None:
        self.index, self.comm, self.attn_group = index, shard.comm, attn_shard.comm
        name, layer = name or f"model.layers.{index}", spec.stack[index]

        def norm(part: str) -> AllReduceNorm:
            return AllReduceNorm(attn_shard, f"{name}.{part}_layernorm", spec.hidden, spec.norm_eps)

        first = None if spec.norms == "after" else norm("input")
        self.input_norm = ResidualNorm(attn_shard.comm, before, first)
        self.mixer = MIXERS[type(layer.mixer)](attn_shard, layer.mixer, index, name)
        middle = norm("post_attention")
        if spec.norms == "before":
            self.ffn_norm = ResidualNorm(attn_shard.comm, None, middle)
        else:
            self.ffn_norm = ResidualNorm(
                attn_shard.comm, middle, norm("pre_feedforward") if spec.norms == "around" else None
            )
        self.ffn = make_ffn(shard, spec.hidden, layer.ffn, name)
        self.post_norm = None if spec.norms == "before" else norm("post_feedforward")
        self.rope = 0 if layer.rope is None else spec.ropes.index(layer.rope)
        self._is_aux_layer = index in spec.aux_hidden_state_layers
        self.full = layer.mixer.is_attention and layer.mixer.window is None

    def finish(self, q: Any, x: Tensor, fwd: ForwardPass) -> tuple[Parts, Tensor]:
        """Runs attention and FFN after `project`; returns this rank's partial sum [N, H], and the stream."""
        parts = self.attend(q, fwd)
        normed, x = self.join_ffn(parts, x, fwd)
        return self.run_ffn(normed, fwd), x

    def join_mixer(self, parts: Parts, x: Tensor | None, fwd: ForwardPass) -> tuple[Tensor, Tensor]:
        """All-reduces `parts` [N, H] and adds them to the stream [N, H] (None: 0); returns mixer input and stream."""
        self.runs += 1
        normed, x = self.input_norm(parts, x, fwd.step.row_shard)
        if self._is_aux_layer:
            fwd.aux_hidden_states[self.index] = x
        return normed, x

    def project(self, normed: Tensor, x: Tensor, fwd: ForwardPass) -> Any:
        """Computes the mixer's queries and appends to the cache; prefetches for the next layer."""
        next_layer = self.next_layer
        if fwd.prefetches and next_layer is not None and next_layer.full:
            prefetch_queries = partial(next_layer.prefetch_queries, x, fwd)
            fwd.policy.prefetch(prefetch_queries, fwd.cache.layer(next_layer.index), fwd.step)
        q = self.mixer.project(normed, fwd.angles[self.rope], fwd.cache, fwd.step)
        if fwd.step.row_shard is not None and next_layer is not None:
            with fwd.overlap.overlapped():
                next_layer.prefetch_sequences(fwd)
        return q

    def attend(self, q: Any, fwd: ForwardPass) -> PartialSum:
        return self.mixer.finish(q, fwd.cache, fwd.step, fwd.policy)

    def join_ffn(self, parts: Parts, x: Tensor, fwd: ForwardPass) -> tuple[Tensor, Tensor]:
        """All-reduces the mixer's output and adds it to the stream; returns FFN input and stream."""
        return self.ffn_norm(parts, x, fwd.step.row_shard)

    def run_ffn(self, x: Tensor, fwd: ForwardPass) -> Parts:
        """Runs the FFN on x [N, H]; returns a partial sum, or in mode dp the whole sum."""
        if fwd.step.row_shard is not None:
            x = all_gather_rows(fwd.step.row_shard, self.attn_group, x)
        if self.attn_group is not self.comm:
            return dp_ffn(self.ffn, x, fwd.step.num_tokens_across_dp, self.comm)
        return self.ffn(x, fwd.step.live)

    def prefetch_queries(self, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Computes queries [N, Hq, D] for an approximate input x [N, H]; appends no keys."""
        assert isinstance(self.mixer, Attention), "latents have no block selection"
        return self.mixer.queries(self.input_norm.normalize(x), fwd.angles[self.rope], fwd.cache, fwd.step)

    def prefetch_sequences(self, fwd: ForwardPass) -> None:
        """In a row-sharded step, starts to gather this layer's KV; see `MLA.prefetch_sequences`."""
        if fwd.step.row_shard is not None and isinstance(self.mixer, MLA):
            self.mixer.prefetch_sequences(fwd.cache, fwd.step.row_shard)
