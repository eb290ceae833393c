"""linear: kernel and reference against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.kernels.linear import MATRICES
from kernels.dense import linear_fp8_sm90, linear_sm90
from kernels.dense.linear import linear
from kernels.dense.reference import linear as reference
from kernels.scaled import quantised

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
    x, weight, bias, wanted = _case(generator, N, R, K, biased, gated, dtype, device)
    y = linear(x, weight, bias, gated=gated) if op is linear else reference(x, weight, bias, gated, dtype)
    _assert_close(y, wanted, gated, dtype)


@pytest.mark.parametrize("op, dtype", CASES)
@pytest.mark.parametrize("N, R, K", [(1, 40, 64), (4, 7, 511), (17, 8, 32), (5, 33, 528)])
def test_exact_results_are_not_rounded(
    N: int, R: int, K: int, op: Any, dtype: torch.dtype, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if op is reference:
        monkeypatch.setattr("kernels.dispatch.on_gpu", lambda x: False)
    x, weight, _, wanted = _case(torch.Generator().manual_seed(K), N, R, K, False, False, dtype, device)
    y = linear(x, weight, exact=True)
    # Products of 16-bit numbers are exact in fp32, and sums of up to 528 such terms of size 1/sqrt(K) are off by 2e-5
    # at most; a rounding to 16 bits would be off by 2^-11 of values up to 4.
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), wanted, atol=2e-5, rtol=0)


def _case(
    generator: torch.Generator, N: int, R: int, K: int, biased: bool, gated: bool, dtype: torch.dtype, device: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x, strided; a weight with NaN behind it, which must not be read into a result; bias; the result in float64."""
    x = torch.randn(N, 2 * K, generator=generator).to(device, dtype)[:, :K]
    rows = 2 * R if gated else R
    wide = torch.full((rows + 8, K), torch.nan).to(device, dtype)
    wide[:rows] = torch.randn(rows, K, generator=generator).div(K**0.5).to(device, dtype)
    bias = torch.randn(rows, generator=generator).to(device, dtype) if biased else None
    wanted = x.double() @ wide[:rows].double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = wanted.chunk(2, 1)
        wanted = gate / (1 + (-gate).exp()) * up
    return x, wide[:rows], bias, wanted


def _assert_close(y: torch.Tensor, wanted: torch.Tensor, gated: bool, dtype: torch.dtype) -> None:
    assert y.dtype == dtype and y.shape == wanted.shape
    # fp32: sums of up to 511 terms of size 1/sqrt(K). Below: a rounding of values up to 4 (sums in fp32 of up to 8,192
    # terms are far closer), and for the gate the roundings of both factors and of their product, up to 16.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), wanted, atol=max(2e-5, (16 if gated else 4) * eps), rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "N, R, K", [(2, 65, 64), (5, 33, 528), (8, 640, 448), (16, 70, 1040), (31, 130, 368), (17, 257, 2368), (9, 1, 8192)]
)
def test_hopper(N: int, R: int, K: int, biased: bool, gated: bool, dtype: torch.dtype, device: Any) -> None:
    generator = torch.Generator().manual_seed(K)
    x, weight, bias, wanted = _case(generator, N, R, K, biased, gated, dtype, device)
    assert linear_sm90.fits(x, weight)
    _assert_close(linear(x, weight, bias, gated=gated), wanted, gated, dtype)
    for split in (1, 2, 4, 8):
        if K % (16 * split) == 0:
            out = torch.full((N, R), torch.nan, dtype=dtype, device=device)
            # So little shared memory that slots are filled again.
            linear_sm90.launch(x, weight, bias, out, gated, split, 40)
            _assert_close(out, wanted, gated, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("split", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("N, R, K", [(16, 70, 1680), (17, 257, 2368), (5, 40, 1040)])
def test_any_number_shares_k(N: int, R: int, K: int, split: int, gated: bool, device: Any) -> None:
    """In slices of its own or, where they would not begin at 16 bytes, in runs of steps; and leaves no sums behind."""
    x, weight, bias, wanted = _case(torch.Generator().manual_seed(K), N, R, K, True, gated, torch.bfloat16, device)
    outs = [torch.full((N, R), torch.nan, dtype=x.dtype, device=device) for _ in range(3)]
    for out in outs:
        linear_sm90.launch(x, weight, bias, out, gated, split, 40)
    _assert_close(outs[0], wanted, gated, x.dtype)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [linear_sm90, linear_fp8_sm90])
@pytest.mark.parametrize("split", [3, 4])
def test_layers_in_a_graph(split: int, kernel: Any, device: torch.device) -> None:
    """Each reads what the one before wrote, in one workspace: however they overlap, the bits are the same."""
    generator = torch.Generator().manual_seed(0)
    K = 2048
    gate, down = (
        torch.randn(rows, K, generator=generator).div(K**0.5).to(device, torch.bfloat16) for rows in (2 * K, K)
    )
    if kernel is linear_fp8_sm90:
        gate, down = quantised(gate), quantised(down)
    x = torch.randn(8, K, generator=generator).to(device, torch.bfloat16)
    ys = [torch.empty_like(x) for _ in range(20)]

    def layers(between: Any) -> None:
        for i, y in enumerate(ys):
            weight, gated = (gate, True) if i % 2 else (down, False)
            kernel.launch(ys[i - 1] if i else x, weight, None, y, gated, split)
            between()

    layers(torch.cuda.synchronize)
    wanted = [y.clone() for y in ys]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(lambda: None)
    for _ in range(50):
        for y in ys:
            y.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, ys, wanted))


def test_splits() -> None:
    """One program an SM of a small matrix, two of one that is streamed."""
    assert linear_sm90.split_of(1152, 3584, False, 132) == 2
    assert linear_sm90.split_of(1792, 4096, True, 132) == 4
    assert linear_sm90.split_of(19008, 3584, False, 132) == 1
    assert linear_sm90.split_of(64, 48, False, 132) == 1
    # Where powers of two would leave more than a third of the SMs idle:
    assert linear_sm90.split_of(1280, 8192, False, 132) == 6
    assert linear_sm90.split_of(2368, 3584, True, 132) == 3


@pytest.mark.parametrize("sms", [78, 132])
def test_no_program_without_a_step(sms: int) -> None:
    shapes = [*product(range(1, 9000, 61), (16, 48, 432, 2880, 4112, 8192, 53248), (False, True))]
    for R, K, gated in shapes + [(m.rows, m.columns, m.gated) for m in MATRICES]:
        split = linear_sm90.split_of(R, K, gated, sms)
        assert K % (16 * split) == 0 or split <= -(-K // 128)


def test_nothing_to_do(device: torch.device) -> None:
    assert linear(torch.ones(2, 0, device=device), torch.ones(3, 0, device=device)).tolist() == [[0.0] * 3] * 2
    assert linear(torch.ones(0, 4, device=device), torch.ones(3, 4, device=device)).shape == (0, 3)
    assert linear(torch.ones(2, 4, device=device), torch.ones(0, 4, device=device), gated=True).shape == (2, 0)


def test_a_row_left_out_is_caught(device: torch.device) -> None:
    x, weight = torch.ones(1, 64, device=device), torch.ones(16, 64, device=device)
    weight[9] = 2
    with pytest.raises(AssertionError):
        torch.testing.assert_close(linear(x, weight), torch.full((1, 16), 64.0, device=device))
