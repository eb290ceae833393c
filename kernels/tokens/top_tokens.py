"""Top logprobs and the total weight of each row, over this rank's columns and then over all ranks.

Blocks of columns, ranks and the whole vocabulary share one format, a summary (`kernels.tokens.reference`), and are
merged in the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.reference import ID_BITS, NONE, TOP, WIDTH
from kernels.tokens.reference import top_of_rank as reference_of_rank
from kernels.tokens.reference import top_of_ranks as reference_of_ranks

__all__ = ["TOP", "WIDTH", "top_of_rank", "top_of_ranks"]

BLOCK = 2048  # columns per program

_TOP, _WIDTH, _ID_BITS, _NONE = (tl.constexpr(n) for n in (TOP, WIDTH, ID_BITS, NONE))


@triton.jit
def _logit(word):
    key = word >> _ID_BITS
    bits = tl.where(key >= 0x80000000, key - 0x100000000, 0x7FFFFFFF - key).to(tl.int32)
    return tl.where(word < _NONE, bits.to(tl.float32, bitcast=True).to(tl.float64), float("-inf"))


@triton.jit
def _store_smallest(words, to):
    """Stores the TOP smallest of distinct words, ascending, padded with NONE."""
    for i in range(_TOP):
        word = tl.min(words, 0)
        tl.store(to + i, word)
        words = tl.where(words == word, _NONE, words)


@triton.jit
def _top_of_blocks_kernel(logits, tokens, summaries, logits_b, first, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    logit = tl.load(logits + b * logits_b + v, mask=v < V, other=float("-inf"))
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True).to(tl.int64)
    ids = (v + first).to(tl.int64)
    words = (tl.where(bits < 0, bits + 0x100000000, 0x7FFFFFFF - bits) << _ID_BITS) | ids
    words = tl.where(v < V, words, _NONE)
    to = summaries + (tl.program_id(1) * tl.num_programs(0) + b) * _WIDTH
    tl.store(to, tl.min(tl.where(ids == tl.load(tokens + b), words, _NONE), 0))
    _store_smallest(words, to + 1)
    best = tl.maximum(tl.max(logit, 0).to(tl.float64), -1.7976931348623157e308)  # only -inf: no weight
    weight = tl.sum(tl.exp(logit.to(tl.float64) - best), 0)
    tl.store(to + 1 + _TOP, weight.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["B"])
def _merge_tops_kernel(summaries, merged, B, N, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.arange(0, BLOCK_N)
    summary = summaries + (n * B + b) * _WIDTH
    to = merged + b * _WIDTH
    tl.store(to, tl.min(tl.load(summary, mask=n < N, other=_NONE), 0))
    i = tl.arange(0, BLOCK)
    word = summaries + (i // _TOP * B + b) * _WIDTH + 1 + i % _TOP
    _store_smallest(tl.load(word, mask=i < N * _TOP, other=_NONE), to + 1)
    logit = _logit(tl.load(summary + 1, mask=n < N, other=_NONE))
    weight = tl.load(summary + 1 + _TOP, mask=n < N, other=0).to(tl.float64, bitcast=True)
    best = tl.maximum(tl.max(logit, 0), -1.7976931348623157e308)
    total = tl.sum(tl.exp(logit - best) * weight, 0)
    tl.store(to + 1 + _TOP, total.to(tl.int64, bitcast=True))


def top_of_rank(logits: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Summarizes this rank's columns, [B, WIDTH] int64.

    Args:
        logits: [B, V_local] fp32, last dim contiguous; V_local may be 0.
        tokens: sampled token of each row [B] int64, contiguous.
        first: token id of the first column.
    """
    if not dispatch.on_gpu(logits) or logits.shape[1] == 0:
        return reference_of_rank(logits, tokens, first)
    B, V = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and tokens.is_contiguous() and len(tokens) == B
    blocks = triton.cdiv(V, BLOCK)
    summaries = torch.empty(blocks, B, WIDTH, dtype=torch.int64, device=logits.device)
    _top_of_blocks_kernel[B, blocks](
        logits, tokens, summaries, logits.stride(0), first, V, BLOCK=BLOCK, num_warps=4, **pdl_options(logits)
    )
    return top_of_ranks(summaries)


def top_of_ranks(summaries: torch.Tensor) -> torch.Tensor:
    """Merges summaries [N, B, WIDTH] int64, contiguous, of column blocks or of ranks, into one [B, WIDTH].

    `kernels.tokens.reference.logprobs` decodes it.
    """
    if not dispatch.on_gpu(summaries):
        return reference_of_ranks(summaries)
    N, B, _ = summaries.shape
    assert summaries.is_contiguous()
    merged = torch.empty(B, WIDTH, dtype=torch.int64, device=summaries.device)
    _merge_tops_kernel[(B,)](
        summaries, merged, B, N, BLOCK=triton.next_power_of_2(N * TOP), BLOCK_N=triton.next_power_of_2(N),
        num_warps=4, **pdl_options(summaries),
    )  # fmt: skip
    return merged
