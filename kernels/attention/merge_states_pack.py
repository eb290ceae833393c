"""Merges a rank's partial states directly into the send buffers of the all-to-all, one message per rank of the group.

Prefill has nothing to merge: one launch copies outputs and LSEs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.reference import merge_states_pack as reference
from kernels.attention.split_kv import (
    PartialAttention,
    UnmergedAttention,
    item_of,
    load_merged_states,
    merge_tile,
    schedule,
)
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

PACKED = 4096  # elements copied per program


@triton.jit
def _merge_states_pack_kernel(
    lo, hi, sinks, out, lse, part, part_lse, send_out, send_lse, starts,
    lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h, to_k, to_n, to_h, to_lse_k, to_lse_n, to_lse_h,
    B, programs, lanes, T: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SLICE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SLICE - 1) // SLICE
    tiles_m: tl.constexpr = (T * GROUP + BLOCK_M - 1) // BLOCK_M
    piece = tl.program_id(0) // SLICES  # (query, lane): the lane-th head of each destination
    n = piece // lanes
    lane = piece % lanes
    to = tl.program_id(1)
    # The bounds are older than the predecessor: compute the schedule while it runs.
    _, _, tiles, ends, run = schedule(lo, hi, lo_b, lo_t, hi_b, hi_t, B, T, HEADS * tiles_m, programs, BLOCK_B, BLOCK_N)
    head = tl.load(starts + to) + lane
    live = head < tl.load(starts + to + 1)
    head = tl.minimum(head, HEADS * GROUP - 1)
    i = n // T
    t = n % T
    item_begin, length, row = item_of(i, t, head, tiles, ends, T, HEADS, GROUP, BLOCK_B, BLOCK_M)
    first = item_begin // run
    parts = tl.where(live, (item_begin + length - 1) // run - first + 1, 0)
    if parts >= 0:  # always true; keeps the wait after the schedule
        wait_for_predecessor(PDL)
    start_successor(PDL)
    s = tl.program_id(0) % SLICES
    d = s * SLICE + tl.arange(0, SLICE)
    b = i.to(tl.int64)
    values, log = load_merged_states(
        out + b * out_b + t * out_t + head * out_h, lse + b * lse_b + t * lse_t + head * lse_h, part, part_lse,
        sinks + head if SINKS else sinks, item_begin, run, first, parts, row, d, live, D, ROWS, PARTS, SLICE, SINKS,
    )  # fmt: skip
    k = to.to(tl.int64)
    tl.store(send_out + k * to_k + n.to(tl.int64) * to_n + lane * to_h + d, values, mask=d < D)
    if s == 0:
        tl.store(send_lse + k * to_lse_k + n.to(tl.int64) * to_lse_n + lane * to_lse_h, log)


@triton.jit
def _pack_states_kernel(
    out, lse, send_out, send_lse, starts,
    out_n, out_h, out_d, lse_n, lse_h, to_k, to_n, to_h, to_lse_k, to_lse_n, to_lse_h, lanes, blocks,
    D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = tl.program_id(1).to(tl.int64)
    lane = block * BLOCK_L + tl.arange(0, BLOCK_L)
    head = tl.load(starts + k) + lane
    live = head < tl.load(starts + k + 1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    wait_for_predecessor(PDL)
    start_successor(PDL)
    values = tl.load(
        out + n * out_n + head[:, None] * out_h + (d * out_d)[None, :], mask=live[:, None] & inside[None, :], other=0.0
    )
    log = tl.load(lse + n * lse_n + head * lse_h, mask=live, other=-float("inf"))
    there = (lane < lanes)[:, None] & inside[None, :]
    tl.store(send_out + k * to_k + n * to_n + lane[:, None] * to_h + d[None, :], values, mask=there)
    tl.store(send_lse + k * to_lse_k + n * to_lse_n + lane * to_lse_h, log, mask=lane < lanes)


def pack_states(
    out: torch.Tensor, lse: torch.Tensor, send_out: torch.Tensor, send_lse: torch.Tensor, starts: torch.Tensor
) -> None:
    """Copies merged states into messages; a program handles one query and some heads of a destination."""
    K, N, lanes, D = send_out.shape
    assert send_out.stride(3) == 1 and send_lse.shape == (K, N, lanes)
    block_d = triton.next_power_of_2(D)
    block_l = min(triton.next_power_of_2(lanes), max(1, PACKED // block_d))
    blocks = triton.cdiv(lanes, block_l)
    _pack_states_kernel[N * blocks, K](
        out, lse, send_out, send_lse, starts, *out.stride(), *lse.stride(), *send_out.stride()[:3], *send_lse.stride(),
        lanes, blocks, D=D, BLOCK_L=block_l, BLOCK_D=block_d, num_warps=4, **pdl_options(send_out),
    )  # fmt: skip


def merge_states_pack(
    parts: PartialAttention, send_out: torch.Tensor, send_lse: torch.Tensor, shares: Sequence[int], starts: torch.Tensor
) -> None:
    """Merges `parts` and writes each destination's heads into its message; padding lanes read as an empty shard.

    Args:
        parts: attention of N queries, in their order.
        send_out: [K, N, lanes, D] in the dtype of `parts`, written; last dim contiguous.
        send_lse: [K, N, lanes] fp32, written.
        shares: heads per destination, contiguous runs in this order.
        starts: [K + 1] int32, cumulative `shares`.

    Source:
        Helix Parallelism (arXiv:2507.07120), section 2.1.2.
    """
    if not dispatch.on_gpu(parts.out):
        reference(*parts.merge_states(), send_out, send_lse, shares)
        return
    if not isinstance(parts, UnmergedAttention):
        if send_out.numel():
            pack_states(*parts.merge_states(), send_out, send_lse, starts)
        return
    B, T, Hq, D = parts.out.shape
    K, N, lanes, _ = send_out.shape
    assert (
        B * T == N and send_out.stride(3) == 1 and send_lse.shape == (K, N, lanes) and send_lse.dtype == torch.float32
    )
    part = parts.part
    at_once, width, warps = merge_tile(N * lanes * K, D, part.itemsize, parts.items, parts.programs)
    _merge_states_pack_kernel[N * lanes * triton.cdiv(D, width), K](
        parts.lo, parts.hi, parts.sinks, parts.out, parts.lse, part, parts.part_lse, send_out, send_lse, starts,
        *parts.lo.stride(), *parts.hi.stride(), *parts.out.stride()[:3], *parts.lse.stride(),
        *send_out.stride()[:3], *send_lse.stride(), B, parts.programs, lanes,
        T=T, HEADS=parts.heads, GROUP=Hq // parts.heads, D=D, BLOCK_B=triton.next_power_of_2(B),
        BLOCK_M=parts.block_m, BLOCK_N=parts.block_n, ROWS=part.shape[1], PARTS=at_once, SLICE=width,
        SINKS=parts.sinks is not None, num_warps=warps, **pdl_options(send_out),
    )  # fmt: skip
