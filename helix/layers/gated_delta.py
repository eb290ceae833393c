"""Gated DeltaNet: a layer with a recurrent state per sequence instead of a KV cache (arXiv:2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor

from comm.partial import PartialProjection
from helix.attention.base import AttentionPolicy
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.rotary import Angles
from helix.layers.specs import GatedDeltaSpec
from helix.layers.weights import ModelShard
from helix.worker.kv_cache import KVCache
from helix.worker.step import Step
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.recurrent.gated_delta_prefill import gated_delta_prefill
from kernels.recurrent.gated_delta_step import gated_delta_step


class GatedDeltaNet:
    """Gated DeltaNet with value heads sharded over all ranks, like columns of an FFN: one all-reduce, no exchange."""

    def __init__(self, shard: ModelShard, spec: GatedDeltaSpec, index: int, name: str) -> None:
        self.spec, self.index, name = spec, index, f"{name}.linear_attn"
        weights, values = shard.weights, shard.layout.state_heads(shard.comm.rank, spec.value_heads)
        keys, v = spec.key_heads_of(values), len(values)
        self.channels, self.width = spec.channels(len(keys), v), v * spec.value_dim
        qkvz, ba = _projections(spec, name, keys, values)
        # One GEMM, unless the checkpoint stores the gates' matrices in another format.
        alike = len({weights.formats(f"{rows.name}.weight") for rows in qkvz + ba}) == 1
        self.inputs = [ColumnParallel(weights, spec.hidden, rows) for rows in ([qkvz + ba] if alike else [qkvz, ba])]
        conv = weights.parameter(spec.conv, self.channels)
        begin, total = 0, spec.channels(spec.key_heads, spec.value_heads)
        for run in _channels(spec, keys, values):
            part = conv[:, None, begin : begin + len(run)].permute(2, 1, 0)
            weights.bind(part, f"{name}.conv1d.weight", (total, 1, spec.conv), run)
            begin += len(run)
        a_log, dt_bias = (weights.parameter(v, dtype=torch.float32) for _ in range(2))
        weights.bind(a_log, f"{name}.A_log", (spec.value_heads,), values)
        weights.bind(dt_bias, f"{name}.dt_bias", (spec.value_heads,), values)
        norm = weights.parameter(spec.value_dim)  # the only norm without `weight_offset`
        weights.bind(norm, f"{name}.norm.weight", (spec.value_dim,))
        first = values.start % spec.group
        self.rule = GatedDelta(conv, a_log, dt_bias, norm, spec.norm_eps, len(keys), spec.group, first)
        columns = range(values.start * spec.value_dim, values.stop * spec.value_dim)
        in_features = spec.value_heads * spec.value_dim
        self.output = RowParallel(shard, f"{name}.out_proj", columns, in_features, spec.hidden)

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> DeltaInput:
        """Computes the inputs of this rank's heads from x [N, H], the same on every rank; changes no state."""
        parts = [projection(x) for projection in self.inputs]
        qkv, z, gates = parts[0][:, : self.channels], parts[0][:, self.channels :][:, : self.width], parts[-1]
        return DeltaInput(qkv, gates[:, gates.shape[1] - 2 * len(self.rule.a_log) :], z)

    def finish(self, q: DeltaInput, cache: KVCache, step: Step, policy: AttentionPolicy) -> PartialProjection:
        """Returns this rank's partial sum [N, H] of the output, and updates the states."""
        if not self.width:  # a rank without heads
            return self.output(q.z)
        layer = cache.layer(self.index)
        state = DeltaState(**layer.tensors, accepted=layer.accepted)
        if step.cu_q is None:
            rows = step.slots, step.positions, step.live, step.drafted
            return self.output(gated_delta_step(q, self.rule, state, *rows))
        return self.output(gated_delta_prefill(q, self.rule, state, step.slots, step.positions, step.cu_q))


def _channels(spec: GatedDeltaSpec, keys: range, values: range) -> list[range]:
    # Channels of q, k and v of these heads, in the order of conv1d and in_proj_qkv.
    key_rows, total_key_rows = range(keys.start * spec.key_dim, keys.stop * spec.key_dim), spec.key_heads * spec.key_dim
    return [
        key_rows,
        range(total_key_rows + key_rows.start, total_key_rows + key_rows.stop),
        range(2 * total_key_rows + values.start * spec.value_dim, 2 * total_key_rows + values.stop * spec.value_dim),
    ]


def _projections(spec: GatedDeltaSpec, name: str, keys: range, values: range) -> tuple[list[Rows], list[Rows]]:
    # Rows for q, k, v and z of these heads, and rows for b and a, in this order.
    heads, width = spec.value_heads, spec.value_dim
    if spec.storage == "apart":
        z = range(values.start * width, values.stop * width)
        qkv = _channels(spec, keys, values)
        total = spec.channels(spec.key_heads, heads)
        return (
            [*(Rows(f"{name}.in_proj_qkv", total, run) for run in qkv), Rows(f"{name}.in_proj_z", heads * width, z)],
            [Rows(f"{name}.in_proj_{part}", heads, values) for part in ("b", "a")],
        )
    each = 2 * (spec.key_dim + spec.group * width)  # rows of a key head: q, k, v of its value heads, z of them
    value_offset = 2 * spec.key_dim

    def key_rows(begin: int) -> list[range]:
        return [range(k * each + begin, k * each + begin + spec.key_dim) for k in keys]

    def value_head_rows(each: int, begin: int, width: int) -> list[range]:
        # `width` rows of each value head, from row `begin` of its key head's rows on.
        starts = [v // spec.group * each + begin + v % spec.group * width for v in values]
        return [range(start, start + width) for start in starts]

    qkvz = [
        *key_rows(0),
        *key_rows(spec.key_dim),
        *value_head_rows(each, value_offset, width),
        *value_head_rows(each, value_offset + spec.group * width, width),
    ]
    ba = [*value_head_rows(2 * spec.group, 0, 1), *value_head_rows(2 * spec.group, spec.group, 1)]
    none = [range(0)]  # a rank without heads declares the tensors, too
    return (
        [Rows(f"{name}.in_proj_qkvz", spec.key_heads * each, run) for run in qkvz or none],
        [Rows(f"{name}.in_proj_ba", 2 * heads, run) for run in ba or none],
    )
