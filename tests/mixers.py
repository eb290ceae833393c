"""A mixer for tests: a decaying state, of which each token reads its own channels.

    h[t] = decay * h[t - 1] + k[t]          y[t] = W_O (q[t] * h[t])          k, q = W_K x, W_Q x

It represents recurrent layers: it has a state per sequence instead of KV per token. Channels are sharded over
all ranks, like the columns of an FFN, so that the only collective is the sum after W_O. A rejected draft's
contribution to a state cannot be overwritten. So a decode step leaves the state as it was and stores its rows; the next
step first applies the accepted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from comm.partial import PartialProjection
from helix.attention.base import AttentionPolicy
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.rotary import Angles
from helix.layers.weights import ModelShard
from helix.layout import HelixLayout
from helix.models.layer import MIXERS
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import KVCacheSpec
from helix.worker.step import Step


@dataclass(frozen=True)
class DecaySpec:
    """One layer's decaying state.

    Attributes:
        width: channels of the state.
        decay: factor per token.
    """

    hidden: int
    width: int
    decay: float
    is_attention: bool = False
    window: None = None

    @property
    def weights(self) -> int:
        """Weights of all projections, over all ranks."""
        return 3 * self.hidden * self.width

    @property
    def multiplications(self) -> int:
        """No multiplications with keys and values."""
        return 0

    def kv_cache_specs(self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto") -> tuple[KVCacheSpec, ...]:
        """Returns a state per slot, and the rows of its last step."""
        channels = (len(layout.ffn_columns(rank, self.width)),)
        return KVCacheSpec("state", channels, "float32", "slot"), KVCacheSpec("rows", channels, "float32", "row")

    def activations_per_token(self, layout: HelixLayout, rank: int) -> int:
        """Returns the elements per token of a prefill step on a rank."""
        return 4 * len(layout.ffn_columns(rank, self.width))


class Decay:
    """This rank's channels of a layer's decaying state."""

    def __init__(self, shard: ModelShard, spec: DecaySpec, index: int, name: str) -> None:
        self.spec, self.index, name = spec, index, f"{name}.mixer"
        columns = shard.layout.ffn_columns(shard.comm.rank, spec.width)
        rows = [Rows(f"{name}.{part}", spec.width, columns) for part in ("k", "q")]
        self.kq = ColumnParallel(shard.weights, spec.hidden, rows)
        self.output = RowParallel(shard, f"{name}.o", columns, spec.width, spec.hidden)

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Tensor:
        """Projects x [N, H] to k and q [N, 2 * channels]; there is no KV per token."""
        return self.kq(x)

    def finish(self, q: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> PartialProjection:
        """Returns this rank's partial output [N, H] from k and q."""
        mine = cache.layer(self.index)
        k, q = q.float().chunk(2, 1)
        prompts = step.cu_q is not None
        seen = self._prefill(k, mine.tensors, step) if prompts else self._decode(k, mine.tensors, mine.accepted, step)
        return self.output((q * seen).to(self.output.weight.dtype))

    def _decode(self, k: Tensor, kept: Mapping[str, Tensor], accepted: Tensor, step: Step) -> Tensor:
        """States [N, channels] after each row; applies the last step's accepted rows first."""
        slots = step.slots
        state, rows, count = kept["state"][slots], kept["rows"][slots], accepted[slots]
        for i in range(rows.shape[1]):
            state = torch.where((i < count)[:, None], self.spec.decay * state + rows[:, i], state)
        kept["state"][slots] = state
        new = k.view(len(slots), -1, k.shape[1])
        kept["rows"][slots, : new.shape[1]] = new
        seen = []
        for row in new.unbind(1):
            seen.append(state := self.spec.decay * state + row)
        return torch.stack(seen, 1).flatten(0, 1)

    def _prefill(self, k: Tensor, kept: Mapping[str, Tensor], step: Step) -> Tensor:
        """States [N, channels] after each token of the chunks; stores the last of each chunk."""
        assert step.cu_q is not None
        seen, ends = [], step.cu_q.tolist()
        for slot, begin, end in zip(step.slots, ends, ends[1:], strict=False):
            state = kept["state"][slot]
            for row in k[begin:end]:
                seen.append(state := self.spec.decay * state + row)
            kept["state"][slot] = state
        return torch.stack(seen)


MIXERS[DecaySpec] = Decay
