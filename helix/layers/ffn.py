"""FFN of a layer, on all ranks (arXiv:2507.07120, figure 4, bottom): dense, or a mixture of experts (MoE).

A dense FFN is tensor parallel (TP) over all ranks, whatever the attention grid. Routed experts use the TPF x EP grid.

The paper (section 2.2) routes tokens to the ranks that hold their experts, all-reduces within an expert group (TPF),
all-gathers over EP and adds the groups' results locally. Here every rank already has every token: the output
projection's all-reduce leaves the whole [N, H] on each, and the router is replicated with bitwise equal input, so all
ranks agree on the routing without communication, and dispatch is a local gather. The combine then simplifies: with
part[e, t] the partial sum of rank (ep = e, tpf = t),

    all-gather over e of (all-reduce over t of part[e, t]), summed over e locally  =  sum over e, t of part[e, t]

which is one all-reduce over all ranks, of N x H numbers instead of EP times as many; the next norm does it, as after
every other layer. Shared experts are TP over all ranks, and added before that sum. With ep = 1 the routed experts are
TP over all ranks, too, so shared experts become routed ones that every token selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from comm.partial import PartialProjection, PartialSum
from helix.layers.linear import ColumnParallel, RowParallel, Rows
from helix.layers.specs import MLPSpec, MoESpec
from helix.layers.weights import ModelShard, Weights
from kernels.dense.gate_mul import gate_mul
from kernels.dense.silu_mul import silu_mul
from kernels.moe.experts import RoutedExperts
from kernels.moe.router import route
from kernels.scaled import matrix_rows


class GatedMLP:
    """FFN W_down (f(W_gate x) * W_up x) with activation f; each rank has its inner columns and gives a partial sum."""

    def __init__(self, shard: ModelShard, hidden: int, spec: MLPSpec, name: str) -> None:
        width, bias, self.spec = spec.width, spec.bias, spec
        block = shard.weights.column_block(f"{name}.down_proj.weight")
        columns = shard.layout.ffn_columns(shard.comm.rank, width, block)
        rows = [Rows(f"{name}.{part}_proj", width, columns, bias) for part in ("gate", "up")]
        if spec.fused:
            ups = range(width + columns.start, width + columns.stop)
            rows = [Rows(f"{name}.gate_up_proj", 2 * width, part, bias) for part in (columns, ups)]
        self.gate_up = ColumnParallel(shard.weights, hidden, rows)
        self.down = RowParallel(shard, f"{name}.down_proj", columns, width, hidden, bias)

    def __call__(self, x: Tensor, live: Tensor | None = None, weight: Tensor | None = None) -> PartialProjection:
        """Returns this rank's partial sum [N, H] for x [N, H], times the sigmoid of `weight` [N, 1].

        `live` is for `MoE`: a dense FFN also computes padding rows.
        """
        spec = self.spec
        if spec.activation == "gelu_tanh":
            gate, up = self.gate_up(x).chunk(2, 1)
            inner = F.gelu(gate, approximate="tanh").mul_(up)
        elif spec.clamp_at is None:
            inner = self.gate_up(x, gated=True)
        else:
            inner = silu_mul(self.gate_up(x), spec.clamp_at)
        return self.down(inner if weight is None else gate_mul(inner, weight))


class MoE:
    """Mixture of experts: each rank has its columns (TPF) of its experts (EP) and gives a partial sum.

    A rank may have no experts, and then gives zeros.
    """

    def __init__(self, shard: ModelShard, hidden: int, spec: MoESpec, layer: str) -> None:
        weights, layout, rank = shard.weights, shard.layout, shard.comm.rank
        self.spec, name = spec, f"{layer}.{spec.block}"
        self.experts = layout.experts(rank, spec.experts)
        down = {"by_matrix": f"{spec.matrices[2]}.weight", "apart": f"experts.0.{spec.matrices[2]}.weight"}
        block = weights.column_block(f"{name}.{down.get(spec.storage, 'experts.down_proj')}")
        self.columns = layout.expert_columns(rank, spec.width, block)
        router = Rows(f"{name}.{spec.router}", spec.experts, range(spec.experts), spec.router_bias)
        gate = [Rows(f"{name}.{spec.shared_gate}", 1, range(1))] if spec.shared_gate is not None else []
        self.router = ColumnParallel(weights, hidden, [router, *gate])
        self.score_correction_bias: Tensor | None = None
        if spec.score_correction_bias is not None:
            self.score_correction_bias = weights.parameter(spec.experts, dtype=torch.float32)
            weights.bind(self.score_correction_bias, f"{name}.{spec.score_correction_bias}", (spec.experts,))

        plain = spec.storage == "apart" and spec.shared_gate is None
        plain = plain and spec.clamp_at is None and spec.shared_clamp_at is None
        count = spec.shared_width // spec.width if spec.shared_width % spec.width == 0 else 0
        like_routed = layout.ep == 1 and plain and self._shared_alike(weights, layer, count)
        self.shared_count = count if like_routed else 0  # experts that every token selects
        local, width = len(self.experts) + self.shared_count * bool(self.experts), len(self.columns)
        names = self._names(weights, hidden, layer)
        self.gate_up = weights.matrix(local, 2 * width, hidden, names=names[0])  # gate's rows, then up's
        self.down = weights.matrix(local, hidden, width, names=names[1], columns=self.columns, total=spec.width)
        self.gate_up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        if spec.storage == "apart":
            self._bind_separate(weights, hidden, layer)
        elif spec.storage == "by_matrix":
            self._bind_by_matrix(weights, hidden, name)
        else:
            self._bind_stacked(weights, hidden, f"{name}.experts")
        self.shared: GatedMLP | None = None
        if spec.shared_width and not self.shared_count:
            shared = MLPSpec(spec.shared_width, clamp_at=spec.shared_clamp_at)
            self.shared = GatedMLP(shard, hidden, shared, f"{layer}.{spec.shared}")

    def _shared_alike(self, weights: Weights, layer: str, count: int) -> bool:
        # Whether shared experts are stored as routed ones, and each of them begins at the same offset in a scale group.
        blocks = f"{layer}.{self.spec.block}.experts.0", f"{layer}.{self.spec.shared}"
        routed, shared = ([weights.formats(f"{block}.{m}.weight") for m in self.spec.matrices] for block in blocks)
        down = routed[2]
        return shared == routed and (count < 2 or down is None or self.spec.width % down.group == 0)

    def _names(self, weights: Weights, hidden: int, layer: str) -> tuple[list[str], list[str]]:
        # Checkpoint tensors of gate and up, and of down; none unless both stay quantized.
        spec, name = self.spec, f"{layer}.{self.spec.block}"
        if spec.storage == "apart":
            blocks = [f"{name}.experts.{e}" for e in self.experts]
            blocks += [f"{layer}.{spec.shared}"] * (self.shared_count > 0)
        elif spec.storage == "by_matrix":
            blocks = [name]
        if spec.storage in ("apart", "by_matrix"):
            gate_up, down = (
                [f"{block}.{matrix}.weight" for block in blocks for matrix in matrices]
                for matrices in (spec.matrices[:2], spec.matrices[2:])
            )
        elif spec.storage in ("stacked", "transposed"):
            return [], []
        else:
            gate_up, down = ([f"{name}.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
        formats = (
            weights.matrix_format(gate_up, range(hidden), hidden),
            weights.matrix_format(down, self.columns, spec.width),
        )
        return (gate_up, down) if None not in formats else ([], [])

    def _bind_separate(self, weights: Weights, hidden: int, layer: str) -> None:
        # Three matrices per expert; shared experts are slices of one expert's matrices.
        spec = self.spec
        assert not spec.expert_bias, "no family has it"
        for i in range(self.shared_count):
            local_index = i if self.experts else None
            shared, begin = f"{layer}.{spec.shared}", i * spec.width
            self._bind_expert(weights, hidden, shared, local_index, spec.shared_width, begin)
        for e in range(spec.experts):
            local_index = self.shared_count + e - self.experts.start if e in self.experts else None
            self._bind_expert(weights, hidden, f"{layer}.{spec.block}.experts.{e}", local_index, spec.width, 0)

    def _bind_expert(
        self, weights: Weights, hidden: int, name: str, local_index: int | None, total: int, begin: int
    ) -> None:
        # Binds columns from `begin` of `total` as expert `local_index`; None: another rank holds the expert.
        gate, up, down = (f"{name}.{matrix}.weight" for matrix in self.spec.matrices)
        if local_index is None:
            for matrix, shape in ((gate, (total, hidden)), (up, (total, hidden)), (down, (hidden, total))):
                weights.bind(None, matrix, shape)
            return
        width = len(self.columns)
        columns = range(begin + self.columns.start, begin + self.columns.stop)
        weights.bind(matrix_rows(self.gate_up[local_index], 0, width), gate, (total, hidden), columns)
        weights.bind(matrix_rows(self.gate_up[local_index], width, 2 * width), up, (total, hidden), columns)
        weights.bind(self.down[local_index], down, (hidden, total), range(hidden), columns)

    def _bind_by_matrix(self, weights: Weights, hidden: int, name: str) -> None:
        # A tensor of all experts for each of gate, up and down. A rank without experts declares the tensors, too.
        spec, width = self.spec, len(self.columns)
        inner, outer = (spec.experts, spec.width, hidden), (spec.experts, hidden, spec.width)
        parts = (
            (matrix_rows(self.gate_up, 0, width), inner, (self.columns, range(hidden))),
            (matrix_rows(self.gate_up, width, 2 * width), inner, (self.columns, range(hidden))),
            (self.down, outer, (range(hidden), self.columns)),
        )
        for matrix, (target, shape, ranges) in zip(spec.matrices, parts, strict=True):
            for i, expert in enumerate([range(e, e + 1) for e in self.experts] or [range(0)]):
                weights.bind(target[i : i + len(expert)], f"{name}.{matrix}.weight", shape, expert, *ranges)

    def _bind_stacked(self, weights: Weights, hidden: int, name: str) -> None:
        # Tensors that stack all experts; gate and up rows are interleaved, or gate comes first.
        spec, columns, width = self.spec, self.columns, len(self.columns)
        gate, up = (range(2 * columns.start + odd, 2 * columns.stop + odd, 2) for odd in (0, 1))
        if spec.storage in ("joined", "transposed"):
            gate, up = columns, range(spec.width + columns.start, spec.width + columns.stop)
        # One expert at a time, since unpacking takes memory. A rank without experts declares the tensors, too.
        each = [range(e, e + 1) for e in self.experts] or [range(0)]
        both = (matrix_rows(self.gate_up, 0, width), gate), (matrix_rows(self.gate_up, width, 2 * width), up)
        parts = [("gate_up_proj", rows, (2 * spec.width, hidden), (part, range(hidden))) for rows, part in both]
        parts.append(("down_proj", self.down, (hidden, spec.width), (range(hidden), columns)))
        for part, target, shape, ranges in parts:
            if spec.storage in ("stacked", "transposed"):
                assert isinstance(target, Tensor), "stacked tensors do not stay quantized"
                target, shape, ranges = target.mT, shape[::-1], ranges[::-1]
            for i, expert in enumerate(each):
                here, whole = target[i : i + len(expert)], (spec.experts, *shape)
                weights.bind(here, f"{name}.{part}", whole, expert, *ranges)
        if spec.expert_bias:
            self.gate_up_bias = weights.parameter(len(self.experts), 2 * width)
            shape = spec.experts, 2 * spec.width
            weights.bind(self.gate_up_bias[:, :width], f"{name}.gate_up_proj_bias", shape, self.experts, gate)
            weights.bind(self.gate_up_bias[:, width:], f"{name}.gate_up_proj_bias", shape, self.experts, up)
            if columns.start == 0:  # on one of the ranks that share an expert, since they are summed
                self.down_bias = weights.parameter(len(self.experts), hidden)
            weights.bind(self.down_bias, f"{name}.down_proj_bias", (spec.experts, hidden), self.experts)

    def __call__(self, x: Tensor, live: Tensor | None = None) -> RoutedExperts:
        """Routes x [N, H], the same on every rank; returns this rank's partial sum [N, H], not computed yet.

        Args:
            live: [N], False for padding rows, which use no expert; None: there are none.
        """
        spec = self.spec
        logits, weight = self.router(x, exact=spec.exact_router).tensor_split([spec.experts], 1)  # [N, E], [N, 1 or 0]
        ids, scores = route(
            logits,
            spec.top_k,
            scoring=spec.scoring,
            bias=self.score_correction_bias,
            groups=spec.groups,
            top_groups=spec.top_groups,
            group_score=spec.group_score,
            normalize=spec.normalize,
            scale=spec.scale,
            shared_count=self.shared_count,
            live=live,
        )  # [N, k + always] both
        shared: Tensor | None = None
        if self.shared is not None:
            shared = self.shared(x, weight=weight if weight.shape[1] else None).compute()
        return RoutedExperts(
            x,
            ids,
            scores,
            self.gate_up,
            self.down,
            self.experts.start,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            clamp_at=spec.clamp_at,
            activation=spec.activation,
            addend=shared,
            total_experts=spec.experts + self.shared_count,
            shared_count=self.shared_count,
        )


def make_ffn(shard: ModelShard, hidden: int, spec: MLPSpec | MoESpec, layer: str) -> GatedMLP | MoE:
    """Builds this rank's shard of an FFN; `layer` is the layer's name in the checkpoint."""
    if isinstance(spec, MoESpec):
        return MoE(shard, hidden, spec, layer)
    return GatedMLP(shard, hidden, spec, f"{layer}.mlp")


def dp_ffn(ffn: Callable[[Tensor], PartialSum], x: Tensor, counts: Sequence[int], comm: Communicator) -> Tensor:
    """Computes an FFN in mode dp: all-gathers the ranks' rows, reduce-scatters the sums.

    Messages are padded to the most rows of any rank.

    Args:
        x: [n, H], this rank's rows.
        counts: rows of each rank; empty: n on all of them. A rank with 0 rows passes one padding row.

    Returns:
        [n, H], summed over ranks.
    """
    max_rows = max(counts, default=len(x))
    rows = comm.all_gather(F.pad(x, (0, 0, 0, max_rows - len(x))) if len(x) < max_rows else x)  # [W, most, H]
    if len({*counts}) < 2:
        parts = ffn(rows.flatten(0, 1)).compute().view(rows.shape)
    else:
        computed = ffn(torch.cat([rank_rows[:n] for rank_rows, n in zip(rows, counts, strict=True)])).compute()
        parts = torch.zeros_like(rows)
        for rank_rows, part in zip(parts, computed.split(list(counts)), strict=True):
            rank_rows[: len(part)] = part
    return comm.reduce_scatter(parts)[: len(x)]
