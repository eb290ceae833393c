"""Multi-head latent attention (MLA): one latent of R + P values per token is key and value of all heads.

See DeepSeek-V2, section 2.1. The up-projections are absorbed into the queries, so attention reads latents as stored:

    q_h . k_h = (W_UK_h^T q_nope_h) . c + q_rope_h . k_rope          out_h = W_UV_h (sum over tokens of weight * c)

    x [N, H] --> q_b(norm(q_a x)) [N, h, nope + P] --> W_UK --> [N, h, R + P] --> attention over this rank's latents
             --> kv_a x [N, R + P] --> norm, RoPE, append        --> exchange --> W_UV --> [N, own heads, value] --> W_O

With one latent, tensor parallelism duplicates the cache on every rank (mode tp); Helix shards it over all ranks
(tpa=1), and every rank's attention then needs the queries of all heads. Two choices remain, each made by its estimated
time on an H200 and over the link:

- Where W_UV is applied: after the exchange, by each rank to its own heads, so that R values per head are sent; or
  before, by every rank to all heads, so that only `value` values are sent. For few rows the weights dominate, for many
  the messages.
- Where queries are computed: each rank computes those of all heads, or its share, followed by an all-gather. Prompts
  gather queries before W_UK is applied, which are shorter.

A long chunk of a prompt is attended in another way: each rank gathers the sequence's latents, expands the keys and
values of its own heads, and attends with these alone. A key and a value are shorter than an absorbed query and its
output, and no query and no partial output is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.pending import PendingProjection
from helix.attention.base import AttentionPolicy, LayerAttention
from helix.layers.attention import ShardedAttention
from helix.layers.indexer import Indexer
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.rotary import Angles
from helix.layers.specs import MLASpec, most_dealt
from helix.layers.weights import ModelShard
from helix.layout import share
from helix.worker.dealt import (
    all_rows,
    are_enough,
    gather_sequences,
    gathered,
    to_heads,
    to_rows,
    whole_sequences,
)
from helix.worker.graph_keys import DEEP
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.step import DealtRows, Step
from kernels.attention.lse_combine import lse_combine
from kernels.attention.split_kv import PartialAttention
from kernels.attention.unpacked_prefill import whole_latents
from kernels.dense.rms_norm import rms_norm
from kernels.mla.append import mla_append
from kernels.mla.expanded_prefill import expanded_prefill
from kernels.mla.per_head_linear import per_head_linear

READ_RATE = 4.2e12  # bytes/s of weights in projections of a few rows
CALL_S = 2.5e-6  # seconds of a small collective (docs/results/kernels.md#collectives)
EXPANDED = 1 << 27  # bytes of expanded keys and values at a time
ROWS = 8  # assumed rows of a step for the choice of queries: weights are placed before rows are known


def exchanges_values(spec: MLASpec, rows: int, wire_rate: float) -> bool:
    """Returns whether the exchange of `rows` tokens is faster with W_UV applied before it, to all heads.

    Then messages are shorter by `rows * (latent - value)` values per head, and `value * latent` more weights are read.
    On K ranks, both count for K - 1 of K heads: the remaining heads are local, and their weights are read anyway.
    """
    return rows * (spec.latent - spec.value) / wire_rate > spec.value * spec.latent / READ_RATE


def gathers_queries(spec: MLASpec, ranks: int, item: int, wire_rate: float) -> bool:
    """Returns whether it is faster that ranks compute their own heads' queries and gather the others.

    Args:
        ranks: number of ranks that attend with the same heads.
        item: bytes of a weight, and of a sent value.
        wire_rate: see `Communicator`.
    """
    others = spec.q_heads * (ranks - 1) / ranks * item
    weights = spec.query * (spec.q_rank or spec.hidden) + spec.nope * spec.latent  # per head: its query's, and W_UK
    return others * weights / READ_RATE > CALL_S + others * ROWS * spec.entry / wire_rate


def _tokens(step: Step) -> int:
    """Counts the tokens of a prefill step's sequences, as if all were as long as the longest."""
    return (len(step.slots) - step.padded) * step.max_k * step.placement.layout.kvp


def deals_rows(spec: MLASpec, step: Step) -> bool:
    """Returns whether a prefill step's sequences are gathered, and its rows dealt to ranks (`helix.worker.dealt`)."""
    ranks, rows = step.placement.layout.kvp, len(step.tokens)
    if ranks == 1 or spec.topk is None or spec.q_rank is None or step.cu_q is None or step.max_k * ranks <= spec.topk:
        return False
    return are_enough(rows, ranks) and _tokens(step) < most_dealt(spec, rows)


def expanding_rows(spec: MLASpec) -> float:
    """Returns the rows of a sequence from which on a prefill step takes fewer products where latents are expanded.

    To expand a token for a head costs as much as some rows' attention to it saves. Captured steps expand up to twice
    the tokens that there are.
    """
    saved = spec.entry + spec.latent - spec.query - spec.value
    return 2 * spec.latent * (spec.nope + spec.value) / saved if saved > 0 and spec.topk is None else math.inf


def gathers_first(spec: MLASpec, rows: int, wire_rate: float) -> bool:
    """Returns whether `rows` gathered queries are sent faster without W_UK, which each rank then applies to all heads.

    Messages are shorter by `entry - query` values per head, and `nope * latent` more weights are read.
    """
    return rows * (spec.entry - spec.query) / wire_rate > spec.nope * spec.latent / READ_RATE


class MLA(ShardedAttention):
    """Latent attention: absorbed queries, partial attention, one exchange, output projection over all ranks.

    W_UK and W_UV are views of the stored `kv_b_proj`, of all heads with which this rank attends.
    """

    def __init__(self, shard: ModelShard, spec: MLASpec, index: int, name: str) -> None:
        weights, comm, layout = shard.weights, shard.comm, shard.layout
        heads = (comm.rank, spec.q_heads, 1)
        super().__init__(shard, index, layout.head_shares(*heads), spec.scale)
        self.spec, self.latent, self.topk, name = spec, spec.latent, spec.topk, f"{name}.self_attn"
        self.indexer = None if spec.indexer is None else Indexer(shard, spec, f"{name}.indexer")
        attends, owns = layout.q_heads(*heads), layout.o_heads(*heads)
        # With one latent head, a kvp group of several ranks consists of all ranks, as all_gather requires.
        item, rate = weights.dtype.itemsize, comm.wire_rate
        self.gathers = layout.kvp > 1 and gathers_queries(spec, layout.kvp, item, rate)
        makes = share(spec.q_heads, layout.kvp, comm.kvp_rank) if self.gathers else attends

        self.makes, self.made = len(makes), [len(share(spec.q_heads, layout.kvp, k)) for k in range(layout.kvp)]
        self.q_width = spec.q_rank or len(makes) * spec.query
        queries = _queries(spec, name, makes)
        first = [Rows(f"{name}.q_a_proj", spec.q_rank, range(spec.q_rank))] if spec.q_rank else queries
        kv_a = f"{name}.kv_a_proj_with_mqa"
        latent = [range(spec.latent), *_halves(spec, spec.latent)]
        self.down = ColumnParallel(weights, spec.hidden, [*first, *(Rows(kv_a, spec.entry, part) for part in latent)])
        self.q_up: ColumnParallel | None = None
        if spec.q_rank:
            self.q_gain = weights.gain(f"{name}.q_a_layernorm.weight", spec.q_rank)
            self.q_up = ColumnParallel(weights, spec.q_rank, queries)
        self.kv_gain = weights.gain(f"{name}.kv_a_layernorm.weight", spec.latent)

        width = spec.nope + spec.value
        kv_b = weights.parameter(len(attends) * width, spec.latent)
        rows = range(attends.start * width, attends.stop * width)
        weights.bind(kv_b, f"{name}.kv_b_proj.weight", (spec.q_heads * width, spec.latent), rows)
        of_heads = kv_b.view(len(attends), width, spec.latent)

        def local(part: range) -> slice:
            return slice(part.start - attends.start, part.stop - attends.start)

        self.own, self.expand = local(owns), of_heads[local(owns)].flatten(0, 1)  # [own heads * (nope + value), R]
        self.w_uk = of_heads[:, : spec.nope]  # [Hq_local, nope, R]
        self.own_w_uk = self.w_uk[local(makes)]
        self.w_uv = of_heads[:, spec.nope :].mT  # [Hq_local, R, value]
        self.own_w_uv = self.w_uv[local(owns)]
        columns = layout.hidden_columns(*heads, spec.value)
        self.output = RowParallel(shard, f"{name}.o_proj", columns, spec.q_heads * spec.value, spec.hidden)

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Tensor:
        """Computes absorbed queries [N, Hq_local, R + P] from x [N, H], the same on every rank; appends latents.

        If rows are dealt, x and queries are of this rank's.
        """
        spec = self.spec
        mine, slots, dealt = cache.layer(self.index), step.new_slots(None), step.dealt
        q, kv = self.down(x).split([self.q_width, spec.entry], 1)
        if self.q_up is not None:
            of_q = rms_norm(q, self.q_gain, spec.norm_eps)[0]
            if self.indexer is not None and (step.chooses or step.chosen is None):
                self.indexer(x, of_q, angles, mine, step)
            q = self.q_up(of_q if dealt is None or not self.gathers else all_rows(dealt, self.comm, of_q))
        q = q.unflatten(1, (self.makes, spec.query))  # [N, h, nope + P]

        def append(
            q: Tensor, kv: Tensor, angles: Angles, w_uk: Tensor, slots: Tensor, kept: Mapping[str, Tensor] = mine.kept
        ) -> Tensor:
            norm, few = (self.kv_gain, spec.norm_eps), (kept.get("latent_scales"), kept.get("ropes"))
            return angles.scaled(mla_append(q, kv, angles.cos, angles.sin, *norm, w_uk, kept["latents"], slots, *few))

        if dealt is not None:
            of_all, none = all_rows(dealt, self.comm, kv), q.new_empty(dealt.rows, 0, spec.query)
            append(none, of_all, angles, self.w_uk[:0], slots)
            append(none, of_all, angles, self.w_uk[:0], dealt.slots, gathered(dealt, mine, self._names(mine)))
            q = to_rows(dealt, self.comm, q, self.made) if self.gathers else q
            return append(q, kv, angles.of(dealt.own), self.w_uk, torch.full_like(slots[dealt.own], -1))
        if step.expands:
            append(q.new_empty(len(x), 0, spec.query), kv, angles, self.w_uk[:0], slots)
            makes_own = self.gathers and self.made == self.shares
            if self.gathers and not makes_own:  # mode medha: the first rank keeps all heads
                q = self._gather(q.contiguous(), step)
            return angles.scaled(_rotated(q if makes_own else q[:, self.own], angles, spec.nope))
        gathers, w_uk = self.gathers, self.own_w_uk
        if gathers and step.cu_q is not None and gathers_first(spec, len(x), self.comm.wire_rate):
            q, gathers, w_uk = self._gather(q.contiguous(), step), False, self.w_uk
        absorbed = append(q, kv, angles, w_uk, slots)
        return self._gather(absorbed, step) if gathers else absorbed

    def finish(self, q: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> PendingProjection:
        """Computes this rank's part [N, H] of the output from the queries of `project`."""
        mine = cache.layer(self.index, step.cu_q is not None)
        if step.expands:
            return self.output(self._attend_expanded(q, mine, step).flatten(1))
        attend = self.attend if step.dealt is None else self._attend_dealt
        return self.output(attend(q, mine, step, policy).flatten(1))

    def _attend_expanded(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Attends with own heads' queries [N, h, nope + P], not absorbed; returns their output [N, h, value]."""
        spec, placement, cu_q = self.spec, step.placement, step.cu_q
        assert cu_q is not None
        page, ranks, heads = placement.page_size, placement.layout.kvp, q.shape[1]
        most = min(-(-step.max_k // page), step.block_tables.shape[1])
        sequences = len(step.slots) - step.padded
        # By the most heads of a rank: all gather the same columns at a time.
        of_column = sequences * ranks * page * max(self.shares) * (spec.nope + spec.value) * q.itemsize
        unit = placement.append_block // math.gcd(placement.append_block, page)  # columns of whole blocks
        each = max(1, min(EXPANDED // max(of_column, 1), DEEP // page) // unit) * unit
        hi, found = torch.where(step.live, step.positions + 1, 0), list[tuple[Tensor, Tensor]]()
        for first in range(0, most, each):
            columns = range(first, min(first + each, most))
            latents = whole_sequences(step, self.comm, cache, columns, self._whole)
            keys = (latents[..., : spec.latent] @ self.expand.T).unflatten(2, (heads, spec.nope + spec.value))
            of_piece = (hi - first * page * ranks).clamp(0, latents.shape[1]).int()
            ropes = latents[..., spec.latent :]
            found.append(expanded_prefill(q, keys, ropes, cu_q, step.max_q, of_piece, spec.scale))
            if len(found) > 1:
                parts, lse = (torch.stack(both) for both in zip(*found, strict=True))
                found = [lse_combine(parts, lse, return_lse=True)]
        return found[0][0]

    def _whole(self, kept: Mapping[str, Tensor]) -> Tensor:
        """Returns latents with their rotated values behind them, whatever they are kept as."""
        return (
            whole_latents(kept["latents"], kept["latent_scales"], kept["ropes"]) if "ropes" in kept else kept["latents"]
        )

    def _attend_dealt(self, q: Tensor, cache: LayerCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Attends with all heads of own rows to whole sequences; returns the output of own heads [N, heads, value]."""
        dealt = step.dealt
        assert dealt is not None
        kept = gathered(dealt, cache, self._names(cache))
        kept = {"latents": self._whole(kept)}  # unpacked once, for all rows
        layer = LayerAttention(self.window, self.scale, self.latent, topk=self.topk)
        found = policy.attend(q, replace(cache, kept=kept), dealt.step, layer).merge()[0]
        return to_heads(dealt, self.comm, per_head_linear(found, self.w_uv), self.shares)

    def gather_ahead(self, cache: KVCache, dealt: DealtRows) -> None:
        """Gathers what the layer reads of sequences; the layer before may be under way."""
        mine = cache.layer(self.index, prefill=True)
        index = [] if self.indexer is None else self.indexer.names(mine)
        gather_sequences(dealt, self.comm, mine, [*index, *self._names(mine)])

    def _names(self, cache: LayerCache) -> list[str]:
        """Returns the names of what latents consist of."""
        return [name for name in ("latents", "latent_scales", "ropes") if name in cache.kept]

    def _gather(self, q: Tensor, step: Step) -> Tensor:
        """Gathers queries [N, own, D] of each rank's heads -> [N, Hq, D]; ranks with a head less send padding."""
        lanes = max(self.made)
        if q.shape[1] < lanes:
            q = F.pad(q, (0, 0, 0, lanes - q.shape[1]))
        parts = self.comm.gather_in_group(q).transpose(0, 1) if step.half is not None else self.comm.gather_rows(q)
        if min(self.made) == lanes:
            return parts.flatten(1, 2)  # [N, K, lanes, D]
        return torch.cat([part[:, :n] for part, n in zip(parts.unbind(1), self.made, strict=True)], 1)

    def sends_values(self, rows: int) -> bool:
        """Returns whether messages of up to `rows` queries hold values instead of latents."""
        return len(self.shares) > 1 and exchanges_values(self.spec, rows, self.comm.wire_rate)

    def sent(self, partial: PartialAttention, rows: int) -> PartialAttention:
        if not self.sends_values(rows):
            return partial
        out, lse = partial.merge()
        return PartialAttention(per_head_linear(out, self.w_uv), lse)

    def sent_width(self, rows: int) -> int:
        return self.spec.value if self.sends_values(rows) else self.spec.latent

    def received(self, x: Tensor, rows: int) -> Tensor:
        return x if self.sends_values(rows) else per_head_linear(x, self.own_w_uv)


def _rotated(q: Tensor, angles: Angles, nope: int) -> Tensor:
    """Rotates queries [N, H, nope + P] from number `nope` on, in fp32."""
    first, second = q[..., nope:].float().chunk(2, -1)
    cos, sin = angles.cos[:, None].float(), angles.sin[:, None].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((q[..., :nope], rotated.to(q.dtype)), -1)


def _halves(spec: MLASpec, begin: int) -> list[range]:
    """Returns the rows of a rotated part from row `begin` on, in the order of the kernels, which pair its halves.

    The same permutation of queries and keys leaves scores unchanged.
    """
    end = begin + spec.rope
    return [range(begin, end, 2), range(begin + 1, end, 2)] if spec.interleaved else [range(begin, end)]


def _queries(spec: MLASpec, name: str, heads: range) -> list[Rows]:
    """Lists the rows of the weights that compute the queries of `heads`."""
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
