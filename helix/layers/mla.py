"""Multi-head latent attention (MLA): one latent of R + P values per token is the key and value of all heads.

See DeepSeek-V2, section 2.1. The up-projections are absorbed into the queries, so attention reads latents as stored:

    q_h . k_h = (W_UK_h^T q_nope_h) . c + q_rope_h . k_rope          out_h = W_UV_h (sum over tokens of weight * c)

    x [N, H] --> q_b(norm(q_a x)) [N, h, nope + P] --> W_UK --> [N, h, R + P] --> attention over this rank's latents
             --> kv_a x [N, R + P] --> norm, RoPE, append        --> exchange --> W_UV --> [N, own heads, value] --> W_O

With one latent, tensor parallelism duplicates the cache on every rank (mode tp); Helix shards it over all ranks
(tpa=1), and every rank's attention then needs the queries of all heads. Two choices remain, made by estimated time on
an H200 and over the link:

- Where to apply W_UV: after the exchange, each rank to its own heads, so that messages have R values per head; or
  before, every rank to all heads, so that messages have only `value` values. Weights dominate for few rows, messages
  for many.
- Where to compute queries: each rank computes all heads, or its share, followed by an all-gather. Prompts gather
  queries before W_UK is applied, when they are shorter.

For a long prompt chunk, each rank instead gathers the sequence's latents, expands the keys and values of its own heads
and attends only these heads. A key and a value are shorter than an absorbed query and its output, and neither queries
nor partial outputs are sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.partial import PartialProjection
from helix.attention.base import AttentionPolicy, LayerAttention
from helix.layers.attention import ShardedAttention
from helix.layers.indexer import Indexer
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.rotary import Angles
from helix.layers.specs import MAX_EXPANDED_BYTES, MLASpec, max_gathered_tokens
from helix.layers.weights import ModelShard
from helix.layout import share
from helix.worker.graph_keys import DEEP
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.row_shard import (
    all_gather_rows,
    can_shard_rows,
    gather_latents,
    gather_sequences,
    gathered,
    to_heads,
    to_rows,
)
from helix.worker.step import RowShard, Step
from kernels.attention.dequantized_prefill import dequantize_latent_rows
from kernels.attention.merge_states import merge_states
from kernels.attention.split_kv import PartialAttention
from kernels.dense.rms_norm import rms_norm
from kernels.mla.append import mla_append
from kernels.mla.expanded_prefill import expanded_prefill
from kernels.mla.per_head_linear import per_head_linear

WEIGHT_READ_RATE = 4.2e12  # bytes/s of weights in projections of a few rows
COLLECTIVE_LATENCY_S = 2.5e-6  # of a small collective (docs/results/kernels.md#collectives)
ASSUMED_ROWS = 8  # rows of a step assumed by `gathers_queries`, which decides before rows are known


def exchanges_values(spec: MLASpec, rows: int, wire_rate: float) -> bool:
    """Returns whether applying W_UV before the exchange, to all heads, is faster for `rows` tokens.

    It shortens messages by `rows * (latent - value)` values per head, and reads `value * latent` more weights. On K
    ranks, both count for K - 1 of K heads: the other heads are local, and their weights are read anyway.
    """
    return rows * (spec.latent - spec.value) / wire_rate > spec.value * spec.latent / WEIGHT_READ_RATE


def gathers_queries(spec: MLASpec, ranks: int, item: int, wire_rate: float) -> bool:
    """Returns whether it is faster to compute only this rank's share of the queries and all-gather the others.

    Args:
        ranks: number of ranks that attend the same heads.
        item: bytes of a weight and of a sent value.
        wire_rate: see `Communicator`.
    """
    others = spec.q_heads * (ranks - 1) / ranks * item
    weights = spec.query * (spec.q_rank or spec.hidden) + spec.nope * spec.latent  # per head: query and W_UK
    return others * weights / WEIGHT_READ_RATE > COLLECTIVE_LATENCY_S + others * ASSUMED_ROWS * spec.entry / wire_rate


def _tokens(step: Step) -> int:
    # As if all sequences were as long as the longest.
    return (len(step.slots) - step.padded) * step.max_k * step.placement.layout.kvp


def row_sharded(spec: MLASpec, step: Step) -> bool:
    """Returns whether to row-shard a prefill step: all-gather KV, split the rows (`helix.worker.row_shard`)."""
    ranks, rows = step.placement.layout.kvp, len(step.tokens)
    if ranks == 1 or spec.topk is None or spec.q_rank is None or step.cu_q is None or step.max_k * ranks <= spec.topk:
        return False
    return can_shard_rows(rows, ranks) and _tokens(step) < max_gathered_tokens(spec, rows)


def min_rows_to_expand(spec: MLASpec) -> float:
    """Returns the rows per sequence from which on a prefill step takes fewer FLOPs with expanded latents.

    Expanding a token for a head costs FLOPs that attention then saves per row. Captured steps expand up to twice the
    tokens needed.
    """
    saved = spec.entry + spec.latent - spec.query - spec.value
    return 2 * spec.latent * (spec.nope + spec.value) / saved if saved > 0 and spec.topk is None else math.inf


def gathers_before_absorption(spec: MLASpec, rows: int, wire_rate: float) -> bool:
    """Returns whether it is faster to gather `rows` queries before W_UK, which each rank then applies to all heads.

    It shortens messages by `entry - query` values per head, and reads `nope * latent` more weights.
    """
    return rows * (spec.entry - spec.query) / wire_rate > spec.nope * spec.latent / WEIGHT_READ_RATE


class MLA(ShardedAttention):
    """MLA: absorbed queries, partial attention, one exchange, output projection over all ranks.

    W_UK and W_UV are views of `kv_b_proj`, of all heads that this rank attends.
    """

    def __init__(self, shard: ModelShard, spec: MLASpec, index: int, name: str) -> None:
        weights, comm, layout = shard.weights, shard.comm, shard.layout
        heads = (comm.rank, spec.q_heads, 1)
        super().__init__(shard, index, layout.head_shares(*heads), spec.scale)
        self.spec, self.latent, self.topk, name = spec, spec.latent, spec.topk, f"{name}.self_attn"
        self.indexer = None if spec.indexer is None else Indexer(shard, spec, f"{name}.indexer")
        attended_heads, output_heads = layout.q_heads(*heads), layout.o_heads(*heads)
        # With one latent head, a kvp group of several ranks is the world, as all_gather requires.
        item, rate = weights.dtype.itemsize, comm.wire_rate
        self.gathers = layout.kvp > 1 and gathers_queries(spec, layout.kvp, item, rate)
        computed_heads = share(spec.q_heads, layout.kvp, comm.kvp_rank) if self.gathers else attended_heads

        self.num_computed_heads, self.computed_head_counts = (
            len(computed_heads),
            [len(share(spec.q_heads, layout.kvp, k)) for k in range(layout.kvp)],
        )
        self.q_width = spec.q_rank or len(computed_heads) * spec.query
        queries = _queries(spec, name, computed_heads)
        first = [Rows(f"{name}.q_a_proj", spec.q_rank, range(spec.q_rank))] if spec.q_rank else queries
        kv_a = f"{name}.kv_a_proj_with_mqa"
        latent = [range(spec.latent), *_rope_rows(spec, spec.latent)]
        self.down = ColumnParallel(weights, spec.hidden, [*first, *(Rows(kv_a, spec.entry, part) for part in latent)])
        self.q_up: ColumnParallel | None = None
        if spec.q_rank:
            self.q_norm_weight = weights.norm_weight(f"{name}.q_a_layernorm.weight", spec.q_rank)
            self.q_up = ColumnParallel(weights, spec.q_rank, queries)
        self.kv_norm_weight = weights.norm_weight(f"{name}.kv_a_layernorm.weight", spec.latent)

        width = spec.nope + spec.value
        kv_b = weights.parameter(len(attended_heads) * width, spec.latent)
        rows = range(attended_heads.start * width, attended_heads.stop * width)
        weights.bind(kv_b, f"{name}.kv_b_proj.weight", (spec.q_heads * width, spec.latent), rows)
        kv_b_heads = kv_b.view(len(attended_heads), width, spec.latent)

        def local(part: range) -> slice:
            return slice(part.start - attended_heads.start, part.stop - attended_heads.start)

        self.local_heads, self.local_kv_b = (
            local(output_heads),
            kv_b_heads[local(output_heads)].flatten(0, 1),
        )  # [own heads * (nope + value), R]
        self.w_uk = kv_b_heads[:, : spec.nope]  # [Hq_local, nope, R]
        self.local_w_uk = self.w_uk[local(computed_heads)]
        self.w_uv = kv_b_heads[:, spec.nope :].mT  # [Hq_local, R, value]
        self.local_w_uv = self.w_uv[local(output_heads)]
        columns = layout.hidden_columns(*heads, spec.value)
        self.output = RowParallel(shard, f"{name}.o_proj", columns, spec.q_heads * spec.value, spec.hidden)

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Tensor:
        """Computes absorbed queries [N, Hq_local, R + P] from x [N, H], the same on every rank; appends latents.

        In a row-sharded step, x and the queries have only this rank's rows.
        """
        spec = self.spec
        layer_cache, slots, shard = cache.layer(self.index), step.slot_mapping(None), step.row_shard
        q, kv = self.down(x).split([self.q_width, spec.entry], 1)
        if self.q_up is not None:
            q_latent = rms_norm(q, self.q_norm_weight, spec.norm_eps)[0]
            if self.indexer is not None and (step.selects or step.selected is None):
                self.indexer(x, q_latent, angles, layer_cache, step)
            q = self.q_up(
                q_latent if shard is None or not self.gathers else all_gather_rows(shard, self.comm, q_latent)
            )
        q = q.unflatten(1, (self.num_computed_heads, spec.query))  # [N, h, nope + P]

        def append(
            q: Tensor,
            kv: Tensor,
            angles: Angles,
            w_uk: Tensor,
            slots: Tensor,
            tensors: Mapping[str, Tensor] = layer_cache.tensors,
        ) -> Tensor:
            norm, few = (self.kv_norm_weight, spec.norm_eps), (tensors.get("latent_scales"), tensors.get("ropes"))
            return angles.scale_queries(
                mla_append(q, kv, angles.cos, angles.sin, *norm, w_uk, tensors["latents"], slots, *few)
            )

        if shard is not None:
            all_kv, none = all_gather_rows(shard, self.comm, kv), q.new_empty(shard.rows, 0, spec.query)
            append(none, all_kv, angles, self.w_uk[:0], slots)
            append(
                none,
                all_kv,
                angles,
                self.w_uk[:0],
                shard.slots,
                gathered(shard, layer_cache, self._cache_names(layer_cache)),
            )
            q = to_rows(shard, self.comm, q, self.computed_head_counts) if self.gathers else q
            return append(q, kv, angles.rows(shard.local), self.w_uk, torch.full_like(slots[shard.local], -1))
        if step.expands:
            append(q.new_empty(len(x), 0, spec.query), kv, angles, self.w_uk[:0], slots)
            computes_local = self.gathers and self.computed_head_counts == self.shares
            if self.gathers and not computes_local:  # mode medha: kvp rank 0 owns all heads
                q = self._gather(q.contiguous(), step)
            return angles.scale_queries(_rotate(q if computes_local else q[:, self.local_heads], angles, spec.nope))
        gathers, w_uk = self.gathers, self.local_w_uk
        if gathers and step.cu_q is not None and gathers_before_absorption(spec, len(x), self.comm.wire_rate):
            q, gathers, w_uk = self._gather(q.contiguous(), step), False, self.w_uk
        absorbed = append(q, kv, angles, w_uk, slots)
        return self._gather(absorbed, step) if gathers else absorbed

    def finish(self, q: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> PartialProjection:
        """Returns this rank's partial sum [N, H] of the output."""
        layer_cache = cache.layer(self.index, step.cu_q is not None)
        if step.expands:
            return self.output(self._attend_expanded(q, layer_cache, step).flatten(1))
        attend = self.attend if step.row_shard is None else self._attend_row_sharded
        return self.output(attend(q, layer_cache, step, policy).flatten(1))

    def _attend_expanded(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        # Local heads' queries [N, h, nope + P], not absorbed -> output [N, h, value].
        spec, placement, cu_q = self.spec, step.placement, step.cu_q
        assert cu_q is not None
        page, ranks, heads = placement.page_size, placement.layout.kvp, q.shape[1]
        max_pages = min(-(-step.max_k // page), step.block_tables.shape[1])
        sequences = len(step.slots) - step.padded
        # For the most heads of any rank: all ranks must gather the same columns.
        column_bytes = sequences * ranks * page * max(self.shares) * (spec.nope + spec.value) * q.itemsize
        unit = placement.append_block // math.gcd(placement.append_block, page)  # columns of whole blocks
        each = max(1, min(MAX_EXPANDED_BYTES // max(column_bytes, 1), DEEP // page) // unit) * unit
        hi, found = torch.where(step.live, step.positions + 1, 0), list[tuple[Tensor, Tensor]]()
        for first in range(0, max_pages, each):
            columns = range(first, min(first + each, max_pages))
            latents = gather_latents(step, self.comm, cache, columns, self._unpack_latents)
            keys = (latents[..., : spec.latent] @ self.local_kv_b.T).unflatten(2, (heads, spec.nope + spec.value))
            piece_hi = (hi - first * page * ranks).clamp(0, latents.shape[1]).int()
            ropes = latents[..., spec.latent :]
            found.append(expanded_prefill(q, keys, ropes, cu_q, step.max_q, piece_hi, spec.scale))
            if len(found) > 1:
                parts, lse = (torch.stack(both) for both in zip(*found, strict=True))
                found = [merge_states(parts, lse, return_lse=True)]
        return found[0][0]

    def _unpack_latents(self, tensors: Mapping[str, Tensor]) -> Tensor:
        # In the model's dtype, rotated part last.
        return (
            dequantize_latent_rows(tensors["latents"], tensors["latent_scales"], tensors["ropes"])
            if "ropes" in tensors
            else tensors["latents"]
        )

    def _attend_row_sharded(self, q: Tensor, cache: LayerCache, step: Step, policy: AttentionPolicy) -> Tensor:
        # Attends all heads of local rows to whole sequences; returns the output of local heads [N, heads, value].
        shard = step.row_shard
        assert shard is not None
        tensors = gathered(shard, cache, self._cache_names(cache))
        tensors = {"latents": self._unpack_latents(tensors)}  # unpacked once, for all rows
        layer = LayerAttention(self.window, self.scale, self.latent, topk=self.topk)
        found = policy.attend(q, LayerCache(cache.index, tensors, cache.accepted), shard.step, layer).merge_states()[0]
        return to_heads(shard, self.comm, per_head_linear(found, self.w_uv), self.shares)

    def prefetch_sequences(self, cache: KVCache, shard: RowShard) -> None:
        """Starts to gather the sequences' cache that this layer reads, while the previous layer computes."""
        layer_cache = cache.layer(self.index, prefill=True)
        index = [] if self.indexer is None else self.indexer.cache_names(layer_cache)
        gather_sequences(shard, self.comm, layer_cache, [*index, *self._cache_names(layer_cache)])

    def _cache_names(self, cache: LayerCache) -> list[str]:
        return [name for name in ("latents", "latent_scales", "ropes") if name in cache.tensors]

    def _gather(self, q: Tensor, step: Step) -> Tensor:
        # Queries [N, local heads, D] -> [N, Hq, D]; ranks with a head less send padding.
        lanes = max(self.computed_head_counts)
        if q.shape[1] < lanes:
            q = F.pad(q, (0, 0, 0, lanes - q.shape[1]))
        parts = (
            self.comm.gather_in_group(q).transpose(0, 1) if step.micro_batch is not None else self.comm.gather_rows(q)
        )
        if min(self.computed_head_counts) == lanes:
            return parts.flatten(1, 2)  # [N, K, lanes, D]
        return torch.cat([part[:, :n] for part, n in zip(parts.unbind(1), self.computed_head_counts, strict=True)], 1)

    def sends_values(self, rows: int) -> bool:
        """Returns whether messages of up to `rows` queries contain values instead of latents."""
        return len(self.shares) > 1 and exchanges_values(self.spec, rows, self.comm.wire_rate)

    def before_exchange(self, partial: PartialAttention, rows: int) -> PartialAttention:
        if not self.sends_values(rows):
            return partial
        out, lse = partial.merge_states()
        return PartialAttention(per_head_linear(out, self.w_uv), lse)

    def exchange_width(self, rows: int) -> int:
        return self.spec.value if self.sends_values(rows) else self.spec.latent

    def after_exchange(self, x: Tensor, rows: int) -> Tensor:
        return x if self.sends_values(rows) else per_head_linear(x, self.local_w_uv)


def _rotate(q: Tensor, angles: Angles, nope: int) -> Tensor:
    # RoPE on the last P values of queries [N, H, nope + P], in fp32.
    first, second = q[..., nope:].float().chunk(2, -1)
    cos, sin = angles.cos[:, None].float(), angles.sin[:, None].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((q[..., :nope], rotated.to(q.dtype)), -1)


def _rope_rows(spec: MLASpec, begin: int) -> list[range]:
    # Kernels rotate the first half against the second. Permuting queries and keys alike leaves scores unchanged.
    end = begin + spec.rope
    return [range(begin, end, 2), range(begin + 1, end, 2)] if spec.interleaved else [range(begin, end)]


def _queries(spec: MLASpec, name: str, heads: range) -> list[Rows]:
    matrix, total = f"{name}.{'q_b_proj' if spec.q_rank else 'q_proj'}", spec.q_heads * spec.query
    parts = [
        part
        for h in heads
        for part in (
            range(h * spec.query, h * spec.query + spec.nope),
            *_rope_rows(spec, h * spec.query + spec.nope),
        )
    ]
    return [Rows(matrix, total, part) for part in parts or [range(0)]]
