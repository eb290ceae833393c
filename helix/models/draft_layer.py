"""The `DraftLayer` interface, which `helix.speculation.layer` runs, and EAGLE-3's layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.layers.attention import Attention
from helix.layers.ffn import make_ffn
from helix.layers.linear import Embedding, RowParallel
from helix.layers.norm import AllReduceNorm
from helix.layers.rotary import Rotary
from helix.layers.specs import AttentionSpec
from helix.layers.weights import ModelShard
from helix.models.decoder import Decoder
from helix.models.eagle3 import Eagle3Spec
from helix.worker.kv_cache import KVCache
from helix.worker.step import Step
from kernels.dense.linear import linear
from kernels.scaled import Matrix


class DraftLayer(Protocol):
    """A draft layer on top of the target's last layer.

    Row i reads the state of token i (the target's, or the layer's own) and token i + 1; its KV goes to token i's slot.

    Attributes:
        target_width, width: widths of the target's states, and of the layer's own.
        vocab_rows: token ids of the columns of `logits`.
        shared_topk: tokens that its indexer selects for the first draft and later drafts reuse; 0: each selects.
    """

    target_width: int
    width: int
    vocab_rows: range
    shared_topk: int

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None: it reads all keys."""

    def append(self, cache: KVCache, step: Step, states: Tensor, *, from_draft: bool) -> tuple[Any, Tensor]:
        """Appends the KV of a step's tokens to the cache.

        Args:
            step: tokens, with the positions of the preceding tokens.
            states: of the preceding tokens: the target's [N, target_width], or, if `from_draft`, the layer's own
                [N, width].

        Returns:
            The mixer's queries, and the residual stream [N, width], for `attend`, which may be called for some rows.
        """

    def attend(self, queries: Any, x: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Computes states [N, width] from the results of `append`.

        Args:
            policy: prepared for the step at least one kernel before this call: attention reads bounds early.
        """

    def logits(self, states: Tensor) -> Tensor:
        """Returns this rank's logits [n, V_local] fp32 from the layer's states [n, width]."""


class Eagle3Layer:
    """EAGLE-3's `DraftLayer`: projects three of the target's hidden states; its own states are residual streams.

    In EAGLE-3.1's form the three are normalized before, and so are its own states.

    Args:
        window: latest tokens of a sequence that it reads.
        ids: target token ids of the head's rows [draft_vocab] int64, ascending; None: all, or the target's head.

    Raises:
        ValueError: the ids do not ascend.

    Source:
        EAGLE-3 (https://arxiv.org/abs/2503.01840), EAGLE-3.1 (https://arxiv.org/abs/2605.09992).
    """

    def __init__(self, shard: ModelShard, spec: Eagle3Spec, target: Decoder, ids: Tensor | None, window: int) -> None:
        weights, hidden, name, eps = shard.weights, spec.hidden, spec.name, spec.norm_eps
        self.spec, self.window = spec, window
        self.target_width, self.width, self.vocab_rows = (
            len(spec.aux_hidden_state_layers) * target.spec.hidden,
            hidden,
            target.embedding.rows,
        )
        self.shared_topk = 0
        part = self.target_width // max(len(spec.aux_norms), 1)
        self._aux_norms = [AllReduceNorm(shard, norm, part, eps) for norm in spec.aux_norms]
        self._columns = shard.layout.ffn_columns(shard.comm.rank, self.target_width)
        self.join = RowParallel(shard, "fc", self._columns, self.target_width, hidden)
        self.embedding = target.embedding
        if spec.own_embedding:
            self.embedding = Embedding(weights, "embed_tokens", self.vocab_rows, target.spec.vocab, hidden)
        self.input_norm = AllReduceNorm(shard, f"{name}.input_layernorm", hidden, eps)
        self.state_norm = AllReduceNorm(shard, f"{name}.hidden_norm", hidden, eps)
        assert isinstance(spec.layer.mixer, AttentionSpec)
        self.mixer = Attention(shard, replace(spec.layer.mixer, window=window), len(target.spec.layers), name)
        self.ffn_norm = AllReduceNorm(shard, f"{name}.post_attention_layernorm", hidden, eps)
        self.ffn = make_ffn(shard, hidden, spec.layer.ffn, name)
        self.norm = AllReduceNorm(shard, "norm", hidden, eps)
        self._rotary = Rotary(spec.rope, weights.dtype, weights.device)
        self._head: Matrix = target.head.weight
        self._ids: Tensor | None = None
        if spec.vocab is not None:
            ids = torch.arange(spec.vocab) if ids is None else ids
            if len(ids) != spec.vocab or not bool((ids[1:] > ids[:-1]).all()):
                raise ValueError(f"d2t must map to {spec.vocab} ascending token ids")
            first, end = (int(torch.searchsorted(ids, i)) for i in (self.vocab_rows.start, self.vocab_rows.stop))
            self._head = weights.parameter(end - first, hidden)
            weights.bind(self._head, "lm_head.weight", (spec.vocab, hidden), range(first, end))
            self._ids = (ids[first:end] - self.vocab_rows.start).to(weights.device)

    @property
    def description(self) -> str:
        """Log line about what it reads: a mistake there would only show as low acceptance."""
        ids = ", ".join(map(str, self.spec.aux_hidden_state_layers))
        return (
            f"drafts read the inputs of layers {ids} of the model ({self.spec.source}), and the latest {self.window:,} "
            f"tokens (its config.json limits it to {self.spec.max_positions}; see speculation.window)"
        )

    def append(self, cache: KVCache, step: Step, states: Tensor, *, from_draft: bool) -> tuple[Any, Tensor]:
        if from_draft:
            normed, x = self.state_norm.normalize(states), states
        else:
            if self._aux_norms:
                each = states.chunk(len(self._aux_norms), 1)
                normed_parts = [norm.normalize(x.contiguous()) for norm, x in zip(self._aux_norms, each, strict=True)]
                states = torch.cat(normed_parts, 1)
            parts = self.join(states[:, self._columns.start : self._columns.stop].contiguous())
            normed, x = self.state_norm(parts, None)
        both = torch.cat((self.input_norm(self.embedding(step.tokens), None)[0], normed), 1)
        q = self.mixer.project(both, self._rotary.angles(step.positions), cache, step)
        return q, normed if self.spec.normed_residual else x

    def attend(self, queries: Any, x: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        normed, x = self.ffn_norm(self.mixer.finish(queries, cache, step, policy), x)
        normed, x = self.norm(self.ffn(normed, step.live), x)
        return normed if self.spec.normed_output else x

    def logits(self, states: Tensor) -> Tensor:
        normed = states if self.spec.normed_output else self.norm.normalize(states)
        if self._ids is None:
            return linear(normed, self._head).float()
        out = torch.full((len(states), len(self.vocab_rows)), -torch.inf, device=states.device)
        return out.index_copy_(1, self._ids, linear(normed, self._head).float()) if len(self._ids) else out
