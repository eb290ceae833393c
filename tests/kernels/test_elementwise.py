"""rms_norm, silu_mul and sigmoid_mul: kernel and reference against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.dense.reference import rms_norm as reference_norm
from kernels.dense.reference import sigmoid_mul as reference_sigmoid
from kernels.dense.reference import silu_mul as reference_silu
from kernels.dense.rms_norm import rms_norm
from kernels.dense.sigmoid_mul import sigmoid_mul
from kernels.dense.silu_mul import silu_mul

# Of values up to about 8: fp32 sums of a thousand terms; below it the roundings named in the ops, half a unit each.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3 * 8 * 2**-11, torch.bfloat16: 3 * 8 * 2**-8}


@pytest.mark.parametrize("op", [rms_norm, reference_norm], ids=["kernel", "reference"])
@pytest.mark.parametrize("N, H", [(1, 64), (5, 72), (3, 1000), (2, 4096)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(op: Any, N: int, H: int, adds: bool, dtype: torch.dtype, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(H)
    x = torch.randn(N, 2 * H, generator=gen).to(dtype).to(device)[:, :H]
    residual = torch.randn(N, H, generator=gen).to(dtype).to(device)
    weight = torch.randn(H, generator=gen).to(dtype).to(device)
    before = x.clone(), residual.clone()
    y, total = op(x, weight, 1e-5, residual if adds else None)
    kept = x + residual if adds else x
    assert torch.equal(total, kept) and y.dtype == dtype
    wide = kept.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("op", [silu_mul, reference_silu], ids=["kernel", "reference"])
@pytest.mark.parametrize("N, F", [(1, 64), (5, 97), (3, 1500), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_mul(op: Any, N: int, F: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(N, 2 * F + 3, generator=torch.Generator().manual_seed(F)).to(dtype).to(device)[:, : 2 * F]
    gate, up = gate_up.double().chunk(2, -1)
    y = op(gate_up)
    assert y.shape == (N, F) and y.dtype == dtype
    torch.testing.assert_close(y.double(), gate / (1 + (-gate).exp()) * up, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("op", [sigmoid_mul, reference_sigmoid], ids=["kernel", "reference"])
@pytest.mark.parametrize("N, F, gates", [(1, 64, 64), (5, 97, 1), (3, 1500, 1500), (2, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sigmoid_mul(op: Any, N: int, F: int, gates: int, dtype: torch.dtype, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(F)
    x, gate = (torch.randn(N, width + 3, generator=gen).to(dtype).to(device)[:, :width] for width in (F, gates))
    y = op(x, gate)
    assert y.shape == (N, F) and y.dtype == dtype
    torch.testing.assert_close(y.double(), x.double() * gate.double().sigmoid(), atol=TOLERANCE[dtype], rtol=0)


def test_nan_passes_through(device: torch.device) -> None:
    x = torch.ones(2, 16, device=device)
    x[1, 3] = torch.nan
    assert rms_norm(x, x[0], 1e-5)[0].isnan().any(1).tolist() == [False, True]
    assert silu_mul(x).isnan().any(1).tolist() == [False, True]


def test_a_forgotten_residual_is_caught(device: torch.device) -> None:
    x = torch.randn(2, 64, device=device)
    y, _ = rms_norm(x, torch.ones(64, device=device), 1e-5)
    wide = (x + x.flip(0)).double()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(y.double(), wide * wide.square().mean(-1, keepdim=True).rsqrt(), atol=1e-2, rtol=0)
