"""`shape_logits` in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Bits of `Shaping.seen`; the bits above them count.
IN_PROMPT, ENDS, ONCE = 1, 2, 4

FORBIDDEN = -1e30  # finite, so that a row that may draw nothing else draws it, and is not broken


@dataclass(frozen=True)
class Shaping:
    """How the logits of each slot are changed before a token is drawn, over this rank's columns.

    Attributes:
        shaped: slots whose logits are changed [S] bool.
        repetition: divides positive logits of tokens that the prompt or the answer has, multiplies others [S] fp32.
        frequency: times the count in the answer, subtracted [S] fp32.
        presence: subtracted where the answer has the token [S] fp32.
        ends_from: positions before it may not hold a token that ends the sequence [S] int64.
        bias: added [S, V_local] fp32.
        seen: [S, V_local] int32: IN_PROMPT, ENDS (it ends the sequence), and ONCE for each time in the answer.
        allowed: a bit for each token of the whole vocabulary, lowest first [S, W] int32; others are never drawn.
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
    """Shapes as in `kernels.tokens.shape_logits`."""
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
    out[:, 0] = torch.where(is_shaped & (raw < torch.inf), x.float(), raw)  # a broken row stays one
    return out.flatten(0, 1)
