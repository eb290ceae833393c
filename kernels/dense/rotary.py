"""RoPE angles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import angles as reference


@triton.jit
def _angles_kernel(positions, inv_freq, cos, sin, factor, HALF: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    frequency = tl.load(inv_freq + d, mask=d < HALF, other=0.0)
    angle = tl.load(positions + n).to(tl.float32) * frequency
    tl.store(cos + n * HALF + d, tl.cos(angle) * tl.where(frequency == 0.0, 1.0, factor), mask=d < HALF)
    tl.store(sin + n * HALF + d, tl.sin(angle) * factor, mask=d < HALF)


def angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cos and sin [N, D / 2] of positions [N] int64 times inv_freq [D / 2] fp32, scaled by `factor`, in fp32.

    Where a frequency is 0, `factor` is ignored: cos is 1, sin 0.
    """
    if not dispatch.on_gpu(positions) or len(positions) == 0:
        return reference(positions, inv_freq, factor, dtype)
    half = len(inv_freq)
    cos, sin = (torch.empty(len(positions), half, dtype=dtype, device=positions.device) for _ in range(2))
    assert positions.is_contiguous()
    _angles_kernel[(len(positions),)](
        positions, inv_freq, cos, sin, factor, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1
    )
    return cos, sin
