"""kv_append: kernel and reference against float64; each token goes where its slot says, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.kv_append import kv_append
from kernels.attention.reference import kv_append as reference


def expected(x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """RMSNorm and rotation of [N, heads, D] in float64."""
    x, cos, sin = x.double().cpu(), cos.double().cpu()[:, None], sin.double().cpu()[:, None]
    if gain is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double().cpu()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


SHAPES = [  # query heads, KV heads, head dim, page size
    (4, 2, 64, 16),
    (3, 1, 80, 1),
    (5, 5, 8, 7),
    (7, 1, 256, 64),
    (4, 0, 64, 16),  # queries alone
]


@pytest.mark.parametrize("op", [kv_append, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("q_heads, kv_heads, dim, page_size", SHAPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("N, many", [(6, 1024), (19, 0)], ids=["one a program", "several a program"])
def test_rotates_and_writes_slots_and_nothing_else(
    op: Any,
    q_heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    norms: bool,
    dtype: torch.dtype,
    blocks: bool,
    N: int,
    many: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.attention.kv_append.MANY", many)
    pages = 5
    gen = torch.Generator().manual_seed(dim)
    # Rows of a wider tensor: strided.
    wide_qkv = torch.randn(N, q_heads + 2 * kv_heads + 1, dim, generator=gen).to(dtype).to(device)
    qkv = wide_qkv[:, 1:]
    before = wide_qkv.clone()
    angle = torch.randn(N, dim // 2, generator=gen) * 100
    cos, sin = angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
    gains = torch.randn(2, dim, generator=gen).to(dtype).to(device)
    # Layers of one cache: pages are apart from each other; or a block for each head, its keys and then its values.
    shape = (pages, kv_heads, 2, page_size, dim) if blocks else (pages, 2, page_size, kv_heads, dim)
    wide = torch.full(shape, torch.nan, dtype=dtype, device=device)
    k_cache, v_cache = wide.permute(2, 0, 3, 1, 4) if blocks else wide.transpose(0, 1)
    slots = torch.randperm(pages * page_size, generator=gen)[:N]
    slots = torch.cat([slots, torch.full((N - len(slots),), -1)])
    slots[2] = -1
    q = op(qkv, cos, sin, k_cache, v_cache, slots.to(device), (gains[0], gains[1], 1e-5) if norms else None)

    assert torch.equal(wide_qkv, before), "the projections are read alone"
    # fp32: a few roundings of 2^-24 of values up to 30. fp16: three roundings of 2^-11 of values up to 16.
    tolerance = 3e-5 if dtype == torch.float32 else 3 * 16 * 2**-11
    want_q = expected(qkv[:, :q_heads], cos, sin, gains[0] if norms else None, 1e-5)
    want_k = expected(qkv[:, q_heads : q_heads + kv_heads], cos, sin, gains[1] if norms else None, 1e-5)
    assert q.dtype == dtype
    torch.testing.assert_close(q.double().cpu(), want_q, atol=tolerance, rtol=0)
    untouched = set(range(pages * page_size))
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            untouched.remove(slot)
            stored = k_cache[slot // page_size, slot % page_size].double().cpu()
            torch.testing.assert_close(stored, want_k[n], atol=tolerance, rtol=0)
            assert torch.equal(v_cache[slot // page_size, slot % page_size], qkv[n, q_heads + kv_heads :])
    for slot in untouched:
        assert k_cache[slot // page_size, slot % page_size].isnan().all()
        assert v_cache[slot // page_size, slot % page_size].isnan().all()


@pytest.mark.parametrize("op", [kv_append, reference], ids=["kernel", "reference"])
def test_a_step_of_other_ranks_tokens_writes_nothing(op: Any, device: torch.device) -> None:
    k_cache = torch.full((2, 4, 1, 16), torch.nan, device=device)
    v_cache = k_cache.clone()
    qkv = torch.randn(3, 4, 16, device=device)
    angle = torch.zeros(3, 8, device=device)
    q = op(qkv, angle + 1, angle, k_cache, v_cache, torch.full((3,), -1, device=device))
    assert k_cache.isnan().all() and v_cache.isnan().all()
    assert torch.equal(q, qkv[:, :2]), "an angle of zero turns nothing"


def test_a_wrong_half_is_caught(device: torch.device) -> None:
    """Rotating neighbours instead of halves is the classic mistake."""
    qkv = torch.randn(2, 3, 16, device=device)
    angle = torch.randn(2, 8, device=device)
    cache = torch.zeros(1, 4, 1, 16, device=device)
    slots = torch.tensor([0, 1], device=device)
    q = kv_append(qkv, angle.cos(), angle.sin(), cache, cache.clone(), slots)
    a, b = qkv[:, :1, ::2].double(), qkv[:, :1, 1::2].double()
    c, s = angle.cos().double()[:, None], angle.sin().double()[:, None]
    neighbours = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(q.double(), neighbours, atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements() -> None:
    pages = (1 << 32) // (64 * 128)
    k_cache = torch.zeros(pages, 64, 1, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    qkv = torch.randn(2, 3, 128, device="cuda").bfloat16()
    zero = torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([pages * 64 - 1, 5], device="cuda")
    kv_append(qkv, zero + 1, zero, k_cache, v_cache, slots)
    assert torch.equal(k_cache[-1, -1, 0], qkv[0, 1]) and torch.equal(v_cache[-1, -1, 0], qkv[0, 2])
    assert torch.equal(k_cache[0, 5, 0], qkv[1, 1]) and k_cache.count_nonzero() == 2 * 128
