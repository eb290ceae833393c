"""linear: kernel and reference against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.linear import linear
from kernels.reference.linear import linear as reference

# Triton's interpreter multiplies the bit patterns of bf16: the kernel takes bf16 on a GPU alone.
CASES = [
    pytest.param(op, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.gpu] * (dtype is torch.bfloat16))
    for name, op in (("kernel", linear), ("reference", reference))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize("op, dtype", CASES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "N, R, K", [(1, 40, 64), (5, 33, 100), (4, 7, 511), (3, 64, 48), (17, 8, 32), (1, 9, 1100), (2, 1, 16)]
)
def test_linear(N: int, R: int, K: int, biased: bool, gated: bool, op: Any, dtype: torch.dtype, device: Any) -> None:
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(N, 2 * K, generator=generator).to(device, dtype)[:, :K]
    rows = 2 * R if gated else R
    # What lies behind the weight must not be read into a result.
    wide = torch.full((rows + 8, K), torch.nan).to(device, dtype)
    wide[:rows] = torch.randn(rows, K, generator=generator).div(K**0.5).to(device, dtype)
    bias = torch.randn(rows, generator=generator).to(device, dtype) if biased else None
    y = op(x, wide[:rows], bias, gated=gated)
    wanted = x.double() @ wide[:rows].double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = wanted.chunk(2, 1)
        wanted = gate / (1 + (-gate).exp()) * up
    assert y.dtype == dtype and y.shape == wanted.shape
    # fp32: sums of up to 511 terms of size 1/sqrt(K). Below: a rounding of values up to 4, and for the gate the
    # roundings of both factors and of their product, up to 16.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), wanted, atol=max(2e-5, (16 if gated else 4) * eps), rtol=0)


def test_nothing_to_do(device: torch.device) -> None:
    assert linear(torch.ones(2, 0, device=device), torch.ones(3, 0, device=device)).tolist() == [[0.0] * 3] * 2
    assert linear(torch.ones(0, 4, device=device), torch.ones(3, 4, device=device)).shape == (0, 3)
    assert linear(torch.ones(2, 4, device=device), torch.ones(0, 4, device=device), gated=True).shape == (2, 0)


def test_a_row_left_out_is_caught(device: torch.device) -> None:
    x, weight = torch.ones(1, 64, device=device), torch.ones(16, 64, device=device)
    weight[9] = 2
    with pytest.raises(AssertionError):
        torch.testing.assert_close(linear(x, weight), torch.full((1, 16), 64.0, device=device))
