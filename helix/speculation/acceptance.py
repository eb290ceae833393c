"""Rejection sampling of drafts over a sharded vocabulary.

A draft is accepted with probability min(1, p / q). The first rejected draft is replaced by a sample from max(p - q, 0).
This changes a request's tokens, but not their distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comm.base import Communicator
from helix.worker.sampling import SamplingState, distribution
from kernels.tokens.accept import Distribution, accept, kept_mass
from kernels.tokens.commit import Candidates


def accepted_candidates(
    logits: Tensor,
    vocab_offset: int,
    drafts: Tensor,
    q: Distribution,
    positions: Tensor,
    state: SamplingState,
    comm: Communicator,
    *,
    filtered: bool,
) -> Candidates:
    """Verifies a step's drafts by rejection sampling, and samples candidates for the token after them.

    A collective call with the same result on all ranks. Rows with temperature 0 accept drafts that are the argmax.

    Args:
        logits: [B * (n + 1), V_local] fp32, the target's after the last token and after each draft.
        vocab_offset: token id of the first column.
        drafts: [B, n] int64.
        q: distributions that the drafts were sampled from, sharded like `logits`.
        positions: [B * (n + 1)] int64, positions of the sampled tokens.
        state: B rows.
        filtered: whether any row with temperature > 0 has top-k or top-p on.
    """
    B, n = drafts.shape
    p, best = distribution(logits.unflatten(0, (B, n + 1)), vocab_offset, state, comm, filtered=filtered)
    mass = torch.zeros(B * (n + 1 + n), 2, dtype=torch.int64, device=logits.device)

    def split_target_draft(sums: Tensor) -> tuple[Tensor, Tensor]:
        return sums[: B * (n + 1)].view(B, n + 1, 2), sums[B * (n + 1) :].view(B, n, 2)

    for probs, sums in zip((p, q), split_target_draft(mass), strict=True):
        kept_mass(probs, drafts, vocab_offset, sums)
    p_mass, q_mass = split_target_draft(comm.all_reduce(mass))
    first = positions.view(B, n + 1)[:, 0]
    accepted, candidates = accept(p, q, p_mass, q_mass, drafts, best, state.seed, first, vocab_offset)
    return Candidates(comm.all_gather(candidates).flatten(0, 1), accepted)
