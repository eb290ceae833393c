"""Prompt-lookup drafts: the tokens that followed the latest earlier occurrence of a sequence's suffix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.reference.ngram import ngram as reference

BLOCK = 4096  # positions that a program compares


@triton.jit
def _find_kernel(
    history, lengths, best, history_b, LONGEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_predecessor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    begin = tl.program_id(1).to(tl.int64) * BLOCK
    score = tl.full([], -1, tl.int64)
    if begin < last:
        place = begin + tl.arange(0, BLOCK)
        row = history + b * history_b
        inside = place < last
        same = inside
        matched = tl.zeros([BLOCK], tl.int64)
        for i in tl.static_range(LONGEST):
            suffix = tl.load(row + last - i, mask=last >= i, other=-1)
            earlier = tl.load(row + place - i, mask=inside & (place >= i), other=-2)
            same = same & (earlier == suffix)
            matched += same.to(tl.int64)
        score = tl.max(tl.where(inside & (matched > 0), (matched << 40) + place, -1), 0)
    tl.store(best + b * tl.num_programs(1) + tl.program_id(1), score)
    start_successor(PDL)


@triton.jit
def _propose_kernel(
    history, lengths, best, out, history_b, blocks, drafts, BLOCKS: tl.constexpr, DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    block = tl.arange(0, BLOCKS)
    score = tl.max(tl.load(best + b * blocks + block, mask=block < blocks, other=-1), 0)
    at = tl.where(score >= 0, score & ((1 << 40) - 1), last - 1)  # no match: repeats the last token
    period = tl.maximum(last - at, 1)
    i = tl.arange(0, DRAFTS)
    ahead = tl.minimum(tl.maximum(at + 1 + i % period, 0), tl.maximum(last, 0))
    tl.store(out + b * drafts + i, tl.load(history + b * history_b + ahead).to(tl.int64), mask=i < drafts)


def earlier_matches(history: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Finds the latest longest earlier occurrence of each sequence's suffix in each of its blocks of positions.

    Args:
        history, lengths, longest: as in `ngram`.

    Returns:
        [B, blocks] int64: tokens that match, times 2^40, plus the place of the last one; -1: none.
    """
    B, L = history.shape
    blocks = triton.cdiv(L, BLOCK)
    best = torch.empty(B, blocks, dtype=torch.int64, device=history.device)
    _find_kernel[B, blocks](
        history, lengths, best, history.stride(0), LONGEST=longest, BLOCK=BLOCK, num_warps=8, **overlapped(history)
    )
    return best


def ngram(history: torch.Tensor, lengths: torch.Tensor, drafts: int, longest: int) -> torch.Tensor:
    """Drafts the tokens that followed the latest earlier occurrence of a sequence's longest repeated suffix.

    Drafts beyond the end continue with the distance of the two as their period. A sequence whose last token is new
    repeats it: any draft is allowed, since all are verified. No size depends on device data.

    Args:
        history: [B, L] int32, each sequence's tokens from its first on; rows contiguous.
        lengths: [B] int64, number of tokens of each, at most L; at least 1 where the result matters.
        drafts: tokens to propose.
        longest: the longest suffix, in tokens, that is compared.

    Returns:
        [B, drafts] int64.

    Source:
        Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), with the longest suffix.
    """
    if not dispatch.on_gpu(history):
        return reference(history, lengths, drafts, longest)
    assert history.dtype == torch.int32 and history.stride(1) == 1 and lengths.is_contiguous()
    best = earlier_matches(history, lengths, longest)
    B, blocks = best.shape
    out = torch.empty(B, drafts, dtype=torch.int64, device=history.device)
    _propose_kernel[B,](
        history, lengths, best, out, history.stride(0), blocks, drafts, BLOCKS=triton.next_power_of_2(blocks),
        DRAFTS=triton.next_power_of_2(drafts), num_warps=1, **overlapped(history),
    )  # fmt: skip
    return out
