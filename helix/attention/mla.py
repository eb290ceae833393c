"""Exact attention in MLA's latent space: one KV head, whose values are the first R of the numbers in its keys."""

from __future__ import annotations

from torch import Tensor

from helix.step import Step
from kernels.attention.split_kv import PartialAttention
from kernels.mla.decode import decode_parts
from kernels.mla.prefill import mla_prefill
from kernels.overlap import sm_count


def attend_latents(
    q: Tensor, latents: Tensor, rank: int, step: Step, window: int | None, scale: float, reserved_sms: int
) -> PartialAttention:
    """Absorbed queries [N, Hq, R + P] over this rank's latents [pages, page_size, R + P]; `rank` is R.

    Returns:
        As `AttentionPolicy.attend`: a partial output [N, Hq, R] in q's dtype and natural-log LSE [N, Hq] fp32.
    """
    lo, hi = step.bounds(window)
    if step.cu_q is not None:
        return PartialAttention(*mla_prefill(q, latents, step.block_tables, step.cu_q, step.max_q, lo, hi, scale, rank))
    per_sequence = (len(step.block_tables), -1)
    return decode_parts(
        q.unflatten(0, per_sequence), latents, step.block_tables,
        lo.view(per_sequence), hi.view(per_sequence), scale, rank,
        programs=max(1, sm_count(q.device) - reserved_sms), early=True,
    )  # fmt: skip
