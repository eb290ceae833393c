"""Exact attention: every key that causality and the layer's window allow."""

from __future__ import annotations

from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.attention.mla import attend_latents
from helix.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.split_kv import PartialAttention
from kernels.overlap import sm_count


class DenseAttention(AttentionPolicy):
    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
        reserved_sms: int = 0,
    ) -> PartialAttention:
        if keys.dim() == 3:
            return attend_latents(q, keys, values.shape[-1], step, window, scale, reserved_sms)
        lo, hi = step.bounds(window)
        if step.cu_q is not None:
            segments = step.block_tables, step.cu_q, step.max_q
            return PartialAttention(*flash_prefill(q, keys, values, *segments, lo, hi, scale, sinks=sinks))
        sequences = len(step.block_tables)
        per_sequence = (sequences, -1)
        return decode_parts(
            q.unflatten(0, per_sequence), keys, values, step.block_tables,
            lo.view(per_sequence), hi.view(per_sequence), scale,
            sinks=sinks, sms=max(1, sm_count(q.device) - reserved_sms), early=True,
        )  # fmt: skip
