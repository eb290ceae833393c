"""The attention phase of a layer (arXiv:2507.07120, figure 4, top)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from comm.hopb import RESERVED_SMS
from comm.pending import PendingProjection
from helix.attention.base import AttentionPolicy, LayerAttention, rows_of
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.mixer import LayerPlace
from helix.layers.weights import Weights
from helix.layout import HelixLayout, share
from helix.memory.keeps import Keeps, keys_and_values
from helix.memory.kv_cache import KVCache, LayerCache
from helix.steps.step import Step
from kernels.attention.kv_append import kv_append
from kernels.attention.split_kv import PartialAttention
from kernels.dense.qkv_append import qkv_append
from kernels.scaled import as_tensor, matrix_rows


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of one layer's attention in the checkpoint."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_eps: float
    window: int | None
    sinks: bool

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def attends(self) -> bool:
        """Whether queries read keys of the sequence."""
        return True

    @property
    def latent(self) -> None:
        """Width of values that are a part of the keys; None: keys and values are stored separately."""
        return None

    @property
    def weights(self) -> int:
        """Number of weights in all projections, over all ranks."""
        return self.hidden * self.head_dim * 2 * (self.q_heads + self.kv_heads)

    @property
    def multiplications(self) -> int:
        """Number of multiplications of a token's queries with one key and value, over all heads."""
        return self.q_heads * 2 * self.head_dim

    def keeps(self, layout: HelixLayout, rank: int, dtype: torch.dtype, kv: str = "auto") -> tuple[Keeps, ...]:
        """Lists the data that the layer keeps on a rank."""
        heads = len(layout.kv_heads(rank, self.kv_heads))
        return keys_and_values(heads, self.head_dim, dtype, kv, self.window)

    def buffers(self, layout: HelixLayout, rank: int) -> int:
        """Counts the activations per token of a prefill step on a rank.

        These are QKV, the queries, and partial outputs of all heads, also as sent and received messages.
        """
        q, lanes, copies = sent(layout, rank, self.q_heads, self.kv_heads)
        rows = (q + 2 * len(layout.kv_heads(rank, self.kv_heads))) * self.head_dim
        return copies * rows + 2 * (q + lanes) * self.head_dim

    def build(self, weights: Weights, comm: Communicator, layout: HelixLayout, place: LayerPlace) -> Attention:
        """Builds this rank's part."""
        return Attention(weights, comm, layout, self, place)


def sent(layout: HelixLayout, rank: int, q_heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Returns a rank's query heads, the heads in its received messages, and the copies of QKV: own, sent, received."""
    heads = rank, q_heads, kv_heads
    if layout.kvp == 1:
        return len(layout.q_heads(*heads)), 0, 1
    return len(layout.q_heads(*heads)), layout.kvp * max(layout.head_shares(*heads)), 3


class ShardedAttention:
    """Attention after the queries: partial attention over this rank's shard, exchange, output projection.

    Attributes:
        index: index of the layer.
        shares: number of query heads that each rank of the kvp group keeps after the exchange.
        latent: width of the values inside stored latents; None: keys and values are stored.
        sinks: learned sinks of the query heads, on the rank that adds them.
        topk: tokens that a query reads, chosen by an indexer; None: it reads all.
    """

    output: RowParallel
    latent: int | None = None
    topk: int | None = None

    def __init__(
        self, comm: Communicator, place: LayerPlace, shares: list[int], scale: float, window: int | None = None
    ) -> None:
        self.comm = comm
        self.index = place.index
        self.pipeline = place.pipeline
        self.shares = shares
        self.scale = scale
        self.window = window
        self.sinks: Tensor | None = None

    def finish(self, q: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> PendingProjection:
        """Computes this rank's part [N, H] of the output from the queries of `project`."""
        return self.output(self.attend(q, cache.layer(self.index, step.cu_q is not None), step, policy).flatten(1))

    def attend(self, q: Tensor, cache: LayerCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Attends with queries [N, Hq_local, D] on all ranks; returns the exact output of own heads [N, heads, D]."""
        sequences, rows = len(step.slots), len(q)
        chunks = 1 if step.cu_q is not None else min(step.chunks, sequences)
        layer = LayerAttention(self.window, self.scale, self.latent, self.sinks, topk=self.topk)
        if len(self.shares) == 1:  # there is nobody to exchange with
            return self.received(policy.attend(q, cache, step, layer).merge()[0], rows)
        if chunks == 1:
            sent = self.sent(policy.attend(q, cache, step, layer), rows)
            return self.received(self.comm.merge_exchange(sent, self.shares), rows)

        each = rows // sequences
        cuts = [share(sequences, chunks, i) for i in range(chunks)]
        rows = len(cuts[0]) * each  # the most of a chunk
        result = q.new_empty(len(q), self.shares[self.comm.kvp_rank], self.sent_width(rows))

        def of(chunk: int) -> slice:
            return slice(cuts[chunk].start * each, cuts[chunk].stop * each)

        def attend(chunk: int) -> PartialAttention:
            # Nothing runs beside the first chunk. Others' parts are still unmerged: each has a workspace of its own.
            beside = replace(layer, reserved_sms=RESERVED_SMS if chunk else 0, chunk=chunk)
            return self.sent(policy.attend(q[of(chunk)], cache, rows_of(step, of(chunk)), beside), rows)

        def exchange(chunk: int, sent: PartialAttention) -> None:
            self.comm.merge_exchange(sent, self.shares, result[of(chunk)])

        self.pipeline.run(chunks, attend, exchange)
        return self.received(result, rows)

    def sent(self, partial: PartialAttention, rows: int) -> PartialAttention:
        """Computes what is exchanged of partial attention, in messages of up to `rows` queries."""
        return partial

    def sent_width(self, rows: int) -> int:
        """Returns the width of what is exchanged per head, in messages of up to `rows` queries."""
        raise NotImplementedError

    def received(self, x: Tensor, rows: int) -> Tensor:
        """Computes the exact output of own heads from what was exchanged, in messages of up to `rows` queries."""
        return x


class Attention(ShardedAttention):
    """Attention with QKV replicated in the kvp group, one exchange, and the output projection over all ranks.

    Query, key and value rows are sharded by TPA only, so the ranks of a kvp group compute the same QKV for the whole
    batch and gather no queries. For a long prompt chunk each rank computes the QKV of a part of the tokens, and the
    group gathers them. After the exchange each rank has the exact output of its own query heads, and holds their
    columns of the output projection. A learned sink is an additional key of its head; it enters the merge once, with
    kvp rank 0.
    """

    def __init__(
        self,
        weights: Weights,
        comm: Communicator,
        layout: HelixLayout,
        spec: AttentionSpec,
        place: LayerPlace,
    ) -> None:
        heads = (comm.rank, spec.q_heads, spec.kv_heads)
        super().__init__(comm, place, layout.head_shares(*heads), spec.scale, spec.window)
        self.spec, name = spec, f"{place.name}.self_attn"

        def rows(part: str, total: int, share: range) -> Rows:
            dim = spec.head_dim
            return Rows(f"{name}.{part}_proj", total * dim, range(share.start * dim, share.stop * dim), spec.qkv_bias)

        q, kv = layout.q_heads(*heads), layout.kv_heads(comm.rank, spec.kv_heads)
        self._q_rows = len(q) * spec.head_dim
        self.qkv = ColumnParallel(
            weights,
            spec.hidden,
            [rows("q", spec.q_heads, q), rows("k", spec.kv_heads, kv), rows("v", spec.kv_heads, kv)],
        )
        self.norms: tuple[Tensor, Tensor, float] | None = None
        if spec.qk_norm:
            gains = weights.parameter(spec.head_dim), weights.parameter(spec.head_dim)
            for gain, part in zip(gains, ("q_norm", "k_norm"), strict=True):
                weights.bind(gain, f"{name}.{part}.weight", (spec.head_dim,))
            self.norms = *gains, spec.norm_eps
        if spec.sinks and layout.kvp_rank(comm.rank) == 0:
            self.sinks = weights.parameter(len(q), dtype=torch.float32)
            weights.bind(self.sinks, f"{name}.sinks", (spec.q_heads,), q)
        elif spec.sinks:
            weights.bind_elsewhere(f"{name}.sinks", (spec.q_heads,))
        self.output = RowParallel(
            weights,
            comm,
            f"{name}.o_proj",
            layout.hidden_columns(*heads, spec.head_dim),
            spec.q_heads * spec.head_dim,
            spec.hidden,
            spec.output_bias,
        )

    def sent_width(self, rows: int) -> int:
        return self.spec.head_dim

    def project(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        """Computes queries [N, Hq, D] of this TPA slice from x [N, H], the same on every rank; appends its KV."""
        mine = cache.layer(self.index, prefill=step.cu_q is not None)
        to = *angles, mine.keys, mine.values, step.new_slots(self.window), self.norms, mine.scales
        if len(self.shares) > 1 and step.overlapped:
            return kv_append(self._gathered(x).unflatten(1, (-1, self.spec.head_dim)), *to)
        return qkv_append(x, self.qkv.weight, self.qkv.bias, *to)

    def queries(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        """Computes only the queries [N, Hq, D] of `project`, without appending keys and without communication.

        It may run concurrently with another layer: it uses the library's product, since our kernels share a workspace.
        """
        mine, rows = cache.layer(self.index), self._q_rows
        bias = None if self.qkv.bias is None else self.qkv.bias[:rows]
        weight = as_tensor(matrix_rows(self.qkv.weight, 0, rows), x.dtype)
        heads = F.linear(x, weight, bias).unflatten(1, (-1, self.spec.head_dim))
        no_heads = mine.keys[:, :, :0], mine.values[:, :, :0]
        of_keys, of_values = (s if s is None else s[:, :0] for s in mine.scales)
        return kv_append(heads, *angles, *no_heads, step.new_slots(self.window), self.norms, (of_keys, of_values))

    def _gathered(self, x: Tensor) -> Tensor:
        """Computes QKV [N, rows], each rank of the kvp group for its run of tokens, and gathers the runs."""
        each = -(-len(x) // len(self.shares))
        begin = self.comm.kvp_rank * each
        own = self.qkv(x[begin : begin + each])
        if len(own) < each:  # padding of the last run: all messages have one size
            own = F.pad(own, (0, 0, 0, each - len(own)))
        return self.comm.gather_in_group(own).flatten(0, 1)[: len(x)]
