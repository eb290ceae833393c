"""Kernels for drafts and block selections at a fixed rate.

A draft's outcome depends on seed, row and position only, so redrafting does not change it. Each
of the `topk` entries of a block table steps through its own range of the sequence's blocks; steps renew
the entries round robin. Neither keeps state between steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.reference import DRAFT, RECOVER
from kernels.tokens.reference import uniform as reference_uniform
from kernels.tokens.uniform import uniform

FATE = RECOVER + 1  # the random stream of draft outcomes
CHANCE_UNITS = 1 << 30  # probability 1: a kernel's argument is an integer or rounded to fp32
SHARES = 1024  # a share of blocks is rounded to multiples of 1 / SHARES
STRIDE = 7919  # a prime: this stride visits every block of a range before any block again

_DRAFT, _FATE, _CHANCE_UNITS = tl.constexpr(DRAFT), tl.constexpr(FATE), tl.constexpr(CHANCE_UNITS)
_SHARES, _STRIDE = tl.constexpr(SHARES), tl.constexpr(STRIDE)


@triton.jit
def _replay_kernel(lengths, tokens, outcome, seed, chance, vocab, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    j = tl.arange(0, BLOCK)
    slot = (j * 0 + b).to(tl.int64)
    seeds = slot * 0 + seed
    position = tl.load(lengths + b) + 1 + j
    token = (uniform(seeds, position, slot * 0 + _DRAFT, slot) * vocab).to(tl.int64)
    accepted = uniform(seeds, position, slot * 0 + _FATE, slot) * _CHANCE_UNITS < chance
    at = b * N + j
    tl.store(tokens + at, token, mask=j < N)
    tl.store(outcome + at, tl.where(accepted, token, (token + 1) % vocab), mask=j < N)


def synthetic_drafts(lengths: Tensor, drafts: int, acceptance: float, seed: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Makes random drafts, and the sampled tokens that accept them with a set probability.

    Args:
        lengths: position of the last token of each row [B] int64, contiguous; the drafts follow it.
        drafts: drafts per row, at least 1.
        acceptance: chance of each draft, in [0, 1], rounded to units of 2^-30.
        vocab: token ids are below it; at least 2.

    Returns:
        Drafts and outcomes, [B, drafts] int64 each.
    """
    if not dispatch.on_gpu(lengths):
        return reference_drafts(lengths, drafts, acceptance, seed, vocab)
    assert lengths.dtype == torch.int64 and lengths.is_contiguous()
    B = len(lengths)
    tokens, outcome = torch.empty(2, B, drafts, dtype=torch.int64, device=lengths.device)
    _replay_kernel[(B,)](
        lengths, tokens, outcome, seed, round(acceptance * CHANCE_UNITS), vocab, drafts,
        BLOCK=triton.next_power_of_2(drafts), num_warps=1, **pdl_options(lengths),
    )  # fmt: skip
    return tokens, outcome


def reference_drafts(lengths: Tensor, drafts: int, acceptance: float, seed: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Plain torch reference of `synthetic_drafts`."""
    slot = torch.arange(len(lengths), device=lengths.device)[:, None]
    position = lengths[:, None] + 1 + torch.arange(drafts, device=lengths.device)
    seeds = torch.full_like(position, seed)
    tokens = (reference_uniform(seeds, position, DRAFT, slot) * vocab).long()
    accepted = reference_uniform(seeds, position, FATE, slot) * CHANCE_UNITS < round(acceptance * CHANCE_UNITS)
    return tokens, torch.where(accepted, tokens, (tokens + 1) % vocab)


@triton.jit
def _repeat_blocks_kernel(
    table, block_table, firsts, lasts, positions, table_b, width, topk, renewed, T, HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(firsts + n)
    each = (tl.load(lasts + n) - begin) // topk
    if each > 0:
        lane = tl.arange(0, BLOCK_K)
        rotations = (tl.load(positions + n) * renewed // _SHARES + topk - 1 - lane) // topk
        column = begin + lane * each + (rotations + lane + head) * _STRIDE % each
        page = tl.load(block_table + n // T * table_b + column, mask=lane < topk, other=0)
        tl.store(table + (n * HEADS + head) * width + begin + lane, page, mask=lane < topk)


def repeat_blocks(
    table: Tensor, block_table: Tensor, first: Tensor, last: Tensor, positions: Tensor, topk: int, repeat: float
) -> None:
    """Overwrites selected pages so that consecutive positions have a share `repeat` of them in common.

    Pages ascend and are distinct. A renewed page does not recur before the rest of its range.

    Args:
        table: [N, Hkv, width] int32, contiguous, the result of `kernels.sparse.select_blocks`.
        block_table: [B, max_pages] int32, rows contiguous.
        first, last: [N] int32, contiguous: candidates are `[first, last)` of a row of `block_table`; with fewer
            than `topk` candidates nothing is overwritten.
        positions: [N] int64, contiguous.
        topk: at least 1.
        repeat: share from 0 to 1, an average over steps.
    """
    if not dispatch.on_gpu(table):
        reference_blocks(table, block_table, first, last, positions, topk, repeat)
        return
    N, heads, width = table.shape
    assert table.is_contiguous() and block_table.stride(1) == 1
    assert all(t.is_contiguous() for t in (first, last, positions))
    _repeat_blocks_kernel[N, heads](
        table, block_table, first, last, positions, block_table.stride(0), width, topk,
        round((1 - repeat) * topk * SHARES), N // len(block_table), HEADS=heads,
        BLOCK_K=triton.next_power_of_2(topk), num_warps=1, **pdl_options(table),
    )  # fmt: skip


def reference_blocks(
    table: Tensor, block_table: Tensor, first: Tensor, last: Tensor, positions: Tensor, topk: int, repeat: float
) -> None:
    """Plain torch reference of `repeat_blocks`."""
    renewed = round((1 - repeat) * topk * SHARES)
    lane = torch.arange(topk, device=table.device)
    head = torch.arange(table.shape[1], device=table.device)[:, None]
    for n in range(len(table)):
        begin, each = int(first[n]), (int(last[n]) - int(first[n])) // topk
        if each == 0:
            continue  # all candidates are selected, or nearly so
        rotations = (int(positions[n]) * renewed // SHARES + topk - 1 - lane) // topk
        column = begin + lane * each + (rotations + lane + head) * STRIDE % each
        table[n, :, begin : begin + topk] = block_table[n * len(block_table) // len(table)][column]
