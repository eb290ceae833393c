"""Commit at the end of a decode step: accepted tokens update lengths, last tokens, history and output."""

from __future__ import annotations

import torch
import triton

from kernels import dispatch
from kernels.overlap import overlapped
from kernels.reference.commit import PAST, Candidates
from kernels.reference.commit import commit as reference
from kernels.tokens.best_token import width_of
from kernels.tokens.verify import verify_and_commit

__all__ = ["PAST", "Candidates", "commit"]


def commit(
    drawn: Candidates,
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
        drawn: candidates for the tokens after the last one and after each draft, of all ranks.
        drafts: [B, n] int64, last dim contiguous, or None for none; -1 (no token) is never taken.
        outcome: [B, n] int64, last dim contiguous: taken as drawn at the drafts' positions where the model's token is
            not broken; None: the model's tokens.
        last: last token of each sequence [B] int64; overwritten.
        lengths: tokens in the cache [B] int64, at most `limits`; increased by the tokens taken.
        limits: [B] int64.
        active: rows that take tokens [B] bool.
        history: tokens [B, L] int32, last dim contiguous; those taken are written from index `lengths` + 1 on; L may be
            0.

    Returns:
        [B, 1 + n] int64: the tokens that each row has taken, then PAST; and the lengths before [B] int64.
    """
    pairs, held = drawn.pairs, drawn.accepted
    if not dispatch.on_gpu(pairs):
        return reference(drawn, drafts, outcome, last, lengths, limits, active, history)
    B, G = len(last), 0 if drafts is None else drafts.shape[1]
    rows = 1 + G if held is None else 1
    assert pairs.shape[1:] == (B * rows, 2), f"{pairs.shape[1]} rows of candidates for {B} sequences of {G} drafts"
    assert pairs.dtype == torch.float64 and pairs.is_contiguous()
    for t in (drafts, outcome):
        assert t is None or (t.shape == (B, G) and t.dtype == torch.int64 and (G < 2 or t.stride(1) == 1))
    given = (last, lengths, limits, active) if held is None else (last, lengths, limits, active, held)
    assert all(t.is_contiguous() and len(t) == B for t in given)
    assert history.dtype == torch.int32 and (history.shape[1] < 2 or history.stride(1) == 1)
    taken = torch.empty(B, 1 + G, dtype=torch.int64, device=pairs.device)
    before = torch.empty_like(lengths)
    block_g = triton.next_power_of_2(1 + G)
    state = {
        "draft": drafts, "candidates": pairs, "drawn_at": held, "outcome": outcome, "last": last, "lengths": lengths,
        "limits": limits, "active": active, "history": history if history.shape[1] else None, "taken": taken,
        "before": before, "draft_b": 0 if drafts is None else drafts.stride(0),
        "outcome_b": 0 if outcome is None else outcome.stride(0), "history_b": history.stride(0), "G": G,
        "N": len(pairs), "BLOCK_G": block_g, "WIDTH": width_of(len(pairs), block_g if held is None else 1),
    }  # fmt: skip
    verify_and_commit(B, state | overlapped(pairs))
    return taken, before
