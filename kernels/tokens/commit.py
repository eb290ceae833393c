"""Commit at the end of a decode step: accepted tokens update lengths, last tokens, history and output.

The KV of accepted drafts stays where the step appended it: of "verify and pack" only the scan remains, and this commit
replaces the packing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.reference.commit import PAST
from kernels.reference.commit import commit as reference
from kernels.tokens.verify import accepted_lengths

__all__ = ["PAST", "commit"]

_PAST = tl.constexpr(PAST)


@triton.jit
def _commit_kernel(
    draft, target, last, lengths, limits, active, history, taken, draft_b, target_b, history_b, B, G,
    BLOCK_G: tl.constexpr, HISTORY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    length = tl.load(lengths + b)
    left = tl.load(limits + b) - length
    held = tl.max(accepted_lengths(draft, target, b + tl.arange(0, 1), B, draft_b, target_b, G, BLOCK_G), 0)
    count = tl.where(tl.load(active + b), tl.minimum(held + 1, left), 0)
    j = tl.arange(0, BLOCK_G)
    row = target + b.to(tl.int64) * target_b
    token = tl.load(row + j, mask=j <= G, other=_PAST)
    tl.store(taken + b * (G + 1) + j, tl.where(j < count, token, _PAST), mask=j <= G)
    tl.store(last + b, tl.load(row + count - 1, mask=count > 0), mask=count > 0)
    if HISTORY:
        at = history + b.to(tl.int64) * history_b + length + 1 + j
        tl.store(at, token.to(tl.int32), mask=j < count)
    tl.store(lengths + b, length + count)


def commit(
    drawn: torch.Tensor,
    drafts: torch.Tensor | None,
    last: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:
    """Commits the accepted drafts and the token after them, up to a sequence's limit, for all rows in one launch.

    Args:
        drawn: tokens drawn after the last one and after each draft [B, 1 + n] int64, last dim contiguous.
        drafts: [B, n] int64, last dim contiguous, or None for none; -1 (no token) is never taken.
        last: last token of each sequence [B] int64; overwritten.
        lengths: tokens in the cache [B] int64, at most `limits`; increased by the tokens taken.
        limits: [B] int64.
        active: rows that take tokens [B] bool.
        history: tokens [B, L] int32, last dim contiguous; those taken are written from index `lengths` + 1 on; L may be
            0.

    Returns:
        [B, 1 + n] int64: the tokens that each row has taken, then PAST.
    """
    if not dispatch.on_gpu(drawn):
        return reference(drawn, drafts, last, lengths, limits, active, history)
    B, T = drawn.shape
    target, draft = drawn, drawn if drafts is None else drafts  # without drafts, the argument is not read
    assert draft.shape == (B, T - 1) or drafts is None, f"{T} tokens drawn behind {draft.shape[1]} drafts"
    assert target.dtype == draft.dtype == torch.int64 and target.stride(1) == 1 and (T < 3 or draft.stride(1) == 1)
    assert all(t.is_contiguous() and len(t) == B for t in (last, lengths, limits, active))
    assert history.dtype == torch.int32 and (history.shape[1] < 2 or history.stride(1) == 1)
    taken = torch.empty(B, T, dtype=torch.int64, device=drawn.device)
    _commit_kernel[(B,)](
        draft, target, last, lengths, limits, active, history, taken,
        draft.stride(0), target.stride(0), history.stride(0), B, T - 1,
        BLOCK_G=triton.next_power_of_2(T), HISTORY=history.shape[1] > 0, num_warps=1, **overlapped(drawn),
    )  # fmt: skip
    return taken
