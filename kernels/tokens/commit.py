"""Commit at the end of a decode step: accepted tokens update lengths, last tokens, history and output.

The only launch after the all-gather: it finds the sampled tokens among all ranks' candidates and commits them, up to
the first draft that differs. The KV of accepted drafts stays where the step appended it
(`benchmarks/papers/verify_and_pack.py` has a variant that packs it).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.best_token import best_of_pairs, width_of
from kernels.tokens.reference import PLACEHOLDER_TOKEN_ID, Candidates
from kernels.tokens.reference import commit as reference

__all__ = ["PLACEHOLDER_TOKEN_ID", "Candidates", "before_first", "commit"]
_PLACEHOLDER_TOKEN_ID = tl.constexpr(PLACEHOLDER_TOKEN_ID)


@triton.jit
def before_first(wrong, j, G):
    """Counts the drafts before the first wrong one in rows [.., BLOCK_G], int32; j are their columns, G means none."""
    return tl.min(tl.where(wrong, tl.minimum(j, G), G), len(wrong.shape) - 1)


# A row of drafts has any alignment. One warp: all reads come before the writes.
@triton.jit(do_not_specialize_on_alignment=["draft"])
def _commit_kernel(
    draft, candidates, num_accepted, outcome, last, lengths, limits, active, history, output_token_ids, before,
    draft_b, outcome_b, history_b, G, N, BLOCK_G: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    b, B = tl.program_id(1), tl.num_programs(1)
    row = b.to(tl.int64)
    j = tl.arange(0, BLOCK_G)
    is_draft = j < G
    d = tl.full([BLOCK_G], -1, tl.int64)
    if draft is not None:
        d = tl.load(draft + row * draft_b + j, mask=is_draft, other=-1)
    length = tl.load(lengths + b)
    left = tl.load(limits + b) - length
    is_active = tl.load(active + b)
    if num_accepted is None:
        token = best_of_pairs(candidates, b * (G + 1) + j, j <= G, B * (G + 1), N, WIDTH)[1]
    else:
        one = b + tl.arange(0, 1)
        next_token = best_of_pairs(candidates, one, one < B, B, N, WIDTH)[1]
        token = tl.where(j == tl.load(num_accepted + b), next_token, d)
    if outcome is not None:  # broken rows stay broken
        token = tl.where(is_draft & (token >= 0), tl.load(outcome + row * outcome_b + j, mask=is_draft), token)
    count = tl.where(is_active, tl.minimum(before_first((d != token) | (d < 0), j, G) + 1, left), 0)
    tl.store(output_token_ids + row * (G + 1) + j, tl.where(j < count, token, _PLACEHOLDER_TOKEN_ID), mask=j <= G)
    tl.store(last + b, tl.sum(tl.where(j == count - 1, token, 0), 0), mask=count > 0)
    if history is not None:
        tl.store(history + row * history_b + length + 1 + j, token.to(tl.int32), mask=j < count)
    tl.store(before + b, length)
    tl.store(lengths + b, length + count)


def commit(
    candidates: Candidates,
    drafts: torch.Tensor | None,
    outcome: torch.Tensor | None,
    last: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    history: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Commits the accepted drafts and the token after them, up to a sequence's limit, for all rows in one launch.

    Args:
        candidates: of all ranks, for the tokens after the last one and after each draft.
        drafts: [B, n] int64, last dim contiguous, or None; -1 (no token) is never accepted.
        outcome: [B, n] int64, last dim contiguous: replaces the sampled tokens at the drafts' positions where the
            model's token is not broken; None: the model's tokens.
        last: last token of each sequence [B] int64; overwritten.
        lengths: tokens in the cache [B] int64, at most `limits`; incremented by the accepted tokens.
        limits: [B] int64.
        active: rows that accept tokens [B] bool.
        history: tokens [B, L] int32, last dim contiguous; accepted tokens are written from index `lengths` + 1 on; L
            may be 0.

    Returns:
        [B, 1 + n] int64: each row's accepted tokens, padded with PLACEHOLDER_TOKEN_ID; and the lengths before [B]
        int64.
    """
    pairs, accepted = candidates.pairs, candidates.accepted
    if not dispatch.on_gpu(pairs):
        return reference(candidates, drafts, outcome, last, lengths, limits, active, history)
    B, G = len(last), 0 if drafts is None else drafts.shape[1]
    rows = 1 + G if accepted is None else 1
    assert pairs.shape[1:] == (B * rows, 2), f"{pairs.shape[1]} rows of candidates for {B} sequences of {G} drafts"
    assert pairs.dtype == torch.float64 and pairs.is_contiguous()
    for t in (drafts, outcome):
        assert t is None or (t.shape == (B, G) and t.dtype == torch.int64 and (G < 2 or t.stride(1) == 1))
    given = (last, lengths, limits, active) if accepted is None else (last, lengths, limits, active, accepted)
    assert all(t.is_contiguous() and len(t) == B for t in given)
    assert history.dtype == torch.int32 and (history.shape[1] < 2 or history.stride(1) == 1)
    output_token_ids = torch.empty(B, 1 + G, dtype=torch.int64, device=pairs.device)
    before = torch.empty_like(lengths)
    block_g = triton.next_power_of_2(1 + G)
    _commit_kernel[1, B](
        drafts, pairs, accepted, outcome, last, lengths, limits, active, history if history.shape[1] else None,
        output_token_ids,
        before, 0 if drafts is None else drafts.stride(0), 0 if outcome is None else outcome.stride(0),
        history.stride(0), G, len(pairs), BLOCK_G=block_g,
        WIDTH=width_of(len(pairs), block_g if accepted is None else 1), num_warps=1, **pdl_options(pairs),
    )  # fmt: skip
    return output_token_ids, before
