"""Merges attention over shared prefixes with attention over each sequence's own keys, both before their merges."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.reference import merge_prefixes as reference
from kernels.attention.split_kv import (
    PartialAttention,
    UnmergedAttention,
    item_of,
    load_merged_states,
    merge_tile,
    schedule,
)
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor


@triton.jit
def _merge_prefixes_kernel(
    lo, hi, sinks, out, lse, part, part_lse, lo_b, lo_t, hi_b, hi_t, out_b, out_t, out_h, lse_b, lse_t, lse_h,
    at_lo, at_hi, at_out, at_lse, at_part, at_part_lse,
    at_lo_b, at_lo_t, at_hi_b, at_hi_t, at_out_b, at_out_t, at_out_h, at_lse_b, at_lse_t, at_lse_h,
    merged, merged_lse, B, programs, sequences, tiles, at_programs, T: tl.constexpr, AT_T: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_B: tl.constexpr, AT_BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, AT_BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AT_BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, AT_ROWS: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The bounds are older than the predecessor: compute both schedules while it runs.
    ITEMS: tl.constexpr = HEADS * ((T * GROUP + BLOCK_M - 1) // BLOCK_M)
    AT_ITEMS: tl.constexpr = HEADS * ((AT_T * GROUP + AT_BLOCK_M - 1) // AT_BLOCK_M)
    _, _, lengths, ends, run = schedule(lo, hi, lo_b, lo_t, hi_b, hi_t, B, T, ITEMS, programs, BLOCK_B, BLOCK_N)
    _, _, at_lengths, at_ends, at_run = schedule(
        at_lo, at_hi, at_lo_b, at_lo_t, at_hi_b, at_hi_t, sequences, AT_T, AT_ITEMS, at_programs, AT_BLOCK_B,
        AT_BLOCK_N,
    )  # fmt: skip
    n = tl.program_id(0) // (HEADS * GROUP)
    head = tl.program_id(0) % (HEADS * GROUP)
    i, t = n // T, n % T
    item_begin, length, row = item_of(i, t, head, lengths, ends, T, HEADS, GROUP, BLOCK_B, BLOCK_M)
    first = item_begin // run
    parts = (item_begin + length - 1) // run - first + 1
    if parts + at_run >= 0:  # always true; keeps the wait after the schedules
        wait_for_predecessor(PDL)
    start_successor(PDL)
    d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    b = i.to(tl.int64)
    acc, log = load_merged_states(
        out + b * out_b + t * out_t + head * out_h, lse + b * lse_b + t * lse_t + head * lse_h, part, part_lse,
        sinks + head if SINKS else sinks, item_begin, run, first, parts, row, d, True, D, ROWS, PARTS, SLICE, SINKS,
    )  # fmt: skip
    peak = tl.maximum(log, -1.0e38)  # finite: -inf minus -inf would be NaN
    total = tl.exp(log - peak)
    acc *= total
    for prefix in range(0, sequences, tiles):
        i, t = prefix + n // AT_T, n % AT_T
        reads = tl.load(at_lo + i * at_lo_b + t * at_lo_t) < tl.load(at_hi + i * at_hi_b + t * at_hi_t)
        item_begin, length, row = item_of(i, t, head, at_lengths, at_ends, AT_T, HEADS, GROUP, AT_BLOCK_B, AT_BLOCK_M)
        first = item_begin // at_run
        parts = tl.where(reads, (item_begin + length - 1) // at_run - first + 1, 0)
        b = i.to(tl.int64)
        values, log = load_merged_states(
            at_out + b * at_out_b + t * at_out_t + head * at_out_h,
            at_lse + b * at_lse_b + t * at_lse_t + head * at_lse_h, at_part, at_part_lse,
            at_lse, item_begin, at_run, first, parts, row, d, reads, D, AT_ROWS, PARTS, SLICE, False,
        )  # fmt: skip
        new_peak = tl.maximum(peak, log)
        rescale, weight = tl.exp(peak - new_peak), tl.exp(log - new_peak)
        acc = acc * rescale + values * weight
        total = total * rescale + weight
        peak = new_peak
    empty = total == 0.0
    to = tl.program_id(0).to(tl.int64)
    tl.store(merged + to * D + d, acc / tl.where(empty, 1.0, total), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(merged_lse + to, tl.where(empty, float("-inf"), peak + tl.log(total)))


def merge_prefixes(own: PartialAttention, prefixes: PartialAttention, count: int) -> PartialAttention:
    """Merges attention of N queries over their own keys and over `count` shared prefixes, in fp32 and in this order.

    Args:
        own: queries [B, T], N of them, perhaps with sinks.
        prefixes: queries [count * tiles, each], in another lane: for each prefix all N, and padding. Queries without
            keys are not read.

    Returns:
        Output [N, Hq, D] in the dtype of `own`, and LSE [N, Hq] fp32.
    """
    if not (isinstance(own, UnmergedAttention) and isinstance(prefixes, UnmergedAttention)):
        return PartialAttention(*reference(*own.merge_states(), prefixes.out, prefixes.lse, count))
    (B, T, Hq, D), (sequences, each) = own.out.shape, prefixes.out.shape[:2]
    merged, merged_lse = own.out.new_empty(B * T, Hq, D), own.lse.new_empty(B * T, Hq)
    # Prefixes have more splits.
    parts, width, warps = merge_tile(B * T * Hq, D, own.part.itemsize, prefixes.items, prefixes.programs)
    assert own.heads == prefixes.heads and prefixes.sinks is None
    _merge_prefixes_kernel[B * T * Hq, triton.cdiv(D, width)](
        own.lo, own.hi, own.sinks, own.out, own.lse, own.part, own.part_lse,
        *own.lo.stride(), *own.hi.stride(), *own.out.stride()[:3], *own.lse.stride(),
        prefixes.lo, prefixes.hi, prefixes.out, prefixes.lse, prefixes.part, prefixes.part_lse,
        *prefixes.lo.stride(), *prefixes.hi.stride(), *prefixes.out.stride()[:3], *prefixes.lse.stride(),
        merged, merged_lse, B, own.programs, sequences, sequences // count, prefixes.programs,
        T=T, AT_T=each, HEADS=own.heads, GROUP=Hq // own.heads, D=D,
        BLOCK_B=triton.next_power_of_2(B), AT_BLOCK_B=triton.next_power_of_2(sequences),
        BLOCK_M=own.block_m, AT_BLOCK_M=prefixes.block_m, BLOCK_N=own.block_n, AT_BLOCK_N=prefixes.block_n,
        ROWS=own.part.shape[1], AT_ROWS=prefixes.part.shape[1], PARTS=parts, SLICE=width,
        SINKS=own.sinks is not None, num_warps=warps, **pdl_options(merged),
    )  # fmt: skip
    return PartialAttention(merged, merged_lse)
