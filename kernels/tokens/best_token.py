"""The best token of a row of scores, on this rank and then over all ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.reference.best_token import best_of_rank as reference_of_rank
from kernels.reference.best_token import best_of_ranks as reference_of_ranks

BLOCK = 2048  # scores per program


@triton.jit
def _best_of_blocks_kernel(scores, values, places, scores_b, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + b * scores_b + v, mask=v < V, other=float("-inf"))
    # NaN wins, as in torch, so that it surfaces.
    broken = tl.max((score != score).to(tl.int32), 0) > 0
    best = tl.max(score, 0)
    place = tl.min(tl.where((score == best) & (v < V), v, 0x7FFFFFFF), 0)
    tl.store(values + b * BLOCKS + tl.program_id(1), tl.where(broken, float("nan"), best))
    tl.store(places + b * BLOCKS + tl.program_id(1), place)


@triton.jit
def _best_of_rank_kernel(values, places, out, first, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    value = tl.load(values + b * BLOCKS + i, mask=i < BLOCKS, other=float("-inf"))
    place = tl.load(places + b * BLOCKS + i, mask=i < BLOCKS, other=0x7FFFFFFF)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    best = tl.max(value, 0)
    place = tl.min(tl.where(value == best, place, 0x7FFFFFFF), 0)
    tl.store(out + 2 * b, tl.where(broken, float("nan"), best).to(tl.float64))
    tl.store(out + 2 * b + 1, (place + first).to(tl.float64))


@triton.jit
def _best_of_ranks_kernel(pairs, best, tokens, B, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, WIDTH)
    value = tl.load(pairs + (r * B + b) * 2, mask=r < RANKS, other=float("-inf"))
    token = tl.load(pairs + (r * B + b) * 2 + 1, mask=r < RANKS, other=float("inf"))
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    top = tl.where(broken, float("nan"), tl.max(value, 0))
    found = tl.min(tl.where(value == top, token, float("inf")), 0)
    finite = (top == top) & (tl.abs(top) != float("inf"))
    tl.store(best + b, top)
    tl.store(tokens + b, tl.where(finite, found, -1.0).to(tl.int64))


def best_of_rank(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Finds each row's largest score and its smallest token id, as pairs [B, 2] fp64; NaN is the largest.

    Args:
        scores: [B, V] fp32 or fp64, V at least 1; last dim contiguous.
        first: token id of the first column.
    """
    if not dispatch.on_gpu(scores) or scores.dtype != torch.float32 or len(scores) == 0:
        return reference_of_rank(scores, first)
    B, V = scores.shape
    blocks = triton.cdiv(V, BLOCK)
    values = torch.empty(B, blocks, dtype=torch.float32, device=scores.device)
    places = torch.empty(B, blocks, dtype=torch.int32, device=scores.device)
    out = torch.empty(B, 2, dtype=torch.float64, device=scores.device)
    assert scores.stride(1) == 1
    _best_of_blocks_kernel[B, blocks](scores, values, places, scores.stride(0), V, BLOCKS=blocks, BLOCK=BLOCK)
    _best_of_rank_kernel[(B,)](
        values, places, out, first, BLOCKS=blocks, WIDTH=triton.next_power_of_2(blocks), num_warps=1
    )
    return out


def best_of_ranks(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the largest score [B] fp64 of all ranks' pairs [W, B, 2], and its smallest token id [B] int64.

    The id is -1 if that score is not finite.
    """
    if not dispatch.on_gpu(pairs) or pairs.shape[1] == 0:
        return reference_of_ranks(pairs)
    W, B, _ = pairs.shape
    best = torch.empty(B, dtype=torch.float64, device=pairs.device)
    tokens = torch.empty(B, dtype=torch.int64, device=pairs.device)
    assert pairs.is_contiguous()
    _best_of_ranks_kernel[(B,)](pairs, best, tokens, B, RANKS=W, WIDTH=triton.next_power_of_2(W), num_warps=1)
    return best, tokens
