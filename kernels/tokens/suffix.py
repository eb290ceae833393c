"""Suffix drafts: prompt lookup in a sequence's own tokens, and in a pool of finished sequences if there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.reference import TOKEN_BITS, SuffixPool
from kernels.tokens.reference import suffix as reference

__all__ = ["TOKEN_BITS", "SuffixPool", "suffix"]
HISTORY_BLOCK = 4096  # positions per program
POOL_BLOCK = 1024  # pool entries per program: four per thread
_TOKEN_BITS, _TOKEN = tl.constexpr(TOKEN_BITS), tl.constexpr((1 << TOKEN_BITS) - 1)


@triton.jit
def _find_in_history_kernel(
    history, lengths, best, history_b, LOOKUP_MAX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_predecessor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    begin = tl.program_id(1).to(tl.int64) * BLOCK
    score = tl.full([], -1, tl.int64)
    if begin < last:
        position = begin + tl.arange(0, BLOCK)
        row = history + b * history_b
        inside = position < last
        same = inside
        matched = tl.zeros([BLOCK], tl.int64)
        for i in tl.static_range(LOOKUP_MAX):
            token = tl.load(row + last - i, mask=last >= i, other=-1)
            earlier = tl.load(row + position - i, mask=inside & (position >= i), other=-2)
            same = same & (earlier == token)
            matched += same.to(tl.int64)
        score = tl.max(tl.where(inside & (matched > 0), (matched << 40) + position, -1), 0)
    tl.store(best + b * tl.num_programs(1) + tl.program_id(1), score)
    start_successor(PDL)


@triton.jit
def _entry(pool, begin, size, order, inside):
    at = begin + order
    return tl.load(pool + tl.where(at >= size, at - size, at), mask=inside, other=-1)


@triton.jit
def _find_in_pool_kernel(
    history, lengths, pool, cursor, cache_salts, found, size, history_b, LOOKUP_MAX: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    begin = tl.load(cursor)
    cache_salt = tl.load(cache_salts + b) << _TOKEN_BITS
    order = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = history + b * history_b
    same = order < size
    matched = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(LOOKUP_MAX):
        token = tl.load(row + last - i, mask=last >= i, other=0).to(tl.int64)
        earlier = _entry(pool, begin, size, order - i, (order < size) & (order >= i))
        same = same & (last >= i) & (earlier == cache_salt + token)
        matched += same.to(tl.int64)
    score = tl.max(tl.where(matched > 0, (matched << 40) + order, -1), 0)
    tl.store(found + b * tl.num_programs(1) + tl.program_id(1), score)
    start_successor(PDL)


@triton.jit
def _propose_kernel(
    history, lengths, pool, cursor, cache_salts, history_matches, pool_matches, proposed, size, history_b,
    history_blocks, pool_blocks,
    drafts, HISTORY_BLOCKS: tl.constexpr, POOL_BLOCKS: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    position: tl.constexpr = (1 << 40) - 1
    i = tl.arange(0, DRAFTS)

    block = tl.arange(0, HISTORY_BLOCKS)
    score = tl.max(tl.load(history_matches + b * history_blocks + block, mask=block < history_blocks, other=-1), 0)
    at = tl.where(score >= 0, score & position, last - 1)  # no match: repeat the last token
    source = tl.minimum(tl.maximum(at + 1 + i % tl.maximum(last - at, 1), 0), tl.maximum(last, 0))
    proposal = tl.load(history + b * history_b + source).to(tl.int64)

    if pool is not None:
        block = tl.arange(0, POOL_BLOCKS)
        pool_score = tl.max(tl.load(pool_matches + b * pool_blocks + block, mask=block < pool_blocks, other=-1), 0)
        order = (pool_score & position) + 1 + i
        entry = _entry(pool, tl.load(cursor), size, order, (pool_score >= 0) & (order < size))
        end = tl.min(tl.where(entry >> _TOKEN_BITS == tl.load(cache_salts + b), DRAFTS, i), 0)
        pool_tokens = tl.where(i < end, entry & _TOKEN, -1)
        proposal = tl.where((pool_score >> 40) > (score >> 40), pool_tokens, proposal)
    tl.store(proposed + b * drafts + i, proposal, mask=i < drafts)


def suffix(
    history: torch.Tensor, lengths: torch.Tensor, pool: SuffixPool | None, drafts: int, prompt_lookup_max: int
) -> torch.Tensor:
    """Drafts the tokens that followed the longest earlier occurrence of a sequence's suffix, in itself or in the pool.

    Of equally long matches, the sequence's latest wins, then the pool's latest. Drafts past the sequence's end repeat
    with the distance of the two occurrences as period; pool drafts end with their sequence. Without a match, drafts
    repeat the last token: any draft is allowed, since all are verified. No shape depends on device data.

    Args:
        history: [B, L] int32, each sequence's tokens from its first on; rows contiguous.
        lengths: [B] int64, number of tokens of each, at most L; at least 1 where the result matters.
        pool: finished sequences; None: search only the sequence itself.
        prompt_lookup_max: longest suffix to match, in tokens.

    Returns:
        [B, drafts] int64; -1: no token here or after.

    Source:
        Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), with the longest suffix; suffix
        decoding (https://arxiv.org/abs/2411.04975), by comparison with all tokens instead of a tree.
    """
    if not dispatch.on_gpu(history):
        return reference(history, lengths, pool, drafts, prompt_lookup_max)
    assert history.dtype == torch.int32 and history.stride(1) == 1 and lengths.is_contiguous()
    B, L = history.shape
    history_blocks, pool_blocks, pdl = triton.cdiv(L, HISTORY_BLOCK), 0, pdl_options(history)
    history_matches = torch.empty(B, history_blocks, dtype=torch.int64, device=history.device)
    _find_in_history_kernel[B, history_blocks](
        history,
        lengths,
        history_matches,
        history.stride(0),
        LOOKUP_MAX=prompt_lookup_max,
        BLOCK=HISTORY_BLOCK,
        num_warps=8,
        **pdl,
    )
    pool_tensors: tuple[torch.Tensor | None, ...] = None, None, None
    pool_matches, size = None, 0
    if pool is not None:
        pool_tensors, size = (pool.entries, pool.cursor, pool.cache_salts), len(pool.entries)
        assert pool.entries.is_contiguous() and pool.cache_salts.is_contiguous()
        pool_blocks = triton.cdiv(size, POOL_BLOCK)
        pool_matches = torch.empty(B, pool_blocks, dtype=torch.int64, device=history.device)
        _find_in_pool_kernel[B, pool_blocks](
            history, lengths, *pool_tensors, pool_matches, size, history.stride(0), LOOKUP_MAX=prompt_lookup_max,
            BLOCK=POOL_BLOCK,
            num_warps=8, **pdl,
        )  # fmt: skip
    out = torch.empty(B, drafts, dtype=torch.int64, device=history.device)
    _propose_kernel[B,](
        history, lengths, *pool_tensors, history_matches, pool_matches, out, size, history.stride(0), history_blocks,
        pool_blocks, drafts,
        HISTORY_BLOCKS=triton.next_power_of_2(history_blocks), POOL_BLOCKS=triton.next_power_of_2(pool_blocks),
        DRAFTS=triton.next_power_of_2(drafts), num_warps=1, **pdl,
    )  # fmt: skip
    return out
