"""RMSNorm, fused with the preceding residual add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.dense.reference import rms_norm as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total,
    x_n, residual_n, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    value = tl.load(x + n * x_n + h, mask=h < H, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + n * residual_n + h, mask=h < H, other=0.0).to(tl.float32)
        # Round the sum to the model's dtype before normalizing.
        rounded_sum = value.to(total.dtype.element_ty)
        tl.store(total + n * H + h, rounded_sum, mask=h < H)
        value = rounded_sum.to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    norm_weight = tl.load(weight + h, mask=h < H, other=0.0)
    # Round before applying the weight, as the models were trained.
    rounded = scaled.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + n * H + h, rounded * norm_weight.to(tl.float32), mask=h < H)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes s = x + residual and y = weight * s / rms(s); statistics in fp32.

    Args:
        x: [N, H], last dim contiguous.
        weight: [H].
        residual: [N, H], last dim contiguous; None adds nothing.

    Returns:
        y [N, H] and s [N, H] in x's dtype; s is `x` itself without a residual.
    """
    if not dispatch.on_gpu(x):
        return reference(x, weight, eps, residual)
    N, H = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    out = torch.empty(N, H, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(H)
    _rms_norm_kernel[(N,)](
        x, residual, weight, out, total, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        H=H, BLOCK=block, ADDS=residual is not None, num_warps=min(16, max(1, block // 256)), **pdl_options(x),
    )  # fmt: skip
    return out, total
