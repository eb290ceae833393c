"""linear, qkv_append and their sends with weights in e4m3: kernels and reference against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention.kv_append import kv_append
from kernels.dense import linear_fp8_sm90
from kernels.dense.linear import linear
from kernels.dense.qkv_append import qkv_append
from kernels.dense.reference import linear as reference
from kernels.scaled import ScaledMatrix, groups

CASES = [
    pytest.param(op, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.gpu] * (dtype is torch.bfloat16))
    for name, op in (("kernel", linear), ("reference", reference))
    for dtype in (torch.float32, torch.bfloat16)
]
# Ragged groups, cuts inside them, one scale a row, and more columns than a program's threads load at once.
SHAPES = [
    (1, 40, 256, 0), (1, 9, 1100, 96), (2, 33, 300, 64), (3, 64, 144, 100), (4, 7, 511, 16), (7, 50, 400, 64),
    (16, 65, 128, 0), (33, 130, 272, 112), (100, 96, 520, 0), (1, 24, 200, None), (5, 24, 200, None), (1, 8, 48, 80),
]  # fmt: skip


def scaled(rows: int, columns: int, begin: int | None, device: Any, seed: int = 0) -> ScaledMatrix:
    """A matrix with scales from 1e-6 to 1e2, and NaN behind its rows; `begin` None: one scale a row."""
    generator = torch.Generator().manual_seed(seed)
    group, begin = (columns, 0) if begin is None else (128, begin)
    data = torch.full((rows + 4, columns), torch.nan)
    data[:rows] = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448)
    count = groups(begin, columns, group)
    scales = 10 ** (torch.rand(count, rows, generator=generator) * 8 - 6)
    return ScaledMatrix(data.to(device, torch.float8_e4m3fn)[:rows], scales.to(device), group, begin)


def expected(
    x: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the sum of its terms' sizes."""
    whole = weight.unpacked(torch.float64)
    y, size = x.double() @ whole.T, x.double().abs() @ whole.T.abs()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if gated:
        (gate, up), (a, b) = y.chunk(2, 1), size.chunk(2, 1)
        y = gate * torch.sigmoid(gate) * up
        size = a * b + a + b
    return y, size


def close(y: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor, eps: float) -> bool:
    """Sums in fp32 are off by a few of its units of their terms' sizes; results are rounded to `eps`."""
    return bool(((y.double() - wanted).abs() <= size * 2e-6 + (3 * size + wanted.abs()) * eps).all())


@pytest.mark.parametrize("op, dtype", CASES)
@pytest.mark.parametrize("biased, gated", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("N, R, K, begin", SHAPES)
def test_linear(
    N: int, R: int, K: int, begin: int | None, biased: bool, gated: bool, op: Any, dtype: torch.dtype, device: Any
) -> None:
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(N, 2 * K, generator=generator).to(device, dtype)[:, :K]
    weight = scaled(2 * R if gated else R, K, begin, device)
    bias = torch.randn(len(weight), generator=generator).to(device, dtype) if biased else None
    y = linear(x, weight, bias, gated=gated) if op is linear else reference(x, weight, bias, gated, dtype)
    wanted, size = expected(x, weight, bias, gated)
    eps = 0.0 if dtype is torch.float32 else 2.0**-8
    if op is reference and eps:
        size = size * 4  # which rounds weights to bf16, and both factors of a gate before their product
    assert y.dtype == dtype and close(y, wanted, size, eps)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_exact_results_are_not_rounded(dtype: torch.dtype, device: Any) -> None:
    for N, R, K, begin in SHAPES:
        x, weight = torch.randn(N, K).to(device, dtype), scaled(R, K, begin, device)
        y = linear(x, weight, exact=True)
        assert y.dtype == torch.float32 and close(y, *expected(x, weight, None, False), 0.0), (N, R, K, begin)


@pytest.mark.parametrize("wrong", ["group", "row", "begin"])
def test_a_wrong_scale_is_caught(wrong: str, device: Any) -> None:
    """Scales of the next group or row, and groups that begin a column later."""
    for N in (1, 4, 20):
        x, weight = torch.randn(N, 300).to(device), scaled(40, 300, 64, device)
        y, (wanted, size) = linear(x, weight), expected(x, weight, None, False)
        assert close(y, wanted, size, 0.0)
        planted = {
            "group": replace(weight, scales=weight.scales.roll(1, 0)),
            "row": replace(weight, scales=weight.scales.roll(1, 1)),
            "begin": replace(weight, begin=65),
        }[wrong]
        assert not close(linear(x, planted), wanted, size, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("N, K, begin", [(1, 300, 64), (3, 200, 0), (4, 256, None), (9, 144, 16)])
def test_qkv_append(N: int, K: int, begin: int | None, dtype: torch.dtype, device: Any) -> None:
    """Queries and cached keys and values are those of the projection and `kv_append`."""
    D, q_heads, kv_heads = 32, 3, 2
    x, weight = torch.randn(N, K).to(device, dtype), scaled((q_heads + 2 * kv_heads) * D, K, begin, device)
    bias = torch.randn(len(weight)).to(device, dtype)
    angle = torch.rand(N, D // 2, device=device)
    cos, sin, slots = angle.cos().to(dtype), angle.sin().to(dtype), torch.arange(N, device=device) * 3 - 1
    found, wanted = (torch.full((2, 4, 16, kv_heads, D), 7.0, device=device, dtype=dtype) for _ in range(2))
    q = qkv_append(x, weight, bias, cos, sin, *found, slots)
    projected = expected(x, weight, bias, False)[0].to(dtype).unflatten(1, (-1, D))
    other = kv_append(projected, cos, sin, *wanted, slots)
    largest = projected.abs().max().item()
    # Of the largest: sums are off by 1e-6 of their terms' sizes, 30 times as large; bf16 is rounded twice.
    atol = 1e-4 if dtype is torch.float32 else 1e-2
    for mine, theirs in ((q, other), (found, wanted)):
        torch.testing.assert_close(mine / largest, theirs / largest, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("R, K, begin", [(40, 300, 64), (33, 130, None)])
def test_many_rows_unpack_the_matrix(
    R: int, K: int, begin: int | None, gated: bool, dtype: torch.dtype, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn, so that one matrix follows another in the same memory."""
    monkeypatch.setattr("kernels.dense.linear_scaled.MANY", 5)
    for seed in range(2):
        weight, x = scaled(2 * R if gated else R, K, begin, device, seed), torch.randn(7, K).to(device, dtype)
        (wanted, size), y = expected(x, weight, None, gated), linear(x, weight, gated=gated)
        # Weights are rounded too, each by 2^-9.
        assert close(y, wanted, size * 4, 0.0 if dtype is torch.float32 else 2.0**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "N, R, K, begin",
    [(1, 72, 528, 64), (2, 72, 64, 0), (5, 40, 528, 64), (8, 640, 448, 0), (16, 72, 1040, 112), (31, 136, 368, 48),
     (17, 264, 2368, None), (9, 8, 8192, 16), (33, 200, 400, 96), (64, 136, 1792, 0), (65, 72, 528, 64),
     (100, 264, 2368, None), (128, 136, 400, 0)],
)  # fmt: skip
def test_hopper(N: int, R: int, K: int, begin: int | None, gated: bool, dtype: torch.dtype, device: Any) -> None:
    """However many programs share K, which leave no sums behind; slots are filled again."""
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(N, 2 * K, generator=generator).to(device, dtype)[:, :K]
    weight = scaled(2 * R if gated else R, K, begin, device)
    if dtype is torch.float16:
        weight.scales.clamp_(max=1e-3)  # results are below 65,504
    bias = torch.randn(len(weight), generator=generator).to(device, dtype)
    assert linear_fp8_sm90.fits(x, weight, R if gated else None)
    wanted, size = expected(x, weight, bias, gated)
    eps = 2.0**-11 if dtype is torch.float16 else 2.0**-8
    assert close(linear(x, weight, bias, gated=gated), wanted, size, eps)
    for split in (1, 2, 3, 5, 8, 16):
        if split <= -(-(K + weight.begin) // (256 if N <= 16 else 128)):
            outs = [torch.full((N, R), torch.nan, dtype=dtype, device=device) for _ in range(2)]
            for out in outs:
                linear_fp8_sm90.launch(x, weight, bias, out, gated, split, 40)
            assert close(outs[0], wanted, size, eps) and torch.equal(*outs), split


@pytest.mark.gpu
def test_hopper_does_not_take(device: torch.device) -> None:
    x = torch.randn(4, 512, device=device, dtype=torch.bfloat16)
    for rows, columns, begin in ((40, 512, 8), (40, 504, 0), (40, 512, 0)):
        weight = scaled(rows, columns, begin, device)
        assert linear_fp8_sm90.fits(x[:, :columns], weight) == ((columns, begin) == (512, 0))
    assert not linear_fp8_sm90.fits(x, weight, 20), "pairs are interleaved by eights"
    assert not linear_fp8_sm90.fits(x, weight.rows(8, 40)), "its scales are apart"
    assert not linear_fp8_sm90.fits(x.float(), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("begin", [0, 64, None])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("N, R, K", [(1, 3584, 448), (1, 1152, 3584), (2, 2368, 3584), (8, 576, 7168), (32, 4096, 1792),
                                     (64, 1280, 8192), (300, 2112, 7168), (2049, 1536, 2048)])  # fmt: skip
def test_matrices_of_models(N: int, R: int, K: int, gated: bool, begin: int | None, device: Any) -> None:
    weight = scaled(2 * R if gated else R, K, begin, device)
    weight.scales.fill_(1e-4 / K**0.5)
    x = torch.randn(N, K, device=device, dtype=torch.bfloat16)
    wanted, size = expected(x, weight, None, gated)
    y = linear(x, weight, gated=gated)
    # Sums are rounded once, a gate's factors and their product: units of 2^-8 of values far below their terms' sizes.
    assert close(y, wanted, size, 0.0) or (y.double() - wanted).norm() <= 6e-3 * wanted.norm()
