"""Multi-head latent attention: one latent of R + P values a token is key and value of all heads (DeepSeek-V2, 2.1).

With the up-projections absorbed, the queries move into latent space and attention reads the cache as it is:

    q_h . k_h = (W_UK_h^T q_nope_h) . c + q_rope_h . k_rope          out_h = W_UV_h (sum over tokens of weight * c)

    x [N, H] --> q_b(norm(q_a x)) [N, h, nope + P] --> W_UK --> [N, h, R + P] --> attention over this rank's latents
             --> kv_a x [N, R + P] --> norm, RoPE, append        --> exchange --> W_UV --> [N, own heads, value] --> W_O

There is one latent, so that tensor parallelism duplicates the cache on every rank (mode tp); Helix shards it over all
of them (tpa=1), and every rank's attention then needs the queries of all heads. Two choices are left, each made by what
it would take on an H200:

- Where W_UV is applied. After the exchange each rank does so for its own heads, and R values a head travel; before it,
  every rank does so for all heads, and the smaller `value` travel. Few rows: the weights count; many: the wire.
- Who makes the queries. Each rank those of all heads, or each its share, which an all-gather then completes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from helix.layers.attention import ShardedAttention, sent
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.mixer import LayerPlace
from helix.layers.weights import Weights
from helix.layout import HelixLayout, share
from helix.memory.keeps import Keeps
from helix.memory.kv_cache import KVCache
from helix.steps.step import Step
from kernels.attention.split_kv import PartialAttention
from kernels.dense.rms_norm import rms_norm
from kernels.mla.append import mla_append
from kernels.mla.per_head_linear import per_head_linear

READ_RATE = 4.2e12  # bytes/s at which projections of a few rows stream weights
WIRE_RATE = 2e11  # bytes/s that a rank's messages to all its peers add up to, beyond the first kilobytes
CALL_S = 2.5e-6  # seconds of a small collective (both: docs/results/kernels.md#collectives)
ROWS = 8  # of a step, for which the making of queries is chosen: weights have to lie somewhere before rows are known


@dataclass(frozen=True)
class MLASpec:
    """One layer's attention, as the checkpoint has it.

    Attributes:
        q_rank: width of the queries' own latent; None: they are projected from x at once.
        latent: R.
        rope: P, the rotated part of queries and keys.
        nope: the part of a head's queries and keys that is not rotated.
        value: width of a head's values.
        norm_eps: of the latents' norms.
        scale: factor on q.k.
        interleaved: pairs of the rotated part lie side by side in the checkpoint, not in its halves.
    """

    hidden: int
    q_heads: int
    q_rank: int | None
    latent: int
    rope: int
    nope: int
    value: int
    norm_eps: float
    scale: float
    interleaved: bool

    @property
    def query(self) -> int:
        """Width of a head's query before absorption."""
        return self.nope + self.rope

    @property
    def entry(self) -> int:
        """Values that a token stores."""
        return self.latent + self.rope

    @property
    def weights(self) -> int:
        """Numbers in all projections, those of all ranks together."""
        of_head = self.query * (self.q_rank or self.hidden) + (self.nope + self.value) * self.latent
        return self.hidden * ((self.q_rank or 0) + self.entry + self.q_heads * self.value) + self.q_heads * of_head

    @property
    def kv_heads(self) -> int:
        """Heads that the cache has: the one latent."""
        return 1

    @property
    def attends(self) -> bool:
        """Whether queries read keys of the sequence."""
        return True

    @property
    def window(self) -> None:
        """Sliding window in tokens: there is none."""
        return None

    @property
    def multiplications(self) -> int:
        """Multiplications of a token's queries with one latent, over all heads."""
        return self.q_heads * (self.entry + self.latent)

    def keeps(self, layout: HelixLayout, rank: int, dtype: torch.dtype) -> tuple[Keeps, ...]:
        """Lists what the layer keeps on a rank."""
        return (Keeps("latents", (self.entry,), dtype),)

    def buffers(self, layout: HelixLayout, rank: int) -> int:
        """Counts the numbers that a token of a prefill step takes on a rank; as `AttentionSpec.buffers`."""
        q, lanes, copies = sent(layout, rank, self.q_heads, 1)
        queries = q * (self.query + copies * self.entry + self.latent)
        return (self.q_rank or 0) + self.entry + queries + 2 * lanes * self.latent

    def build(self, weights: Weights, comm: Communicator, layout: HelixLayout, place: LayerPlace) -> MLA:
        """Makes this rank's part."""
        return MLA(weights, comm, layout, self, place)


def exchanges_values(spec: MLASpec, rows: int) -> bool:
    """Whether the exchange of `rows` tokens is faster in value space, W_UV of all heads applied before it.

    The wire carries `rows * (latent - value)` values a head less, and `value * latent` of the weights are read more.
    Of both, K - 1 of K heads count on K ranks: the others would be read, and stay, anyway.
    """
    return rows * (spec.latent - spec.value) / WIRE_RATE > spec.value * spec.latent / READ_RATE


def gathers_queries(spec: MLASpec, ranks: int, item: int) -> bool:
    """Whether ranks that make the queries of their own heads, and gather the others', are faster than all making all.

    Args:
        ranks: that attend with the same heads.
        item: bytes of a weight and of a value sent.
    """
    others = spec.q_heads * (ranks - 1) / ranks * item
    weights = spec.query * (spec.q_rank or spec.hidden) + spec.nope * spec.latent  # of a head: its query, and W_UK
    return others * weights / READ_RATE > CALL_S + others * ROWS * spec.entry / WIRE_RATE


class MLA(ShardedAttention):
    """Queries of all heads in latent space, partial attention, one exchange, output projection over all ranks.

    W_UK and W_UV are views of one stored `kv_b_proj`, of all heads that this rank attends with.
    """

    def __init__(
        self,
        weights: Weights,
        comm: Communicator,
        layout: HelixLayout,
        spec: MLASpec,
        place: LayerPlace,
    ) -> None:
        heads = (comm.rank, spec.q_heads, 1)
        super().__init__(comm, place, layout.head_shares(*heads), spec.scale)
        self.spec, self.latent, name = spec, spec.latent, f"{place.name}.self_attn"
        attends, owns = layout.q_heads(*heads), layout.o_heads(*heads)
        # With one latent head a kvp group of more than one rank is the world, which is whom all_gather reaches.
        gathers = layout.kvp > 1 and gathers_queries(spec, layout.kvp, weights.dtype.itemsize)
        self.gathered = [len(share(spec.q_heads, layout.kvp, k)) for k in range(layout.kvp)] if gathers else []
        makes = share(spec.q_heads, layout.kvp, comm.kvp_rank) if gathers else attends

        self.makes = len(makes)
        self.q_width = spec.q_rank or len(makes) * spec.query
        queries = _queries(spec, name, makes)
        first = [Rows(f"{name}.q_a_proj", spec.q_rank, range(spec.q_rank))] if spec.q_rank else queries
        kv_a = f"{name}.kv_a_proj_with_mqa"
        latent = [range(spec.latent), *_halves(spec, spec.latent)]
        self.down = ColumnParallel(weights, spec.hidden, [*first, *(Rows(kv_a, spec.entry, part) for part in latent)])
        self.q_up: ColumnParallel | None = None
        if spec.q_rank:
            self.q_gain = weights.parameter(spec.q_rank)
            weights.bind(self.q_gain, f"{name}.q_a_layernorm.weight", (spec.q_rank,))
            self.q_up = ColumnParallel(weights, spec.q_rank, queries)
        self.kv_gain = weights.parameter(spec.latent)
        weights.bind(self.kv_gain, f"{name}.kv_a_layernorm.weight", (spec.latent,))

        width = spec.nope + spec.value
        kv_b = weights.parameter(len(attends) * width, spec.latent)
        rows = range(attends.start * width, attends.stop * width)
        weights.bind(kv_b, f"{name}.kv_b_proj.weight", (spec.q_heads * width, spec.latent), rows)
        of_heads = kv_b.view(len(attends), width, spec.latent)

        def local(part: range) -> slice:
            return slice(part.start - attends.start, part.stop - attends.start)

        self.w_uk = of_heads[local(makes), : spec.nope]  # [h, nope, R]
        self.w_uv = of_heads[:, spec.nope :].mT  # [Hq_local, R, value]
        self.own_w_uv = self.w_uv[local(owns)]
        self.output = RowParallel(
            weights,
            comm,
            f"{name}.o_proj",
            layout.hidden_columns(*heads, spec.value),
            spec.q_heads * spec.value,
            spec.hidden,
            False,
        )

    def project(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        """x [N, H], the same on every rank -> absorbed queries [N, Hq_local, R + P]; latents are appended."""
        spec = self.spec
        latents, slots = cache.layer(self.index).kept["latents"], step.append_slots[None]
        q, kv = self.down(x).split([self.q_width, spec.entry], 1)
        if self.q_up is not None:
            q = self.q_up(rms_norm(q, self.q_gain, spec.norm_eps)[0])
        q = q.unflatten(1, (self.makes, spec.query))  # [N, h, nope + P]
        absorbed = mla_append(q, kv, *angles, self.kv_gain, spec.norm_eps, self.w_uk, latents, slots)
        if not self.gathered:
            return absorbed
        return self._gather(absorbed, self.comm.gather_in_group if step.overlapped else self.comm.all_gather)

    def _gather(self, q: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """[N, own, D] of each rank's heads -> [N, Hq, D]; ranks with a head less send one that is not read."""
        lanes = max(self.gathered)
        if q.shape[1] < lanes:
            q = F.pad(q, (0, 0, 0, lanes - q.shape[1]))
        parts = gather(q)  # [K, N, lanes, D]
        if min(self.gathered) == lanes:
            return parts.transpose(0, 1).flatten(1, 2)
        return torch.cat([part[:, :heads] for part, heads in zip(parts, self.gathered, strict=True)], 1)

    def exchange(self, partial: PartialAttention) -> Tensor:
        """Partials of N x Hq_local x R values -> exact values [N, own heads, value]."""
        rows = partial.lse.numel() // partial.lse.shape[-1]
        if len(self.shares) > 1 and exchanges_values(self.spec, rows):
            out, lse = partial.merge()
            return super().exchange(PartialAttention(per_head_linear(out, self.w_uv), lse))
        return per_head_linear(super().exchange(partial), self.own_w_uv)


def _halves(spec: MLASpec, begin: int) -> list[range]:
    """Rows of a rotated part that begins at row `begin`, in the order of the kernels, which rotate its halves.

    Scores do not change when queries and keys are permuted alike.
    """
    end = begin + spec.rope
    return [range(begin, end, 2), range(begin + 1, end, 2)] if spec.interleaved else [range(begin, end)]


def _queries(spec: MLASpec, name: str, heads: range) -> list[Rows]:
    """The rows that make the queries of `heads`."""
    matrix, total = f"{name}.{'q_b_proj' if spec.q_rank else 'q_proj'}", spec.q_heads * spec.query
    parts = [
        part
        for h in heads
        for part in (
            range(h * spec.query, h * spec.query + spec.nope),
            *_halves(spec, h * spec.query + spec.nope),
        )
    ]
    return [Rows(matrix, total, part) for part in parts or [range(0)]]
