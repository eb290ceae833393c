"""Logits processing that requests ask for: bias, penalties, forbidden tokens. Other rows stay bitwise the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.reference import ENDS, FORBIDDEN, IN_PROMPT, ONCE, LogitsState
from kernels.tokens.reference import process_logits as reference

__all__ = ["ENDS", "FORBIDDEN", "IN_PROMPT", "ONCE", "LogitsState", "process_logits"]

BLOCK = 1024  # columns per program

_IN_PROMPT, _ENDS, _ONCE = tl.constexpr(IN_PROMPT), tl.constexpr(ENDS), tl.constexpr(ONCE)
_FORBIDDEN = tl.constexpr(FORBIDDEN)


@triton.jit
def _process_logits_kernel(
    logits, out, slots, last, positions, is_active, repetition, frequency, presence, min_end_position, bias, seen,
    allowed,
    logits_n, words, first, V, T, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    wait_for_predecessor(PDL)
    start_successor(PDL)
    raw = tl.load(logits + row * logits_n + v, mask=inside)
    slot = tl.load(slots + b)
    if (row % T == 0) & tl.load(is_active + slot):
        ids = v + first
        old_seen = tl.load(seen + slot * V + v, mask=inside, other=0)
        new_seen = old_seen + tl.where(ids == tl.load(last + b), _ONCE, 0)
        tl.store(seen + slot * V + v, new_seen, mask=inside & (new_seen != old_seen))
        count = new_seen // _ONCE
        # fp64, rounded once: the same bits on every device.
        x = raw.to(tl.float64) + tl.load(bias + slot * V + v, mask=inside, other=0.0).to(tl.float64)
        ends = ((new_seen & _ENDS) > 0) & (tl.load(positions + row) < tl.load(min_end_position + slot))
        x = tl.where(ends, tl.minimum(x, _FORBIDDEN), x)
        factor = tl.load(repetition + slot).to(tl.float64)
        x = tl.where(((new_seen & _IN_PROMPT) > 0) | (count > 0), tl.where(x > 0, x / factor, x * factor), x)
        x -= tl.load(frequency + slot).to(tl.float64) * count.to(tl.float64)
        x -= tl.where(count > 0, tl.load(presence + slot).to(tl.float64), 0.0)
        word = tl.load(allowed + slot * words + ids // 32, mask=inside, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) > 0, x, float("-inf"))
        raw = tl.where(raw < float("inf"), x.to(tl.float32), raw)  # a broken row stays broken
    tl.store(out + row * V + v, raw, mask=inside)


def process_logits(
    logits: torch.Tensor,
    state: LogitsState,
    slots: torch.Tensor,
    last: torch.Tensor,
    positions: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Returns logits [B * T, V_local] with requests' processing applied, and counts each sequence's last token.

    In vLLM's order: bias, tokens that may not end the sequence yet, repetition, frequency and presence penalty, allowed
    tokens. Only the first row of a sequence with drafts is changed.

    Args:
        logits: [B * T, V_local] fp32, last dim contiguous; V_local may be 0.
        state: of all slots, contiguous tensors; `seen` is written.
        slots: the B sequences' slots in `state`, distinct [B] int64, contiguous.
        last: each sequence's last token if sampled and not counted yet, else -1 [B] int64, contiguous.
        positions: positions of the tokens to sample [B * T] int64, contiguous.
        first: token id of the first column.
    """
    if logits.shape[1] == 0:
        return logits
    if not dispatch.on_gpu(logits):
        return reference(logits, state, slots, last, positions, first)
    N, V = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and state.seen.shape[1] == V
    tables = tuple(vars(state).values())
    assert all(t.is_contiguous() for t in (slots, last, positions, *tables)) and len(positions) == N
    out = torch.empty(N, V, dtype=torch.float32, device=logits.device)
    _process_logits_kernel[N, triton.cdiv(V, BLOCK)](
        logits, out, slots, last, positions, *tables, logits.stride(0), state.allowed.shape[1], first, V,
        N // len(slots), BLOCK=BLOCK, num_warps=4, **pdl_options(logits),
    )  # fmt: skip
    return out
