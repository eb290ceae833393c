"""The attention phase of a layer (arXiv:2507.07120, figure 4, top)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from kernels.dense.sigmoid_mul import sigmoid_mul
from kernels.scaled import as_tensor, matrix_rows


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of one layer's attention in the checkpoint.

    Attributes:
        gated: whether the output of each query head is gated by a sigmoid; each head of q_proj is then followed by its
            gate.
        rotated: first dimensions of a head that RoPE rotates; None: all.
        zero_centered: whether the checkpoint has the norms' weights without their 1.
    """

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
    gated: bool = False
    rotated: int | None = None
    zero_centered: bool = False

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
        return self.hidden * self.head_dim * ((2 + self.gated) * self.q_heads + 2 * self.kv_heads)

    @property
    def multiplications(self) -> int:
        """Number of multiplications of a token's queries with one key and value, over all heads."""
        return self.q_heads * 2 * self.head_dim

    @property
    def runs(self) -> tuple[range, ...]:
        """Ranges of a query or key head's dimensions, in the order of our rows.

        Kernels rotate dimension d against d + D / 2. With fewer rotated dimensions, each half of a head has a half of
        those first, and then a half of the others, whose angles are 0.
        """
        if self.rotated in (None, self.head_dim):
            return (range(self.head_dim),)
        half, middle = self.rotated // 2, (self.rotated + self.head_dim) // 2
        return range(half), range(self.rotated, middle), range(half, self.rotated), range(middle, self.head_dim)

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
        gates = 2 * len(layout.o_heads(rank, self.q_heads, self.kv_heads)) * self.gated
        return copies * rows + (2 * (q + lanes) + gates) * self.head_dim

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
    """

    output: RowParallel
    latent: int | None = None

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

    def attend(self, q: Tensor, cache: LayerCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Attends with queries [N, Hq_local, D] on all ranks; returns the exact output of own heads [N, heads, D]."""
        sequences, rows = len(step.slots), len(q)
        chunks = 1 if step.cu_q is not None else min(step.chunks, sequences)
        layer = LayerAttention(self.window, self.scale, self.latent, self.sinks)
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


class Queries(NamedTuple):
    """Queries [N, Hq, D] of a TPA slice, and the gates [N, heads * D] of own heads; None if they are not gated."""

    heads: Tensor
    gate: Tensor | None


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

        def rows(part: str, total: int, share: range, runs: Sequence[range], each: int = spec.head_dim) -> list[Rows]:
            """Lists runs of each head of `share`, which has `each` rows; whole heads are one run."""
            parts = [range(head * each + run.start, head * each + run.stop) for head in share for run in runs]
            if [*map(len, runs)] == [each]:
                parts = [range(share.start * each, share.stop * each)]
            return [Rows(f"{name}.{part}_proj", total * each, run, spec.qkv_bias) for run in parts]

        q, kv = layout.q_heads(*heads), layout.kv_heads(comm.rank, spec.kv_heads)
        whole, of_query = [range(spec.head_dim)], (1 + spec.gated) * spec.head_dim
        self._q_rows = len(q) * spec.head_dim
        self.qkv = ColumnParallel(
            weights,
            spec.hidden,
            [
                *rows("q", spec.q_heads, q, spec.runs, of_query),
                *rows("k", spec.kv_heads, kv, spec.runs),
                *rows("v", spec.kv_heads, kv, whole),
            ],
        )
        self.gate: ColumnParallel | None = None
        if spec.gated:
            gates = [range(spec.head_dim, of_query)]
            own = layout.o_heads(*heads)
            self.gate = ColumnParallel(weights, spec.hidden, rows("q", spec.q_heads, own, gates, of_query))
        self.norms: tuple[Tensor, Tensor, float] | None = None
        if spec.qk_norm:
            q_gain, k_gain = (
                weights.gain(spec.head_dim, f"{name}.{part}_norm.weight", spec.zero_centered, spec.runs)
                for part in ("q", "k")
            )
            self.norms = q_gain, k_gain, spec.norm_eps
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

    def project(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Queries:
        """Computes queries of this TPA slice from x [N, H], the same on every rank; appends its KV."""
        gate = None if self.gate is None else self.gate(x)
        return Queries(self._queries_and_append(x, angles, cache, step), gate)

    def finish(self, q: Queries, cache: KVCache, step: Step, policy: AttentionPolicy) -> PendingProjection:
        """Computes this rank's part [N, H] of the output from the queries of `project`."""
        found = self.attend(q.heads, cache.layer(self.index, step.cu_q is not None), step, policy).flatten(1)
        return self.output(found if q.gate is None else sigmoid_mul(found, q.gate))

    def _queries_and_append(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
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
