"""Suffix drafts: prompt lookup in a sequence's own tokens, and in texts of others where there are any."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.tokens.reference import TOKEN_BITS, OtherTexts
from kernels.tokens.reference import suffix as reference

__all__ = ["TOKEN_BITS", "OtherTexts", "suffix"]
OWN_BLOCK = 4096  # positions that a program compares
OTHERS_BLOCK = 1024  # the same in texts of others: four a thread
_TOKEN_BITS, _TOKEN = tl.constexpr(TOKEN_BITS), tl.constexpr((1 << TOKEN_BITS) - 1)


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
            token = tl.load(row + last - i, mask=last >= i, other=-1)
            earlier = tl.load(row + place - i, mask=inside & (place >= i), other=-2)
            same = same & (earlier == token)
            matched += same.to(tl.int64)
        score = tl.max(tl.where(inside & (matched > 0), (matched << 40) + place, -1), 0)
    tl.store(best + b * tl.num_programs(1) + tl.program_id(1), score)
    start_successor(PDL)


@triton.jit
def _entry(others, begin, size, order, inside):
    """Loads the entries at `order`, counted from the oldest one on; -1 outside."""
    at = begin + order
    return tl.load(others + tl.where(at >= size, at - size, at), mask=inside, other=-1)


@triton.jit
def _find_others_kernel(
    history, lengths, others, cursor, salts, found, size, history_b, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    begin = tl.load(cursor)
    salt = tl.load(salts + b) << _TOKEN_BITS
    order = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = history + b * history_b
    same = order < size
    matched = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(LONGEST):
        token = tl.load(row + last - i, mask=last >= i, other=0).to(tl.int64)
        earlier = _entry(others, begin, size, order - i, (order < size) & (order >= i))
        same = same & (last >= i) & (earlier == salt + token)
        matched += same.to(tl.int64)
    score = tl.max(tl.where(matched > 0, (matched << 40) + order, -1), 0)
    tl.store(found + b * tl.num_programs(1) + tl.program_id(1), score)
    start_successor(PDL)


@triton.jit
def _propose_kernel(
    history, lengths, others, cursor, salts, own_found, others_found, proposed, size, history_b, blocks, more_blocks,
    drafts, BLOCKS: tl.constexpr, MORE_BLOCKS: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lengths + b) - 1
    place: tl.constexpr = (1 << 40) - 1
    i = tl.arange(0, DRAFTS)

    block = tl.arange(0, BLOCKS)
    score = tl.max(tl.load(own_found + b * blocks + block, mask=block < blocks, other=-1), 0)
    at = tl.where(score >= 0, score & place, last - 1)  # no match: repeats the last token
    ahead = tl.minimum(tl.maximum(at + 1 + i % tl.maximum(last - at, 1), 0), tl.maximum(last, 0))
    own = tl.load(history + b * history_b + ahead).to(tl.int64)

    if others is not None:
        block = tl.arange(0, MORE_BLOCKS)
        more = tl.max(tl.load(others_found + b * more_blocks + block, mask=block < more_blocks, other=-1), 0)
        order = (more & place) + 1 + i
        entry = _entry(others, tl.load(cursor), size, order, (more >= 0) & (order < size))
        end = tl.min(tl.where(entry >> _TOKEN_BITS == tl.load(salts + b), DRAFTS, i), 0)
        theirs = tl.where(i < end, entry & _TOKEN, -1)
        own = tl.where((more >> 40) > (score >> 40), theirs, own)
    tl.store(proposed + b * drafts + i, own, mask=i < drafts)


def suffix(
    history: torch.Tensor, lengths: torch.Tensor, others: OtherTexts | None, drafts: int, longest: int
) -> torch.Tensor:
    """Drafts the tokens that followed the longest earlier occurrence of a sequence's suffix, in itself or in others.

    Of equally long occurrences its own latest one counts, then the latest of others. Drafts beyond its own end continue
    with the distance of the two occurrences as their period; others' end with their text. A sequence whose last token
    is new repeats it: any draft is allowed, since all are verified. No size depends on device data.

    Args:
        history: [B, L] int32, each sequence's tokens from its first on; rows contiguous.
        lengths: [B] int64, number of tokens of each, at most L; at least 1 where the result matters.
        others: texts of others; None: only its own tokens are searched.
        drafts: tokens to propose.
        longest: the longest suffix, in tokens, that is compared.

    Returns:
        [B, drafts] int64; -1: no token here or after.

    Source:
        Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), with the longest suffix; suffix
        decoding (https://arxiv.org/abs/2411.04975), by comparison with all tokens instead of a tree.
    """
    if not dispatch.on_gpu(history):
        return reference(history, lengths, others, drafts, longest)
    assert history.dtype == torch.int32 and history.stride(1) == 1 and lengths.is_contiguous()
    B, L = history.shape
    blocks, more_blocks, pdl = triton.cdiv(L, OWN_BLOCK), 0, overlapped(history)
    own_found = torch.empty(B, blocks, dtype=torch.int64, device=history.device)
    _find_kernel[B, blocks](
        history, lengths, own_found, history.stride(0), LONGEST=longest, BLOCK=OWN_BLOCK, num_warps=8, **pdl
    )
    searched: tuple[torch.Tensor | None, ...] = None, None, None
    others_found, size = None, 0
    if others is not None:
        searched, size = (others.entries, others.cursor, others.salts), len(others.entries)
        assert others.entries.is_contiguous() and others.salts.is_contiguous()
        more_blocks = triton.cdiv(size, OTHERS_BLOCK)
        others_found = torch.empty(B, more_blocks, dtype=torch.int64, device=history.device)
        _find_others_kernel[B, more_blocks](
            history, lengths, *searched, others_found, size, history.stride(0), LONGEST=longest, BLOCK=OTHERS_BLOCK,
            num_warps=8, **pdl,
        )  # fmt: skip
    out = torch.empty(B, drafts, dtype=torch.int64, device=history.device)
    _propose_kernel[B,](
        history, lengths, *searched, own_found, others_found, out, size, history.stride(0), blocks, more_blocks, drafts,
        BLOCKS=triton.next_power_of_2(blocks), MORE_BLOCKS=triton.next_power_of_2(more_blocks),
        DRAFTS=triton.next_power_of_2(drafts), num_warps=1, **pdl,
    )  # fmt: skip
    return out
