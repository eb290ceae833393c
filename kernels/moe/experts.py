"""A rank's routed experts: gather, two grouped GEMMs and the weighted sum, without permuting x.

A pair is a token and one of its experts. Static shapes choose one of seven algorithms; no grid depends on ids:

- few: a few tokens rarely share experts, and latency dominates. One program per pair and some rows of its expert's gate
  and up, streamed through registers; programs of equal experts are neighbors, and all but the first read from L2. For
  down, one program per some rows, looping over the token's experts, so that no reduction is left.
- some: one program per expert and some of its rows. Each finds the expert's pairs in ids itself, which is cheaper than
  a sorting launch, and multiplies 16 pairs at a time on tensor cores; an expert without pairs costs empty programs. A
  third launch adds up each token's outputs in order: sums are deterministic, and each weight row is read once (again if
  an expert has more pairs).
- many: the same, over blocks of pairs sorted by expert beforehand.
- On Hopper, `kernels.moe.experts_sm90` instead of few and some, for a few tokens of wide experts: programs share the
  weights of the active local experts equally, and prefetch them. For e4m3, `experts_scaled_sm90` up to 128
  tokens, then `experts_e4m3_sm90`; for 4 bits, `experts_packed_sm90`; for many pairs of each expert,
  `experts_many_sm90`.

The last kernel stores a token's sum, or sends it to the reducing ranks: phase 1 of `kernels.peers.all_reduce_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.linear import RUN
from kernels.dense.scaled_rows import add_product, finish, inside, product, run_of, stored
from kernels.dense.silu_mul import clamp_of, expert_swiglu
from kernels.moe import experts_e4m3_sm90, experts_many_sm90, experts_packed_sm90, experts_scaled_sm90, experts_sm90
from kernels.moe.pair_order import pair_order
from kernels.moe.reference import moe as reference
from kernels.overlap import pdl_options, sm_count, start_successor, wait_for_predecessor
from kernels.peers.ll_protocol import DTYPES, SumTarget, epoch, send_sum, sum_ll_buffers, sum_shape, sum_words
from kernels.scaled import ScaledMatrix

Strategy = Literal["few", "some", "many"]
MIN_PROGRAMS_PER_SM = 1.8  # with this many, a launch fills the GPU


@triton.jit
def _gated_row(tile, F: tl.constexpr, BLOCK_R: tl.constexpr):
    """Interleaves rows of gate and up, so that one tile holds both of a column; repeats the last column at the end."""
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    return tl.minimum(r // 2, F - 1) + r % 2 * F


@triton.jit
def _activation(y, clamp_at, CLAMP: tl.constexpr):
    gate, up = tl.split(y)
    return expert_swiglu(gate, up, clamp_at, CLAMP)


@triton.jit
def _gate_up_few_kernel(
    x, ids, weights, gate_up, scales, bias, h, x_n, first, clamp_at,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, H: tl.constexpr, F: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BEGIN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    BIAS: tl.constexpr, CLAMP: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    row = _gated_row(tile, F, BLOCK_R)
    wait_for_predecessor(PDL)
    if EARLY:  # down's programs replace finished ones, and read ids
        start_successor(PDL)
    expert = tl.load(ids + pair) - first
    if (expert >= 0) & (expert < EXPERTS):
        k = tl.arange(0, BLOCK_K)
        x_at = x + (pair // TOP_K) * x_n + k
        w_at = gate_up + expert.to(tl.int64) * (2 * F * H) + row[:, None] * H + k[None, :]
        acc = tl.zeros([BLOCK_R, BLOCK_K // RUN], tl.float32)
        for begin in tl.range(0, H, BLOCK_K, num_stages=STAGES):
            inside = k < H - begin
            ws = tl.load(w_at + begin, mask=inside[None, :], other=0.0).to(tl.float32)
            xs = tl.load(x_at + begin, mask=inside, other=0.0).to(tl.float32)
            products = tl.reshape(xs[None, :] * ws, [BLOCK_R, BLOCK_K // RUN, RUN])
            sums = tl.sum(products, 2)
            if GROUPS > 0:
                column = begin + tl.arange(0, BLOCK_K // RUN) * RUN
                scale_at = scales + expert.to(tl.int64) * (GROUPS * 2 * F) + row[:, None]
                group = (BEGIN + column) // GROUP
                sums *= tl.load(scale_at + (group * (2 * F))[None, :], mask=(column < H)[None, :], other=0.0)
            acc += sums
        y = tl.sum(acc, 1)
        if BIAS:
            y += tl.load(bias + expert * (2 * F) + row).to(tl.float32)
        y = _activation(tl.reshape(y, [BLOCK_R // 2, 2]), clamp_at, CLAMP) * tl.load(weights + pair)
        f = tile * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
        tl.store(h + pair * F + f, y, mask=f < F)
    if not EARLY:
        start_successor(PDL)


@triton.jit
def _words_of(n, first, dtype: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Locates the words of BLOCK values of row n from `first` on: LL pieces, indices in them, validity."""
    VALUES: tl.constexpr = 1 if tl.float32 == dtype else 2
    column = first // VALUES + tl.arange(0, BLOCK // VALUES)
    return n * ((H // VALUES + SIZE - 1) // SIZE) + column // SIZE, column % SIZE, column < H // VALUES


@triton.jit
def _down_few_kernel(
    h, ids, weights, down, scales, bias, addend, out, peers, epochs, first, rank,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, H: tl.constexpr, F: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BEGIN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, RUN: tl.constexpr, BIAS: tl.constexpr, ADDEND: tl.constexpr,
    RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, TWO_SHOT: tl.constexpr,
    EARLY: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.minimum(r, H - 1)
    if RANKS > 0:
        tag = epoch(epochs)
        piece, w, in_row = _words_of(n, tl.program_id(1) * BLOCK_R, h.dtype.element_ty, H, BLOCK_R, SIZE)
        ll_buffers = sum_ll_buffers(peers, piece, RANKS, TWO_SHOT)
    # Ids and weights are older than the predecessor: wait only for h.
    slot = tl.arange(0, BLOCK_S)
    expert = tl.load(ids + n * TOP_K + slot, mask=slot < TOP_K, other=-1) - first
    local = (expert >= 0) & (expert < EXPERTS) & (slot < TOP_K)
    index = tl.where(local, tl.cumsum(local.to(tl.int32), 0), 0) - 1
    count = tl.sum(local.to(tl.int32), 0)
    if count >= 0:  # always true; keeps the compiler from moving the wait above the loads of ids
        wait_for_predecessor(PDL)
    if EARLY:
        start_successor(PDL)
    k = tl.arange(0, BLOCK_K)
    chunks: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_R, BLOCK_K // RUN], tl.float32)
    for i in tl.range(0, count * chunks, num_stages=STAGES):
        here = index == i // chunks
        e = tl.sum(tl.where(here, expert, 0), 0)
        pair = n * TOP_K + tl.sum(tl.where(here, slot, 0), 0)
        begin = i % chunks * BLOCK_K
        f = begin + k
        w_at = down + e.to(tl.int64) * (H * F) + row[:, None] * F + f[None, :]
        ws = tl.load(w_at, mask=(f < F)[None, :], other=0.0).to(tl.float32)
        hs = tl.load(h + pair * F + f, mask=f < F, other=0.0).to(tl.float32)
        sums = tl.sum(tl.reshape(hs[None, :] * ws, [BLOCK_R, BLOCK_K // RUN, RUN]), 2)
        if GROUPS > 0:
            column = begin + tl.arange(0, BLOCK_K // RUN) * RUN
            scale_at = scales + e.to(tl.int64) * (GROUPS * H) + row[:, None]
            group = (BEGIN + column) // GROUP
            sums *= tl.load(scale_at + (group * H)[None, :], mask=(column < F)[None, :], other=0.0)
        acc += sums
    if not EARLY:
        start_successor(PDL)
    y = tl.sum(acc, 1)
    if BIAS:
        weight = tl.load(weights + n * TOP_K + slot, mask=local, other=0.0)
        biases = tl.load(bias + expert[:, None] * H + row[None, :], mask=local[:, None], other=0.0).to(tl.float32)
        y += tl.sum(weight[:, None] * biases, 0)
    if ADDEND:
        y += tl.load(addend + n * H + row).to(tl.float32)
    if RANKS > 0:
        words = sum_words(y, h.dtype.element_ty)
        send_sum(ll_buffers, words, piece, w, tag, rank, in_row, RANKS, PIECES, SIZE)
    else:
        tl.store(out + n * H + r, y, mask=r < H)


@triton.jit
def _expert_pairs(
    block, ids, bounds, block_ends, P, first, shares,
    EXPERTS: tl.constexpr, SHARED_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """Finds a program's local expert and its pairs: a block of sorted pairs, or all of an expert's.

    Unsorted, `shares` programs divide the many pairs of each of the first SHARED_EXPERTS experts. Returns the expert
    (EXPERTS past the last block), its pair range and, unsorted, the running count of its pairs.
    """
    if SORTED:
        e = tl.arange(0, BLOCK_E)
        ends = tl.load(block_ends + e, mask=e < EXPERTS, other=0x7FFFFFFF)
        expert = tl.sum((ends <= block).to(tl.int32), 0)  # EXPERTS, which has no pairs, in a block past the last
        before = tl.max(tl.where(ends <= block, ends, 0), 0)
        begin = tl.load(bounds + expert) + (block - before) * BLOCK_N
        stop = tl.minimum(tl.load(bounds + tl.minimum(expert + 1, EXPERTS)), begin + BLOCK_N)
        return expert, begin, stop, ends
    else:
        p = tl.arange(0, BLOCK_P)
        expert, share, last = block, 0, 0
        if SHARED_EXPERTS:
            many = block < SHARED_EXPERTS * shares
            expert = tl.where(many, block // shares, block - SHARED_EXPERTS * (shares - 1))
            share, last = tl.where(many, block % shares, 0), tl.where(many, shares - 1, 0)
        mine = (tl.load(ids + p, mask=p < P, other=first - 1) == first + expert).to(tl.int32)
        begin, stop = share * BLOCK_N, tl.sum(mine, 0)
        if SHARED_EXPERTS:
            stop = tl.where(share < last, tl.minimum(stop, begin + BLOCK_N), stop)
        return expert, begin, stop, tl.cumsum(mine, 0)


@triton.jit
def _pairs_at(lane, stop, counts, order, SORTED: tl.constexpr):
    """Returns the pairs at indices `lane` [BLOCK_N] of the order, or of the expert's pairs; 0 from `stop` on."""
    if SORTED:
        pair = tl.load(order + lane, mask=lane < stop, other=0.0)
    else:
        # The i-th pair of the expert comes after all pairs whose running count is at most i.
        pair = tl.sum((counts[:, None] <= lane[None, :]).to(tl.int32), 0)
    return tl.where(lane < stop, pair, 0).to(tl.int64)


@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["shares"])  # change from chunk to chunk
def _gate_up_kernel(
    x, ids, weights, gate_up, scales, zeros, row_scales, bias, h, order, bounds, block_ends, x_n, P, first, shares,
    clamp_at, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, SHARED_EXPERTS: tl.constexpr, H: tl.constexpr,
    F: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    BIAS: tl.constexpr, CLAMP: tl.constexpr, SORTED: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr,
    ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = _gated_row(tile, F, BLOCK_R)
    wait_for_predecessor(PDL)
    if EARLY:  # as above; down's programs look for their pairs
        start_successor(PDL)
    expert, begin, stop, counts = _expert_pairs(
        tl.program_id(1),
        ids,
        bounds,
        block_ends,
        P,
        first,
        shares,
        EXPERTS,
        SHARED_EXPERTS,
        BLOCK_P,
        BLOCK_N,
        BLOCK_E,
        SORTED,
    )
    for at in range(begin, stop, BLOCK_N):
        lane = at + tl.arange(0, BLOCK_N)
        valid = lane < stop
        pair = _pairs_at(lane, stop, counts, order, SORTED)
        PACK: tl.constexpr = 8 if gate_up.dtype.element_ty == tl.int32 else 1
        rows_at = gate_up + expert.to(tl.int64) * (2 * F * H // PACK) + row * (H // PACK)
        scales_row = expert.to(tl.int64) * (GROUPS * 2 * F) + row
        scales_at = None if scales is None else scales + scales_row
        zeros_at = None if zeros is None else zeros + scales_row
        row_scales_at = None if row_scales is None else row_scales + expert.to(tl.int64) * (2 * F) + row
        y = product(
            rows_at, scales_at, zeros_at, row_scales_at, x + pair // TOP_K * x_n, valid, H, 2 * F, GROUP, GROUPS, BEGIN,
            BLOCK_R, BLOCK_N, BLOCK_K, STAGES, ROUNDS,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias + expert * (2 * F) + row).to(tl.float32)[:, None]
        y = tl.permute(tl.reshape(y, [BLOCK_R // 2, 2, BLOCK_N]), [0, 2, 1])
        weight = tl.load(weights + pair, mask=valid, other=0.0)
        y = _activation(y, clamp_at, CLAMP) * weight[None, :]
        f = tile * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
        tl.store(h + (pair * F)[None, :] + f[:, None], y, mask=(f < F)[:, None] & valid[None, :])
    if not EARLY:
        start_successor(PDL)


@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["shares"])  # change from chunk to chunk
def _down_kernel(
    h, ids, weights, down, scales, zeros, row_scales, bias, outputs, order, bounds, block_ends, P, first, shares,
    EXPERTS: tl.constexpr, SHARED_EXPERTS: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    TILES: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, STAGES: tl.constexpr, ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * TILES
    tiles = tl.minimum(TILES, (H + BLOCK_R - 1) // BLOCK_R - tile)
    chunks: tl.constexpr = (max(BEGIN + F, 1) + BLOCK_K - 1) // BLOCK_K  # without columns, there may be a bias
    PACK: tl.constexpr = 8 if down.dtype.element_ty == tl.int32 else 1
    k = tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_K // PACK)
    # The pairs depend only on data older than the predecessor.
    expert, begin, stop, counts = _expert_pairs(
        tl.program_id(1),
        ids,
        bounds,
        block_ends,
        P,
        first,
        shares,
        EXPERTS,
        SHARED_EXPERTS,
        BLOCK_P,
        BLOCK_N,
        BLOCK_E,
        SORTED,
    )
    for at in range(begin, stop, BLOCK_N):
        lane = at + tl.arange(0, BLOCK_N)
        valid = lane < stop
        pair = _pairs_at(lane, stop, counts, order, SORTED)
        wait_for_predecessor(PDL)  # after the first time, this returns at once
        start_successor(PDL)
        if BIAS:
            weight = tl.load(weights + pair, mask=valid, other=0.0)
        acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        for i in tl.range(0, tiles * chunks, num_stages=STAGES):
            r = (tile + i // chunks) * BLOCK_R + tl.arange(0, BLOCK_R)
            row = tl.minimum(r, H - 1)
            index = i % chunks * BLOCK_K  # from the start of the first group
            column = index - BEGIN + k
            word = (index - BEGIN) // PACK + c
            w_at = down + expert.to(tl.int64) * (H * F // PACK) + (row * (F // PACK))[:, None] + word[None, :]
            w = tl.load(w_at, mask=inside(word, 0, F // PACK, BEGIN)[None, :], other=0.0)
            h_at = h + (pair * F)[None, :] + column[:, None]
            hs = tl.load(h_at, mask=inside(column, 0, F, BEGIN)[:, None] & valid[None, :], other=0.0)
            scales_row = expert.to(tl.int64) * (GROUPS * H) + row
            scales_at = None if scales is None else scales + scales_row
            zeros_at = None if zeros is None else zeros + scales_row
            row_scales_at = None if row_scales is None else row_scales + expert.to(tl.int64) * H + row
            acc = add_product(acc, w, hs, scales_at, zeros_at, index // GROUP, H, GROUP, GROUPS, ROUNDS)
            if i % chunks == chunks - 1:
                acc = finish(acc, scales_at, row_scales_at, GROUPS)
                if BIAS:
                    acc += weight[None, :] * tl.load(bias + expert * H + row).to(tl.float32)[:, None]
                tl.store(outputs + (pair * H)[None, :] + r[:, None], acc, mask=(r < H)[:, None] & valid[None, :])
                acc = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    wait_for_predecessor(PDL)  # also in programs without pairs
    start_successor(PDL)


@triton.jit
def _sum_kernel(
    outputs, inverse_order, ids, addend, out, peers, epochs, first, rank,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, ADDEND: tl.constexpr,
    RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, TWO_SHOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(TOP_K):
        expert = tl.load(ids + n * TOP_K + s) - first
        width = tl.where((expert >= 0) & (expert < EXPERTS), H, 0)  # unwritten outputs may be NaN
        pair = n * TOP_K + s
        if inverse_order is not None:
            pair = tl.load(inverse_order + pair).to(tl.int64)
        acc += tl.load(outputs + pair * H + c, mask=c < width, other=0.0).to(tl.float32)
    if ADDEND:
        acc += tl.load(addend + n * H + c, mask=c < H).to(tl.float32)
    if RANKS > 0:
        dtype: tl.constexpr = outputs.dtype.element_ty
        piece, w, in_row = _words_of(n, tl.program_id(1) * BLOCK, dtype, H, BLOCK, SIZE)
        ll_buffers = sum_ll_buffers(peers, piece, RANKS, TWO_SHOT)
        send_sum(ll_buffers, sum_words(acc, dtype), piece, w, epoch(epochs), rank, in_row, RANKS, PIECES, SIZE)
    else:
        tl.store(out + n * H + c, acc, mask=c < H)


@dataclass(frozen=True)
class RoutedExperts:
    """Partial sum over a token's local experts of weight * down(act(gate_up x)), to be all-reduced.

    `act` is silu(gate) * up. With `clamp_at` = c, up is clamped to [-c, c], and `act` is min(silu(gate), c) * up for
    activation swiglustep (Step-3.5), and g * sigmoid(1.702 g) * (up + 1) with g = min(gate, c) for swigluoai (gpt-oss).
    Sums are fp32; the weighted activations, and for more than a few tokens each expert's output, are rounded to x's
    dtype. Deterministic. No shape depends on ids, so one captured graph serves them all.

    Attributes:
        x: [N, H], last dim contiguous.
        ids: [N, k] int32, contiguous; ids outside [first, first + E_local) are skipped, others differ within a token.
        weights: [N, k] fp32, contiguous.
        gate_up: [E_local, 2 F, H] in x's dtype, contiguous; F rows of gate, then F of up. Or, for x in bf16 or fp32, a
            scaled matrix with contiguous data and scales.
        down: [E_local, H, F], like `gate_up`.
        first: global id of local expert 0.
        gate_up_bias: [E_local, 2 F] in x's dtype, contiguous, or None.
        down_bias: [E_local, H] in x's dtype, contiguous, or None; added once per expert, before its weight.
        clamp_at: bound of the clamps, or None; `activation` is read with a bound only.
        addend: [N, H] in x's dtype, contiguous, or None; added before the sum is rounded.
        total_experts: experts of all ranks, default local only; affects only the choice of tiles.
        shared_count: the first `shared_count` local experts receive every token.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor | ScaledMatrix
    down: torch.Tensor | ScaledMatrix
    first: int
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    clamp_at: float | None = None
    activation: Literal["swigluoai", "swiglustep"] = "swigluoai"
    addend: torch.Tensor | None = None
    total_experts: int | None = None
    shared_count: int = 0

    @property
    def _empty(self) -> bool:
        nothing = 0 in (*self.x.shape, len(self.down), self.ids.shape[1])
        return nothing or (self.down.shape[2] == 0 and self.down_bias is None)

    def compute(self) -> torch.Tensor:
        """Computes the sums [N, H] in x's dtype; `addend`, or zeros, for a token without local experts."""
        x, addend = self.x, self.addend
        if not dispatch.on_gpu(x):
            given = self.gate_up, self.down, self.first, self.gate_up_bias, self.down_bias
            return reference(x, self.ids, self.weights, *given, self.clamp_at, self.activation, addend)
        if self._empty:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if addend is None else addend.clone()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(out)
        return out

    def can_push(self, two_shot: bool) -> bool:
        x = self.x
        return dispatch.on_gpu(x) and not self._empty and x.dtype in DTYPES and x.shape[1] * x.itemsize % 4 == 0

    def push(self, sums: SumTarget) -> None:
        self._launch(sums)

    def _launch(self, out: torch.Tensor | SumTarget) -> None:
        x, ids, weights, gate_up, down, first = self.x, self.ids, self.weights, self.gate_up, self.down, self.first
        (N, H), top_k = x.shape, ids.shape[1]
        E, _, F = down.shape
        gate_tensors, gate_groups = stored(gate_up)
        down_tensors, down_groups = stored(down)
        data = gate_tensors[0]
        assert gate_up.shape == (E, 2 * F, H) and data.dtype == down_tensors[0].dtype and x.stride(1) == 1
        assert data.dtype == x.dtype or (isinstance(gate_up, ScaledMatrix) and x.dtype != torch.float16)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.shape == weights.shape
        assert self.addend is None or (self.addend.shape == x.shape and self.addend.dtype == x.dtype)
        others = (ids, weights, self.gate_up_bias, self.down_bias, self.addend)
        assert all(t is None or t.is_contiguous() for t in (*gate_tensors, *down_tensors, *others))
        P, total = N * top_k, self.total_experts or E
        bound, clamp = clamp_of(self.clamp_at, self.activation)
        given = x, ids, weights, gate_up, down, first, self.gate_up_bias, self.down_bias, bound, clamp
        is_scaled = x.is_cuda and experts_scaled_sm90.fits(x, P, gate_up, down)
        if is_scaled or (x.is_cuda and experts_packed_sm90.fits(x, P, total, gate_up, down)):
            h, outputs = (torch.empty(P, width, dtype=x.dtype, device=x.device) for width in (F, H))
            variant = experts_scaled_sm90 if is_scaled else experts_packed_sm90
            variant.launch(*given, h, outputs, experts_scaled_sm90.columns_of(P, total))
            self._sum(outputs, out)
            return
        has_epilogue = any(given is not None for given in (self.gate_up_bias, self.down_bias, self.clamp_at))
        if x.is_cuda and not has_epilogue and experts_e4m3_sm90.fits(x, P, total, gate_up, down):
            assert isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix)
            block = experts_e4m3_sm90.block_of(P, total)
            pairs = pair_order(ids, first, E, block)
            outputs = experts_e4m3_sm90.launch(x, weights, gate_up, down, pairs, block)
            self._sum(outputs, out, pairs.inverse_order)
            return
        if x.is_cuda and experts_many_sm90.fits(x, P, total, gate_up, down):
            assert isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix)
            pairs = pair_order(ids, first, E, experts_many_sm90.PAIRS.value)
            outputs = torch.empty(P, H, dtype=x.dtype, device=x.device)
            last = self.gate_up_bias, self.down_bias, bound, clamp, outputs
            experts_many_sm90.launch(x, weights, gate_up, down, pairs, *last)
            self._sum(outputs, out, pairs.inverse_order)
            return
        h = torch.empty(P, F, dtype=x.dtype, device=x.device)
        if x.is_cuda and experts_sm90.fits(x, gate_up, down):
            experts_sm90.launch(*given, self.addend, h, out)
            return
        sums = out if isinstance(out, SumTarget) else None
        to = (out, None, None) if sums is None else (None, sums.peers, sums.count)
        rank = sums.rank if sums else 0
        ll_buffers = sum_shape(sums)
        shape = dict(EXPERTS=E, H=H, F=F, **pdl_options(x))
        epilogue = dict(BIAS=self.gate_up_bias is not None, CLAMP=clamp)
        summand = dict(ADDEND=self.addend is not None, **ll_buffers)
        is_packed = isinstance(gate_up, ScaledMatrix) and gate_up.packed
        strategy = choose_strategy(N, top_k, E, is_packed)
        if strategy == "few":
            tile, down_tile = few_tiles(N, F, run_of(gate_up, RUN), run_of(down, RUN))
            _gate_up_few_kernel[P, triton.cdiv(2 * F, tile["BLOCK_R"])](
                x, ids, weights, *gate_tensors[:2], self.gate_up_bias, h, x.stride(0), first, bound,
                TOP_K=top_k, **epilogue, **shape, **gate_groups, **tile,
            )  # fmt: skip
            _down_few_kernel[N, triton.cdiv(H, down_tile["BLOCK_R"])](
                h, ids, weights, *down_tensors[:2], self.down_bias, self.addend, *to, first, rank,
                TOP_K=top_k, BLOCK_S=triton.next_power_of_2(top_k), BIAS=self.down_bias is not None,
                **summand, **shape, **down_groups, **down_tile,
            )  # fmt: skip
            return

        num_active = E * (1 - (1 - 1 / total) ** P)  # expected number of active experts, if uniform
        tile, down_tile = tiles_of(strategy, P, E, F, H, x.dtype, num_active / sm_count(x.device), data.dtype)
        is_sorted = strategy == "many"
        plan: tuple[torch.Tensor | None, ...] = (None, None, None)
        if is_sorted:
            pairs = pair_order(ids, first, E, tile["BLOCK_N"])
            plan = pairs.order, pairs.bounds, pairs.block_ends
        shares = triton.cdiv(N, tile["BLOCK_N"])
        if is_sorted:
            blocks = P // tile["BLOCK_N"] + E  # upper bound: all full blocks, and the last of each expert
        else:
            blocks = E + self.shared_count * (shares - 1)
        searched = 1 if is_sorted else triton.next_power_of_2(P)
        find = dict(
            SHARED_EXPERTS=self.shared_count, BLOCK_P=searched, BLOCK_E=triton.next_power_of_2(E), SORTED=is_sorted
        )
        outputs = torch.empty(P, H, dtype=x.dtype, device=x.device)
        _gate_up_kernel[triton.cdiv(2 * F, tile["BLOCK_R"]), blocks](
            x, ids, weights, *gate_tensors, self.gate_up_bias, h, *plan, x.stride(0), P, first, shares,
            bound, TOP_K=top_k, **epilogue, **shape, **gate_groups, **find, **tile,
        )  # fmt: skip
        _down_kernel[triton.cdiv(H, down_tile["BLOCK_R"] * down_tile["TILES"]), blocks](
            h, ids, weights, *down_tensors, self.down_bias, outputs, *plan, P, first, shares,
            BIAS=self.down_bias is not None, **shape, **down_groups, **find, **down_tile,
        )  # fmt: skip
        self._sum(outputs, out)

    def _sum(self, outputs: torch.Tensor, out: torch.Tensor | SumTarget, indices: torch.Tensor | None = None) -> None:
        """Sums the outputs [N k, H] of each token's local experts; pair i is at `indices[i]` if given."""
        (N, H), E = self.x.shape, len(self.down)
        sums = out if isinstance(out, SumTarget) else None
        to = (out, None, None) if sums is None else (None, sums.peers, sums.count)
        _sum_kernel[N, triton.cdiv(H, 1024)](
            outputs, indices, self.ids, self.addend, *to, self.first, sums.rank if sums else 0, TOP_K=self.ids.shape[1],
            EXPERTS=E, H=H, BLOCK=1024, ADDEND=self.addend is not None, num_warps=4, **sum_shape(sums),
            **pdl_options(self.x),
        )  # fmt: skip


def choose_strategy(N: int, top_k: int, E: int, is_packed: bool = False) -> Strategy:
    """Chooses the algorithm for N tokens over E local experts, by H200 timings.

    "few" wins unless most programs meet another rank's expert, or one that a neighbor has already read. It does not
    read packed weights.
    """
    pairs = N * top_k
    if not is_packed and (N <= 2 or (N <= 8 and 2 * pairs <= E)):
        return "few"
    return "some" if pairs <= 512 or N <= 64 else "many"  # each program of `some` scans all pairs


def few_tiles(N: int, F: int, run: int = RUN, down_run: int = RUN) -> tuple[dict[str, int], dict[str, int]]:
    """Returns launch options of both GEMMs for a few tokens, by H200 timings."""
    few_tokens = N <= 2
    warps, rows, down_warps = (2, 4, 2) if few_tokens else (1, 8, 1)
    gate_up = dict(BLOCK_R=4, BLOCK_K=warps * 32 * run, RUN=run, STAGES=3 if few_tokens else 1, num_warps=warps)
    block_k = min(down_warps * 32 * down_run, max(2 * down_run, triton.next_power_of_2(F)))
    down = dict(BLOCK_R=rows, BLOCK_K=block_k, RUN=down_run, STAGES=3, num_warps=down_warps)
    early = dict(EARLY=few_tokens)  # successors of more programs would crowd onto some SMs
    return gate_up | early, down | early


def tiles_of(
    strategy: Strategy,
    P: int,
    E: int,
    F: int,
    H: int,
    dtype: torch.dtype,
    num_active: float,
    weights: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns launch options of both GEMMs of P pairs for "some" and "many"; `num_active`: active experts per SM.

    They are bound by reading weights, and for many pairs by compute. For "some", a program of down takes up to 200 KB
    of rows, so that fewer programs look for pairs, as long as MIN_PROGRAMS_PER_SM remain. With that many, down starts
    early; fewer would crowd onto the SMs that are free first. Steps over quantized weights are at most 128 columns, the
    smallest group of e4m3.
    """
    if dtype == torch.float32:
        tile = dict(BLOCK_R=32, BLOCK_N=16, BLOCK_K=32, STAGES=2, ROUNDS=False, num_warps=4)
        return tile | dict(EARLY=False), tile | dict(TILES=2)
    if strategy == "some":
        tile = dict(
            BLOCK_R=64,
            BLOCK_N=16,
            BLOCK_K=128,
            STAGES=5 if weights in (torch.float8_e4m3fn, torch.int32) else 3,
            num_warps=4,
        )
        tile |= dict(ROUNDS=False)
        rows = 64
        while rows < H and 2 * rows * F <= 100 << 10 and num_active * triton.cdiv(H, 2 * rows) >= MIN_PROGRAMS_PER_SM:
            rows *= 2
        early = num_active * triton.cdiv(H, rows) >= MIN_PROGRAMS_PER_SM
        return tile | dict(EARLY=early), tile | dict(TILES=rows // 64)
    if weights == torch.float8_e4m3fn and P >= 128 * E:  # convert each weight for as many pairs as fit
        tile = dict(BLOCK_R=128, BLOCK_N=256, BLOCK_K=64, STAGES=3, ROUNDS=True, num_warps=8)
    elif P < 128 * E or weights in (
        torch.float8_e4m3fn,
        torch.int32,
    ):  # two programs per SM: one converts while the other multiplies
        tile = dict(BLOCK_R=128, BLOCK_N=64, BLOCK_K=64, STAGES=4, ROUNDS=False, num_warps=4)
    else:
        tile = dict(BLOCK_R=128, BLOCK_N=128, BLOCK_K=64, STAGES=4, ROUNDS=False, num_warps=8)
    return tile | dict(EARLY=False), tile | dict(TILES=1)
