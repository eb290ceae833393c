"""Decoder-only transformer over a `HelixLayout`; model families differ only in their `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from comm.base import Communicator
from comm.dual_batch_overlap import DualBatchOverlap
from comm.hopb import Pipeline
from comm.solo import SoloCommunicator
from helix.attention.base import AttentionPolicy
from helix.layers.linear import Embedding, Head, RowParallel
from helix.layers.mla import row_sharded
from helix.layers.norm import AllReduceNorm, ResidualNorm
from helix.layers.rotary import Rotary
from helix.layers.specs import Formats, MLASpec, unquantized
from helix.layers.weights import ModelShard, Weights
from helix.layout import HelixLayout
from helix.models import micro_batches
from helix.models.layer import DecoderLayer, ForwardPass, Parts
from helix.models.spec import DecoderSpec, NextTokenNames
from helix.worker.kv_cache import KVCache
from helix.worker.row_shard import all_gather_rows, shard_rows
from helix.worker.step import Step


class NextTokenLayer:
    """Multi-token prediction (MTP) layer, a `DraftLayer`; its states are normalized hidden states like the model's.

    Source:
        DeepSeek-V3, section 2.2 (https://arxiv.org/abs/2412.19437).
    """

    window: int | None = None

    def __init__(self, shard: ModelShard, spec: DecoderSpec, model: Decoder) -> None:
        hidden = spec.hidden
        self.target_width = self.width = hidden
        self.shared_topk = spec.nextn_shared_topk
        self.vocab_rows, self.logits = model.embedding.rows, model.head
        self._embedding, self._overlap = model.embedding, model.overlap
        names = NextTokenNames(*(name.format(len(spec.layers)) for name in spec.nextn_names))
        self.token_norm = AllReduceNorm(shard, names.token_norm, hidden, spec.norm_eps)
        self.state_norm = AllReduceNorm(shard, names.state_norm, hidden, spec.norm_eps)
        self.columns = shard.layout.ffn_columns(shard.comm.rank, 2 * hidden)
        self.join = RowParallel(shard, names.join, self.columns, 2 * hidden, hidden)
        self.layer = DecoderLayer(shard, shard, spec, len(spec.layers), None, names.layer)
        self._rotary = model.rotary[self.layer.rope]
        self.norm = AllReduceNorm(shard, names.norm, hidden, spec.norm_eps)

    def append(self, cache: KVCache, step: Step, states: Tensor, *, from_draft: bool) -> tuple[Any, Tensor]:
        both = torch.cat((self.token_norm(self._embedding(step.tokens), None)[0], self.state_norm.normalize(states)), 1)
        parts = self.join(both[:, self.columns.start : self.columns.stop].contiguous())
        normed, x = self.layer.input_norm(parts, None)
        return self.layer.mixer.project(normed, self._rotary.angles(step.positions), cache, step), x

    def attend(self, queries: Any, x: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        return self.norm(*self.layer.finish(queries, x, ForwardPass(cache, step, policy, self._overlap)))[0]


class Decoder:
    """This rank's shard of a model.

    Args:
        comm: over all ranks.
        dtype: of activations, the KV cache and unquantized weights.
        formats: of the weights.

    Attributes:
        attn_group: communicator of the ranks that share this rank's sequences: all ranks; in mode dp only this one.
        pipeline: runs the HOP-B chunks of attention.
        overlap: runs long prefill steps as two micro-batches.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layout: HelixLayout,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats = unquantized,
    ) -> None:
        self.spec, self.comm = spec, comm
        self.attn_group = SoloCommunicator(comm.device) if layout.dp > 1 else comm
        self.weights = weights = Weights(dtype, device, formats, spec.weight_offset)
        self.pipeline, self.overlap = Pipeline(device if comm.capturable else None), DualBatchOverlap(self.attn_group)
        shard = ModelShard(weights, comm, layout, self.pipeline)
        attn_shard = replace(shard, comm=self.attn_group)
        rows = layout.vocab_rows(comm.rank, spec.vocab)
        self.embedding = Embedding(weights, "model.embed_tokens", rows, spec.vocab, spec.hidden)
        scale = spec.embedding_scale
        self._embedding_scale = torch.tensor(scale, dtype=dtype).item() if spec.round_embedding_scale else scale
        self.layers: list[DecoderLayer] = []
        post_norm = None  # of the previous layer
        for index in range(len(spec.layers)):
            self.layers.append(DecoderLayer(shard, attn_shard, spec, index, post_norm))
            post_norm = self.layers[-1].post_norm
        for layer, next_layer in pairwise(self.layers):
            layer.next_layer = next_layer
        self.norm = ResidualNorm(
            self.attn_group, post_norm, AllReduceNorm(attn_shard, "model.norm", spec.hidden, spec.norm_eps)
        )
        self.head = Head(weights, None if spec.tied else "lm_head", self.embedding, spec.vocab, spec.hidden)
        self.rotary = [Rotary(rope, dtype, device) for rope in spec.ropes]
        self.next_token: NextTokenLayer | None = None
        if spec.draft is not None and spec.draft is spec.nextn:
            self.next_token = NextTokenLayer(shard, spec, self)

    @property
    def layers_run(self) -> int:
        """Layers run since the start: shows the progress of a long step on a CPU."""
        return sum(layer.runs for layer in self.layers)

    def hidden(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Runs a step; returns the normalized hidden states [N, H]."""
        return self.states(cache, step, policy)[0]

    def states(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> tuple[Tensor, Tensor]:
        """Runs a step through all layers and appends its KV.

        Args:
            policy: attention policy of this step; steps with different policies may share a cache.

        Returns:
            Normalized hidden states [N, H], and the states for a draft layer: the same, or the concatenated inputs of
            `DecoderSpec.aux_hidden_state_layers`. All are equal on all ranks of `attn_group`.
        """
        mixer = self.spec.attention
        if isinstance(mixer, MLASpec) and row_sharded(mixer, step):
            step = shard_rows(step)
        if micro_batches.should_split(self.attn_group, self.layers, cache, step):
            begin = partial(self._begin, cache, policy=policy)
            found = micro_batches.run(self.overlap, self.layers, step, begin, self._end)
            whole = torch.cat([part for part, _ in found])
        else:
            whole, _ = self._end(*self._run_layers(self.layers, cache, step, policy))
        if not self.spec.aux_hidden_state_layers:
            return whole, whole
        return whole[:, : self.spec.hidden].contiguous(), whole[:, self.spec.hidden :].contiguous()

    def last_states(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Runs a prefill step; returns the normalized hidden states [n, H] of each sequence's last token.

        The last layer appends the KV of all tokens, but computes attention and FFN only for the last ones.
        """
        assert step.cu_q is not None
        layer, mixer = self.layers[-1], self.spec.layers[-1].mixer
        chooses = isinstance(mixer, MLASpec) and mixer.topk is not None
        # Not in mode dp, where FFNs gather all ranks' rows, nor with offloading, where whole chunks read the keys.
        if self.attn_group is not layer.comm or step.staged is not None or not mixer.is_attention or chooses:
            return self.hidden(cache, step, policy)[step.cu_q[1:] - 1]
        rows, lasts = step.last_tokens()
        if micro_batches.should_split(self.attn_group, self.layers, cache, step):
            begin = partial(self._begin, cache, policy=policy)
            found = micro_batches.run(self.overlap, self.layers, step, begin, None)
        else:
            parts, x, fwd = self._run_layers(self.layers[:-1], cache, step, policy)
            normed, x = layer.join_mixer(parts, x, fwd)
            found = [(layer.project(normed, x, fwd), x)]
            del parts, normed
        q, x = micro_batches.select_rows(found, rows)
        policy.prepare(lasts, {mixer.window})
        parts, x = layer.finish(q, x, ForwardPass(cache, lasts, policy, self.overlap))
        return self.norm(parts, x)[0][: len(step.slots)]

    def _run_layers(
        self, layers: Sequence[DecoderLayer], cache: KVCache, step: Step, policy: AttentionPolicy
    ) -> tuple[Parts, Tensor | None, ForwardPass]:
        parts, fwd = self._begin(cache, step, policy)
        x = None
        for layer in layers:
            normed, x = layer.join_mixer(parts, x, fwd)
            q = layer.project(normed, x, fwd)
            parts = layer.attend(q, fwd)  # frees the previous FFN's activations, a chunk's largest tensor
            normed, x = layer.join_ffn(parts, x, fwd)
            parts = layer.run_ffn(normed, fwd)
        return parts, x, fwd

    def _begin(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> tuple[Parts, ForwardPass]:
        parts = self._embed(step.tokens)
        angles = [rotary.angles(step.positions) for rotary in self.rotary]
        fwd = ForwardPass(cache, step, policy, self.overlap, angles, policy.prefetches and step.cu_q is None)
        policy.prepare(step, set(self.spec.windows))
        self.layers[0].prefetch_sequences(fwd)
        return parts, fwd

    def _embed(self, tokens: Tensor) -> Tensor:
        parts = self.embedding(tokens)
        return parts if self._embedding_scale == 1 else parts.mul_(self._embedding_scale)

    def _end(self, parts: Parts, x: Tensor | None, fwd: ForwardPass) -> tuple[Tensor, Tensor]:
        # Normalized states [N, H], concatenated with the auxiliary ones, and the residual stream.
        rows = fwd.step.row_shard
        found, x = self.norm(parts, x, rows)
        if self.spec.aux_hidden_state_layers:
            fwd.aux_hidden_states[len(self.layers)] = x
            found = torch.cat([found, *(fwd.aux_hidden_states[i] for i in self.spec.aux_hidden_state_layers)], 1)
        return found if rows is None else all_gather_rows(rows, self.attn_group, found), x

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [n, V_local] fp32 of this rank's rows of the vocabulary, from hidden states [n, H]."""
        logits = self.head(hidden)
        return logits if self.spec.logit_scale == 1 else logits.mul_(self.spec.logit_scale)
