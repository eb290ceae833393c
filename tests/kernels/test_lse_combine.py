"""lse_combine: kernel and reference against float64; empty sources, NaN, order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention.lse_combine import lse_combine
from kernels.attention.reference import flash_decode
from kernels.attention.reference import lse_combine as reference
from tests.kernels.oracle import make_case


def case(
    W: int, N: int, H: int, D: int, empty: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random partials; some sources are empty, and what they left is NaN."""
    gen = torch.Generator().manual_seed(W * 1000 + N)
    lse = torch.randn(W, N, H, generator=gen) * 10
    partials = torch.randn(W, N, H, D, generator=gen).to(dtype)
    gone = torch.rand(W, N, H, generator=gen) < empty
    lse[gone] = -torch.inf
    partials[gone] = torch.nan
    return partials.to(device), lse.to(device)


def expected(partials: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    p, logs = partials.double().cpu(), lse.double().cpu()
    total = logs.logsumexp(0)
    weights = (logs - total.masked_fill(total == -torch.inf, 0)).exp()
    p = p.masked_fill((logs == -torch.inf)[..., None], 0)
    return (weights[..., None] * p).sum(0), total


def check(out: Tensor, out_lse: Tensor, partials: Tensor, lse: Tensor) -> None:
    """fp32 sums of up to 9 terms of size 4: 1e-5. Below fp32, the result is rounded once, which a GPU does to half a
    unit of 4; Triton's interpreter cuts bf16 off, a whole unit."""
    want, want_lse = expected(partials, lse)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8 + 1e-5, torch.float16: 4 * 2**-12 + 1e-5}[out.dtype]
    torch.testing.assert_close(out.double().cpu(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(out_lse.double().cpu(), want_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("W, N, H, D", [(1, 3, 2, 64), (2, 1, 1, 8), (3, 5, 3, 80), (8, 2, 4, 128), (39, 2, 1, 256)])
@pytest.mark.parametrize("empty", [0.0, 0.6])
@pytest.mark.parametrize("op", [lse_combine, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("many", [2048, 0], ids=["one a program", "several a program"])
def test_against_float64(
    op: Any, W: int, N: int, H: int, D: int, empty: float, many: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kernels.attention.lse_combine.MANY", many)
    partials, lse = case(W, N, H, D, empty, torch.float32, device)
    options = {} if op is reference else {"return_lse": True}
    check(*op(partials, lse, **options), partials, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, device: torch.device) -> None:
    partials, lse = case(4, 3, 2, 128, 0.3, dtype, device)
    check(*lse_combine(partials, lse, return_lse=True), partials, lse)


@pytest.mark.parametrize("op", [lse_combine, reference], ids=["kernel", "reference"])
def test_nothing_anywhere_is_zero(op: Any, device: torch.device) -> None:
    partials, lse = case(3, 2, 2, 16, 1.0, torch.float32, device)
    options = {} if op is reference else {"return_lse": True}
    out, out_lse = op(partials, lse, **options)
    assert (out == 0).all() and (out_lse == -torch.inf).all()


@pytest.mark.parametrize("op", [lse_combine, reference], ids=["kernel", "reference"])
def test_nan_surfaces_where_it_is_and_nowhere_else(op: Any, device: torch.device) -> None:
    partials, lse = case(3, 2, 2, 16, 0.0, torch.float32, device)
    lse[1, 0, 1] = torch.nan
    partials[2, 1, 0, 5] = torch.nan
    options = {} if op is reference else {"return_lse": True}
    out, _ = op(partials, lse, **options)
    assert out[0, 1].isnan().all() and out[1, 0, 5].isnan()
    assert not out[0, 0].isnan().any() and not out[1, 1].isnan().any() and not out[1, 0, :5].isnan().any()


@pytest.mark.parametrize("op", [lse_combine, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("D, N", [(128, 37), (256, 37), pytest.param(128, 40_000, marks=pytest.mark.gpu)])
def test_into_one_of_the_sources(op: Any, D: int, N: int, device: torch.device) -> None:
    partials, lse = case(2, N, 4, D, 0.3, torch.float32, device)
    sources = partials.clone(), lse.clone()
    options = {} if op is reference else {"return_lse": True}
    op(partials, lse, out=partials[0], out_lse=lse[0], **options)
    check(partials[0], lse[0], *sources)


def test_strided_views_and_given_outputs(device: torch.device) -> None:
    partials, lse = case(4, 3, 6, 64, 0.3, torch.float32, device)
    part, part_lse = partials[:, :, 1:4], lse[:, :, 1:4]
    out = torch.full((3, 5, 64), torch.nan, device=device)
    out_lse = torch.full((3, 5), torch.nan, device=device)
    lse_combine(part, part_lse, out=out[:, 2:], out_lse=out_lse[:, 2:])
    check(out[:, 2:], out_lse[:, 2:], part, part_lse)
    assert out[:, :2].isnan().all() and out_lse[:, :2].isnan().all()


def test_order_is_the_sources(device: torch.device) -> None:
    """Terms whose sum depends on the order: large, -large, small is small; small, large, -large is not."""
    lse = torch.zeros(3, 1, 1, device=device)
    values = torch.tensor([3e8, -3e8, 1.0], device=device)[:, None, None, None].expand(3, 1, 1, 16).contiguous()
    kept = lse_combine(values, lse)
    lost = lse_combine(values.flip(0).contiguous(), lse)
    assert (kept * 3 == 1).all() and (lost == 0).all()


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 10_000))
def test_any_cut_of_the_keys_combines_to_the_whole(parts: int, length: int, seed: int) -> None:
    """Attending to shards and combining is attending to all: the property that Helix stands on."""
    whole = make_case([1], [length], seed=seed)
    cuts = sorted(torch.randint(0, length + 1, (parts - 1,), generator=torch.Generator().manual_seed(seed)).tolist())
    bounds = list(zip([0, *cuts], [*cuts, length], strict=True))
    shards = [
        flash_decode(whole.q[:, None], replace(whole.paged(), lo=torch.tensor([[lo]]), hi=torch.tensor([[hi]])))
        for lo, hi in bounds
    ]
    out, lse = reference(torch.stack([o[:, 0] for o, _ in shards]), torch.stack([s[:, 0] for _, s in shards]))
    want, want_lse = whole.expected()
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)


def test_a_shifted_lse_is_caught(device: torch.device) -> None:
    partials, lse = case(3, 2, 2, 16, 0.0, torch.float32, device)
    shifted = lse.clone()
    shifted[1] += 0.01
    with pytest.raises(AssertionError):
        check(*lse_combine(partials, shifted, return_lse=True), partials, lse)
