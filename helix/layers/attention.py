"""Attention of a layer: QKV, partial attention, exchange, output projection (arXiv:2507.07120, figure 4, top)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator, PackedPartials
from comm.hopb import RESERVED_SMS
from comm.partial import PartialProjection
from helix.attention.base import AttentionPolicy, LayerAttention, slice_step
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.rotary import Angles, rope_row_order
from helix.layers.specs import AttentionSpec
from helix.layers.weights import ModelShard
from helix.layout import HelixLayout, share
from helix.worker.kv_cache import KVCache, LayerCache
from helix.worker.step import Step
from kernels.attention.head_squares import head_squares
from kernels.attention.kv_append import kv_append
from kernels.attention.split_kv import PartialAttention
from kernels.dense.gate_mul import gate_mul
from kernels.dense.qkv_append import qkv_append
from kernels.scaled import as_tensor, matrix_rows


class ShardedAttention:
    """Everything after the queries: partial attention over this rank's shard, exchange, output projection.

    Attributes:
        index: of the layer.
        shares: number of query heads of each rank of the kvp group after the exchange.
        latent: width of the values inside stored latents; None: keys and values are stored.
        sinks: learned attention sinks, on the rank that adds them.
        topk: tokens that an indexer selects per query; None: all are read.
    """

    output: RowParallel
    latent: int | None = None
    topk: int | None = None

    def __init__(
        self, shard: ModelShard, index: int, shares: list[int], scale: float, window: int | None = None
    ) -> None:
        self.comm, self.pipeline = shard.comm, shard.pipeline
        self.index = index
        self.shares = shares
        self.scale = scale
        self.window = window
        self.sinks: Tensor | None = None

    def attend(self, q: Tensor, cache: LayerCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Attends queries [N, Hq_local, D]; returns the exact output of this rank's heads [N, heads, D]."""
        sequences, rows = len(step.slots), len(q)
        chunks = 1 if step.cu_q is not None else min(step.chunks, sequences)
        layer = LayerAttention(self.window, self.scale, self.latent, self.sinks, topk=self.topk)
        if len(self.shares) == 1:  # no exchange
            return self.after_exchange(policy.attend(q, cache, step, layer).merge_states()[0], rows)
        if chunks == 1:
            sent = self.before_exchange(policy.attend(q, cache, step, layer), rows)
            return self.after_exchange(self.comm.merge_states_exchange(sent, self.shares), rows)

        each = rows // sequences
        cuts = [share(sequences, chunks, i) for i in range(chunks)]
        rows = len(cuts[0]) * each  # of the largest chunk
        result = q.new_empty(len(q), self.shares[self.comm.kvp_rank], self.exchange_width(rows))

        def chunk_rows(chunk: int) -> slice:
            return slice(cuts[chunk].start * each, cuts[chunk].stop * each)

        large = self.comm.takes_sms(rows, result.shape[2], q.dtype, self.shares)

        def attend(chunk: int) -> PartialAttention | PackedPartials:
            # The first chunk overlaps nothing. Splits of other chunks are unmerged yet: each chunk has a workspace.
            chunk_layer = replace(layer, reserved_sms=RESERVED_SMS if chunk else 0, chunk=chunk)
            sent = self.before_exchange(
                policy.attend(q[chunk_rows(chunk)], cache, slice_step(step, chunk_rows(chunk)), chunk_layer), rows
            )
            return self.comm.pack(sent, self.shares) if large else sent  # packs on all SMs

        def exchange(chunk: int, sent: PartialAttention | PackedPartials) -> None:
            if isinstance(sent, PackedPartials):
                self.comm.exchange_packed(sent, self.shares, result[chunk_rows(chunk)])
            else:
                self.comm.merge_states_exchange(sent, self.shares, result[chunk_rows(chunk)])

        # MLA decode runs one CTA per SM, so the SMs it leaves idle are free for the exchange whatever the launch order.
        self.pipeline.run(chunks, attend, exchange, head_start=large and self.latent is None)
        return self.after_exchange(result, rows)

    def before_exchange(self, partial: PartialAttention, rows: int) -> PartialAttention:
        """Transforms partial attention before the exchange, in messages of up to `rows` queries."""
        return partial

    def exchange_width(self, rows: int) -> int:
        """Returns the values per head and query in messages of up to `rows` queries."""
        raise NotImplementedError

    def after_exchange(self, x: Tensor, rows: int) -> Tensor:
        """Transforms the exchanged output of this rank's heads; inverse of `before_exchange`'s choice for `rows`."""
        return x


class Queries(NamedTuple):
    """Queries [N, Hq, D] of a TPA slice, and the output gates [N, heads * D] or [N, heads] of this rank's heads."""

    heads: Tensor
    gate: Tensor | None

    def index_select(self, dim: int, index: Tensor) -> Queries:
        gate = None if self.gate is None else self.gate.index_select(dim, index)
        return Queries(self.heads.index_select(dim, index), gate)


class HeadSquares:
    """Mean squares over all query heads and over all key heads, for QK norms that span heads.

    Attributes:
        sharded: whether ranks have different heads, so that an all-gather is needed.
    """

    def __init__(self, comm: Communicator, layout: HelixLayout, spec: AttentionSpec) -> None:
        self.comm = comm

        def local_heads(rank: int) -> tuple[int, int]:
            return len(layout.q_heads(rank, spec.q_heads, spec.kv_heads)), len(layout.kv_heads(rank, spec.kv_heads))

        self.sharded = local_heads(comm.rank) != (spec.q_heads, spec.kv_heads)
        ranks = [local_heads(rank) for rank in (range(comm.world_size) if self.sharded else [comm.rank])]
        q, k = (sum(heads) * spec.head_dim for heads in zip(*ranks, strict=True))  # replicated heads count repeatedly
        self._shares = 1 / q, 1 / k

    def __call__(self, heads: Tensor, kv_heads: int, reduce: bool = True) -> Tensor:
        """Returns [N, 2] fp32 for local heads [N, Hq + 2 kv_heads, D]; not `reduce`: of these heads only."""
        squares = head_squares(heads, kv_heads, self._shares)
        return self.comm.all_gather(squares).sum(0) if self.sharded and reduce else squares


class Attention(ShardedAttention):
    """Attention with QKV replicated in the kvp group, one exchange, and the output projection over all ranks.

    QKV weights are sharded by TPA only, so the ranks of a kvp group compute the same QKV for the whole batch and need
    no all-gather of queries. For a long prompt chunk each rank computes the QKV of a part of the tokens, and the group
    gathers them. After the exchange each rank has the exact output of its query heads, and their columns of the output
    projection. A learned sink is an extra key of its head; only kvp rank 0 adds it.
    """

    def __init__(self, shard: ModelShard, spec: AttentionSpec, index: int, name: str) -> None:
        weights, comm, layout = shard.weights, shard.comm, shard.layout
        heads = (comm.rank, spec.q_heads, spec.kv_heads)
        super().__init__(shard, index, layout.head_shares(*heads), spec.scale, spec.window)
        self.spec, name = spec, f"{name}.self_attn"

        dim, q, kv = spec.head_dim, layout.q_heads(*heads), layout.kv_heads(comm.rank, spec.kv_heads)
        gate_in_q = spec.gate is not None and spec.gate.name is None
        order, q_head_rows = rope_row_order(dim, spec.rotated or dim), (1 + gate_in_q) * dim

        def row_ranges(heads: range, head_rows: list[range], each: int = dim) -> list[range]:
            # `head_rows` of each head, which has `each` rows; whole heads form one range.
            if [*map(len, head_rows)] == [each]:
                return [range(heads.start * each, heads.stop * each)]
            return [range(h * each + r.start, h * each + r.stop) for h in heads for r in head_rows] or [range(0)]

        def rows(part: str, total: int, row_ranges: list[range], preceding_heads: int) -> list[Rows]:
            if spec.fused:
                part, total = "qkv", spec.q_heads + 2 * spec.kv_heads
                row_ranges = [
                    range(preceding_heads * dim + r.start, preceding_heads * dim + r.stop) for r in row_ranges
                ]
            return [Rows(f"{name}.{part}_proj", total * dim, each, spec.qkv_bias) for each in row_ranges]

        self._q_rows, q_total = len(q) * dim, (1 + gate_in_q) * spec.q_heads
        stacked = [
            *rows("q", q_total, row_ranges(q, order, q_head_rows), 0),
            *rows("k", spec.kv_heads, row_ranges(kv, order), spec.q_heads),
            *rows("v", spec.kv_heads, row_ranges(kv, [range(dim)]), spec.q_heads + spec.kv_heads),
        ]
        self.qkv = ColumnParallel(weights, spec.inputs or spec.hidden, stacked)
        self.gate: ColumnParallel | None = None
        if spec.gate is not None and spec.gate.name is not None:
            o, width = layout.o_heads(*heads), spec.gate_width
            gate = Rows(f"{name}.{spec.gate.name}", spec.q_heads * width, range(o.start * width, o.stop * width))
            self.gate = ColumnParallel(weights, spec.hidden, [gate])
        elif gate_in_q:
            gates = row_ranges(layout.o_heads(*heads), [range(dim, q_head_rows)], q_head_rows)
            self.gate = ColumnParallel(weights, spec.hidden, rows("q", q_total, gates, 0))
        self.norms: tuple[Tensor, Tensor, float] | None = None
        self._squares: HeadSquares | None = None
        if spec.qk_norm and spec.norm_over == "all":
            q_norm_weight = weights.norm_weight(f"{name}.q_norm.weight", spec.q_heads * dim, row_ranges(q, order)).view(
                -1, dim
            )
            k_norm_weight = weights.norm_weight(
                f"{name}.k_norm.weight", spec.kv_heads * dim, row_ranges(kv, order)
            ).view(-1, dim)
            self.norms, self._squares = (q_norm_weight, k_norm_weight, spec.norm_eps), HeadSquares(comm, layout, spec)
        elif spec.qk_norm:
            q_norm_weight, k_norm_weight = (
                weights.norm_weight(f"{name}.{part}_norm.weight", dim, order) for part in "qk"
            )
            self.norms = q_norm_weight, k_norm_weight, spec.norm_eps
        if spec.sinks:
            if layout.kvp_rank(comm.rank) == 0:
                self.sinks = weights.parameter(len(q), dtype=torch.float32)
            weights.bind(self.sinks, f"{name}.sinks", (spec.q_heads,), q)
        columns, width = layout.hidden_columns(*heads, spec.head_dim), spec.q_heads * spec.head_dim
        self.output = RowParallel(shard, f"{name}.o_proj", columns, width, spec.hidden, spec.output_bias)

    @property
    def reduces_squares(self) -> bool:
        """Whether `project` communicates."""
        return self._squares is not None and self._squares.sharded

    def exchange_width(self, rows: int) -> int:
        return self.spec.head_dim

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Queries:
        """Computes this TPA slice's queries from x [N, H], the same on every rank; appends KV to the cache."""
        gate = None if self.gate is None else self.gate(x)
        return Queries(self._queries_and_append(x, angles, cache, step), gate)

    def finish(self, q: Queries, cache: KVCache, step: Step, policy: AttentionPolicy) -> PartialProjection:
        """Returns this rank's partial sum [N, H] of the output."""
        found = self.attend(q.heads, cache.layer(self.index, step.cu_q is not None), step, policy).flatten(1)
        if q.gate is None:
            return self.output(found)
        assert self.spec.gate is not None
        return self.output(gate_mul(found, q.gate, self.spec.gate.function))

    def _queries_and_append(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Tensor:
        layer_cache = cache.layer(self.index, prefill=step.cu_q is not None)
        to = (
            angles.cos,
            angles.sin,
            layer_cache.keys,
            layer_cache.values,
            step.slot_mapping(self.window),
            self.norms,
            layer_cache.scales,
        )
        gathers = len(self.shares) > 1 and step.micro_batch is not None
        if not gathers and self._squares is None:
            return angles.scale_queries(qkv_append(x, self.qkv.weight, self.qkv.bias, *to))
        heads = (self._gather_qkv(x) if gathers else self.qkv(x)).unflatten(1, (-1, self.spec.head_dim))
        means = None if self._squares is None else self._squares(heads, layer_cache.keys.shape[2])
        return angles.scale_queries(kv_append(heads, *to, means))

    def queries(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Tensor:
        """Computes only the queries [N, Hq, D] of `project`; no append, no communication.

        May run concurrently with another layer, and so uses cuBLAS: the project's kernels share a workspace.
        """
        layer_cache, rows = cache.layer(self.index), self._q_rows
        bias = None if self.qkv.bias is None else self.qkv.bias[:rows]
        weight = as_tensor(matrix_rows(self.qkv.weight, 0, rows), x.dtype)
        heads = F.linear(x, weight, bias).unflatten(1, (-1, self.spec.head_dim))
        no_heads = layer_cache.keys[:, :, :0], layer_cache.values[:, :, :0]
        key_scales, value_scales = (s if s is None else s[:, :0] for s in layer_cache.scales)
        norms, means = self.norms, None
        if norms is not None and self._squares is not None:
            norms = norms[0], norms[1][:0], norms[2]
            # This rank's heads suffice: a factor on a query does not change what it selects.
            means = self._squares(heads, 0, reduce=False)
        to = *no_heads, step.slot_mapping(self.window), norms, (key_scales, value_scales), means
        return angles.scale_queries(kv_append(heads, angles.cos, angles.sin, *to))

    def _gather_qkv(self, x: Tensor) -> Tensor:
        # QKV [N, rows]: each rank of the kvp group computes its share of the tokens.
        each = -(-len(x) // len(self.shares))
        begin = self.comm.kvp_rank * each
        local = self.qkv(x[begin : begin + each])
        if len(local) < each:  # all messages have one size
            local = F.pad(local, (0, 0, 0, each - len(local)))
        return self.comm.gather_in_group(local).flatten(0, 1)[: len(x)]
