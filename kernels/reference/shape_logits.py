"""`shape_logits` in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Flags of `Shaping.seen`; the bits above them are a counter.
IN_PROMPT, ENDS, ONCE = 1, 2, 4

FORBIDDEN = -1e30  # finite, so that a row without other tokens draws such a token instead of being broken


@dataclass(frozen=True)
class Shaping:
    """Changes to each slot's logits before sampling, over this rank's columns.

    Attributes:
        shaped: slots whose logits are changed [S] bool.
        repetition: divides positive and multiplies negative logits of tokens in prompt or answer [S] fp32.
        frequency: subtracted once per occurrence of the token in the answer [S] fp32.
        presence: subtracted if the answer contains the token [S] fp32.
        ends_from: first position that may hold a token that ends the sequence [S] int64.
        bias: added [S, V_local] fp32.
        seen: [S, V_local] int32: IN_PROMPT, ENDS (it ends the sequence), plus ONCE for each occurrence in the answer.
        allowed: a bit for each token of the whole vocabulary, lowest first [S, W] int32; tokens without it are masked.
    """

    shaped: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    ends_from: Tensor
    bias: Tensor
    seen: Tensor
    allowed: Tensor


def shape_logits(
    logits: Tensor, shaping: Shaping, slots: Tensor, last: Tensor, positions: Tensor, first: int
) -> Tensor:
    """Applies bias, penalties and masks to logits; shapes as in `kernels.tokens.shape_logits`."""
    B, V = len(slots), logits.shape[1]
    out = logits.unflatten(0, (B, -1)).clone()  # [B, T, V]
    ids = torch.arange(first, first + V, device=logits.device)
    of_row = [t[slots, None].double() for t in (shaping.repetition, shaping.frequency, shaping.presence)]
    repetition, frequency, presence = of_row
    is_shaped = shaping.shaped[slots, None]
    shaping.seen[slots] += (is_shaped & (ids == last[:, None])).int() * ONCE
    seen = shaping.seen[slots]
    count = seen // ONCE

    raw = out[:, 0]
    x = raw.double() + shaping.bias[slots]
    ends = (seen & ENDS > 0) & (positions.view(B, -1)[:, :1] < shaping.ends_from[slots, None])
    x = torch.where(ends, x.clamp(max=FORBIDDEN), x)
    x = torch.where((seen & IN_PROMPT > 0) | (count > 0), torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * count - presence * (count > 0)
    allowed = shaping.allowed[slots][:, ids // 32] >> (ids % 32) & 1 > 0
    x = torch.where(allowed, x, -torch.inf)
    out[:, 0] = torch.where(is_shaped & (raw < torch.inf), x.float(), raw)  # a broken row stays broken
    return out.flatten(0, 1)
