"""head_squares, and kv_append with norms over all heads: kernel and reference against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.attention.head_squares import head_squares
from kernels.attention.kv_append import kv_append
from kernels.attention.reference import head_squares as reference_squares
from kernels.attention.reference import kv_append as reference_append
from tests.kernels.test_kv_append import expected

SHAPES = [(4, 2, 64), (3, 1, 80), (5, 5, 8), (48, 8, 128), (7, 0, 16)]  # query heads, KV heads, head dim


@pytest.mark.parametrize("op", [head_squares, reference_squares], ids=["kernel", "reference"])
@pytest.mark.parametrize("q_heads, kv_heads, dim", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("N", [0, 1, 5])
def test_squares(
    op: Any, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, N: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(N, q_heads + 2 * kv_heads + 1, dim, generator=generator).to(dtype).to(device)
    wide[:, 0] = torch.nan  # not of these heads
    wide[:, q_heads + kv_heads + 1 :] = torch.nan  # values
    shares = 1 / (q_heads * dim), 0.25
    got = op(wide[:, 1:], kv_heads, shares)
    heads = wide[:, 1:].double().square()
    parts = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]
    wanted = torch.stack([p.sum((1, 2)) * s for p, s in zip(parts, shares, strict=True)], 1)
    assert got.dtype == torch.float32 and got.shape == (N, 2)
    # fp32 sums of up to 6144 positive numbers: at most a few units of 2^-24 for each of the tree's 20 levels.
    torch.testing.assert_close(got.double(), wanted, rtol=4e-6, atol=0)


@pytest.mark.parametrize("op", [kv_append, reference_append], ids=["kernel", "reference"])
@pytest.mark.parametrize("q_heads, kv_heads, dim", SHAPES[:3])
@pytest.mark.parametrize("N, many", [(6, 1024), (19, 0)], ids=["one a program", "several a program"])
def test_norms_over_all_heads(
    op: Any, q_heads: int, kv_heads: int, dim: int, N: int, many: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kernels.attention.kv_append.MANY", many)
    generator = torch.Generator().manual_seed(dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    qkv, angle = random(N, q_heads + 2 * kv_heads, dim), random(N, dim // 2)
    q_gain, k_gain = random(q_heads, dim), random(kv_heads, dim)
    k_cache = torch.full((1, 32, kv_heads, dim), torch.nan, device=device)
    v_cache, slots = k_cache.clone(), torch.arange(N, device=device) + 3
    squares = head_squares(qkv, kv_heads, (1 / (q_heads * dim), 1 / (kv_heads * dim)))
    q = op(qkv, angle.cos(), angle.sin(), k_cache, v_cache, slots, (q_gain, k_gain, 1e-2), means=squares)
    for got, heads, gain in (
        (q, qkv[:, :q_heads], q_gain),
        (k_cache[0, 3 : 3 + N], qkv[:, q_heads : q_heads + kv_heads], k_gain),
    ):
        normed = heads.double() * (heads.double().square().mean((1, 2), keepdim=True) + 1e-2).rsqrt() * gain.double()
        wanted = expected(normed.to(device), angle.cos(), angle.sin(), None, 0.0)
        # fp32: a few roundings of 2^-24 of values up to 16.
        torch.testing.assert_close(got.double().cpu(), wanted, atol=1e-5, rtol=0)
    assert torch.equal(v_cache[0, 3 : 3 + N], qkv[:, q_heads + kv_heads :])
    assert k_cache[0, :3].isnan().all() and k_cache[0, 3 + N :].isnan().all()


def test_a_norm_of_each_head_is_caught(device: torch.device) -> None:
    qkv = torch.randn(4, 5, 16, device=device) * torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0], device=device)[:, None]
    gains, zero = torch.ones(3, 16, device=device), torch.zeros(4, 8, device=device)
    cache, slots = torch.zeros(1, 4, 1, 16, device=device), torch.arange(4, device=device)
    given = qkv, zero + 1, zero, cache, cache.clone(), slots
    apart = kv_append(*given, (gains[0], gains[0], 1e-5))
    together = kv_append(*given, (gains, gains[:1], 1e-5), means=head_squares(qkv, 1, (1 / 48, 1 / 16)))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(apart, together, atol=1e-2, rtol=0)
