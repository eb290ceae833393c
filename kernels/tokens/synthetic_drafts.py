"""Random drafts with a set acceptance rate, for benchmarks of speculation with random weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import overlapped, start_successor, wait_for_predecessor
from kernels.reference.synthetic_drafts import CHANCE_UNITS
from kernels.reference.synthetic_drafts import synthetic_drafts as reference
from kernels.reference.uniform import DRAFT, SYNTHETIC
from kernels.tokens.uniform import uniform

_DRAFT, _REPLAY, _CHANCE_UNITS = tl.constexpr(DRAFT), tl.constexpr(SYNTHETIC), tl.constexpr(CHANCE_UNITS)


@triton.jit
def _replay_kernel(lengths, tokens, outcome, seed, chance, vocab, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    j = tl.arange(0, BLOCK)
    slot = (j * 0 + b).to(tl.int64)
    seeds = slot * 0 + seed
    position = tl.load(lengths + b) + 1 + j
    token = (uniform(seeds, position, slot * 0 + _DRAFT, slot) * vocab).to(tl.int64)
    kept = uniform(seeds, position, slot * 0 + _REPLAY, slot) * _CHANCE_UNITS < chance
    at = b * N + j
    tl.store(tokens + at, token, mask=j < N)
    tl.store(outcome + at, tl.where(kept, token, (token + 1) % vocab), mask=j < N)


def synthetic_drafts(
    lengths: torch.Tensor, drafts: int, acceptance: float, seed: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws random drafts and the tokens that count as drawn in their place: the draft with a set chance, else another.

    A pure function of seed, row and position: a position has the same outcome however often it is drafted.

    Args:
        lengths: position of the last token of each row [B] int64, contiguous; the drafts follow it.
        drafts: n drafts per row, at least 1.
        acceptance: chance of each draft, in [0, 1], rounded to units of 2^-30.
        vocab: token ids are below it; at least 2.

    Returns:
        Drafts and outcomes, [B, n] int64 each.
    """
    if not dispatch.on_gpu(lengths):
        return reference(lengths, drafts, acceptance, seed, vocab)
    assert lengths.dtype == torch.int64 and lengths.is_contiguous()
    B = len(lengths)
    tokens, outcome = torch.empty(2, B, drafts, dtype=torch.int64, device=lengths.device)
    _replay_kernel[(B,)](
        lengths, tokens, outcome, seed, round(acceptance * CHANCE_UNITS), vocab, drafts,
        BLOCK=triton.next_power_of_2(drafts), num_warps=1, **overlapped(lengths),
    )  # fmt: skip
    return tokens, outcome
