"""Argmax of a row of scores, on this rank and then over all ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.reference import best_of_rank as reference_of_rank
from kernels.tokens.reference import best_of_ranks as reference_of_ranks

BLOCK = 1024  # scores per program and iteration
PROGRAMS = 792  # over all rows: six per SM, all resident
PAIRS = 512  # per program and iteration


@triton.jit
def _best_of_rank_kernel(logits, pairs, logits_b, first, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)  # a large batch has more rows than axis 1 allows
    wait_for_predecessor(PDL)
    start_successor(PDL)
    at = logits + row.to(tl.int64) * logits_b
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    column = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for begin in range(part * BLOCK, V, tl.num_programs(1) * BLOCK):
        v = begin + tl.arange(0, BLOCK)
        logit = tl.load(at + v, mask=v < V, other=float("-inf"))
        broken = tl.where(logit != logit, 1, broken)
        column = tl.where(logit > top, v, column)  # ties: keep the first
        top = tl.maximum(top, logit)
    store_best(pairs + 2 * (part * tl.num_programs(0) + row), top, column, first, tl.max(broken, 0) > 0)


@triton.jit
def store_best(to, top, column, first, broken):
    """Stores the largest of scores [n] and the smallest id among its columns, as a pair; NaN if broken."""
    best = tl.max(top, 0)
    token = tl.min(tl.where(top == best, column, 0x7FFFFFFF), 0).to(tl.int64) + first
    tl.store(to, tl.where(broken, float("nan"), best.to(tl.float64)))
    tl.store(to + 1, token.to(tl.float64))


@triton.jit
def best_of_pairs(pairs, row, inside, R, N, WIDTH: tl.constexpr):
    """Finds the best of N pairs of each row [n]: its score, where NaN wins, and its smallest id, -1 if not finite."""
    top = tl.full(row.shape, float("-inf"), tl.float64)
    found = tl.full(row.shape, float("inf"), tl.float64)
    broken = tl.zeros(row.shape, tl.int32)
    for begin in range(0, N, WIDTH):
        n = begin + tl.arange(0, WIDTH)[:, None]
        at = pairs + (n.to(tl.int64) * R + row[None, :]) * 2
        there = (n < N) & inside[None, :]
        score = tl.load(at, mask=there, other=float("-inf"))
        token = tl.load(at + 1, mask=there, other=float("inf"))
        broken = tl.maximum(broken, tl.max((score != score).to(tl.int32), 0))
        best = tl.max(score, 0)
        best_id = tl.min(tl.where(score == best[None, :], token, float("inf")), 0)
        found = tl.where(best > top, best_id, tl.where(best == top, tl.minimum(found, best_id), found))
        top = tl.maximum(top, best)
    top = tl.where(broken > 0, float("nan"), top)
    return top, tl.where(tl.abs(top) < float("inf"), found, -1.0).to(tl.int64)


@triton.jit
def _best_of_ranks_kernel(pairs, best, tokens, R, N, WIDTH: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    top, token = best_of_pairs(pairs, row, row < R, R, N, WIDTH)
    tl.store(best + row, top)
    tl.store(tokens + row, token)


def width_of(pairs: int, rows: int) -> int:
    """Returns how many pairs of each of `rows` rows a program loads at once."""
    return min(triton.next_power_of_2(pairs), max(1, PAIRS // rows))


def slices_of(rows: int) -> int:
    """Returns how many programs share a row's columns: the same on every rank, so that ranks gather equal shapes."""
    return min(max(PROGRAMS // max(rows, 1), 4), 64)


def best_of_rank(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Finds each row's largest score and its smallest token id, as pairs [N, B, 2] fp64; NaN is the largest.

    N is the same on all ranks; `best_of_ranks` finds the best pair.

    Args:
        scores: [B, V] fp32, V at least 1; last dim contiguous.
        first: token id of the first column.
    """
    if not dispatch.on_gpu(scores) or len(scores) == 0:
        return reference_of_rank(scores, first)
    B, V = scores.shape
    assert scores.dtype == torch.float32 and (V < 2 or scores.stride(1) == 1)
    pairs = torch.empty(slices_of(B), B, 2, dtype=torch.float64, device=scores.device)
    _best_of_rank_kernel[B, len(pairs)](
        scores, pairs, scores.stride(0), first, V, BLOCK=BLOCK, num_warps=4, **pdl_options(scores)
    )
    return pairs


def best_of_ranks(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the largest score [B] fp64 of pairs [N, B, 2] of all ranks, and its smallest token id [B] int64.

    The id is -1 if that score is not finite.
    """
    if not dispatch.on_gpu(pairs) or pairs.shape[1] == 0:
        return reference_of_ranks(pairs)
    N, B, _ = pairs.shape
    best = torch.empty(B, dtype=torch.float64, device=pairs.device)
    tokens = torch.empty(B, dtype=torch.int64, device=pairs.device)
    assert pairs.is_contiguous()
    _best_of_ranks_kernel[(B,)](pairs, best, tokens, B, N, WIDTH=width_of(N, 1), num_warps=1, **pdl_options(pairs))
    return best, tokens
