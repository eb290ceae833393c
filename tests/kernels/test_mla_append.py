"""mla_append: kernel and reference against float64; a token goes where its slot says, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.mla_append import mla_append
from kernels.reference.mla_append import mla_append as reference
from tests.kernels.test_kv_append import expected

OPS = pytest.mark.parametrize("op", [mla_append, reference], ids=["kernel", "reference"])


@OPS
@pytest.mark.parametrize(
    "heads, latent, rope, page_size", [(4, 32, 8, 16), (1, 40, 24, 1), (20, 512, 64, 64), (9, 8, 8, 7)]
)
@pytest.mark.parametrize("into", ["new", "query", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotates_and_writes_slots_and_nothing_else(
    op: Any, heads: int, latent: int, rope: int, page_size: int, into: str, dtype: torch.dtype, device: torch.device
) -> None:
    pages, N = 5, 6
    gen = torch.Generator().manual_seed(latent)
    # Last parts of wider heads, and columns of a wider projection: strided.
    wide_q = torch.randn(N, heads, 3 + rope, generator=gen).to(dtype).to(device)
    wide_kv = torch.randn(N, 5 + latent + rope, generator=gen).to(dtype).to(device)
    q, kv = wide_q[..., 3:], wide_kv[:, 5:]
    before_q, before_kv = wide_q.clone(), wide_kv.clone()
    angle = torch.randn(N, rope // 2, generator=gen) * 100
    cos, sin = angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
    gain = torch.randn(latent, generator=gen).to(dtype).to(device)
    # Layers of one cache: pages are apart from each other.
    cache = torch.full((pages, 2, page_size, latent + rope), torch.nan, dtype=dtype, device=device)[:, 1]
    slots = torch.randperm(pages * page_size, generator=gen)[:N]
    slots = torch.cat([slots, torch.full((N - len(slots),), -1)])
    slots[2] = -1
    absorbed = torch.full((N, heads, latent + rope), torch.nan, dtype=dtype, device=device)
    out = {"new": None, "query": absorbed[..., latent:], "in place": q}[into]
    want_q = expected(q, cos, sin, None, 0)
    want_key = expected(kv[:, None, latent:], cos, sin, None, 0)[:, 0]
    wide = kv[:, :latent].double().cpu()
    want_latent = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double().cpu()
    got = op(q, kv, cos, sin, gain, 1e-5, cache, slots.to(device), out=out)

    assert out is None or got.data_ptr() == out.data_ptr()
    assert got.dtype == dtype
    assert torch.equal(wide_kv, before_kv) and torch.equal(wide_q[..., :3], before_q[..., :3])
    assert into == "in place" or torch.equal(wide_q, before_q), "the projection is read alone"
    assert absorbed[..., :latent].isnan().all()
    # fp32: a few roundings of 2^-24 of values up to 30. fp16: three roundings of 2^-11 of values up to 16.
    tolerance = 3e-5 if dtype == torch.float32 else 3 * 16 * 2**-11
    torch.testing.assert_close(got.double().cpu(), want_q, atol=tolerance, rtol=0)
    untouched = set(range(pages * page_size))
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            untouched.remove(slot)
            stored = cache[slot // page_size, slot % page_size].double().cpu()
            torch.testing.assert_close(stored[:latent], want_latent[n], atol=tolerance, rtol=0)
            torch.testing.assert_close(stored[latent:], want_key[n], atol=tolerance, rtol=0)
    for slot in untouched:
        assert cache[slot // page_size, slot % page_size].isnan().all()


@OPS
def test_a_step_of_other_ranks_tokens_writes_nothing(op: Any, device: torch.device) -> None:
    cache = torch.full((2, 4, 24), torch.nan, device=device)
    q, kv = torch.randn(3, 2, 8, device=device), torch.randn(3, 24, device=device)
    zero = torch.zeros(3, 4, device=device)
    slots = torch.full((3,), -1, device=device)
    got = op(q, kv, zero + 1, zero, torch.ones(16, device=device), 1e-6, cache, slots)
    assert cache.isnan().all()
    assert torch.equal(got, q), "an angle of zero turns nothing"


def test_a_wrong_half_is_caught(device: torch.device) -> None:
    """Rotating neighbours instead of halves is the classic mistake."""
    q, kv = torch.randn(2, 1, 8, device=device), torch.randn(2, 24, device=device)
    angle = torch.randn(2, 4, device=device)
    cache = torch.zeros(1, 4, 24, device=device)
    slots = torch.tensor([0, 1], device=device)
    got = mla_append(q, kv, angle.cos(), angle.sin(), torch.ones(16, device=device), 1e-6, cache, slots)
    a, b = q[..., ::2].double(), q[..., 1::2].double()
    c, s = angle.cos().double()[:, None], angle.sin().double()[:, None]
    neighbours = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got.double(), neighbours, atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements() -> None:
    pages = (1 << 32) // (64 * 576) + 1
    cache = torch.zeros(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, 16, 64, device="cuda").bfloat16()
    kv = torch.randn(2, 576, device="cuda").bfloat16()
    zero = torch.zeros(2, 32, dtype=torch.bfloat16, device="cuda")
    gain = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([pages * 64 - 1, 5], device="cuda")
    mla_append(q, kv, zero + 1, zero, gain, 1e-6, cache, slots)
    assert torch.equal(cache[-1, -1, 512:], kv[0, 512:]) and torch.equal(cache[0, 5, 512:], kv[1, 512:])
    written = cache.view(-1, 576).any(-1).nonzero().flatten().tolist()
    assert written == [5, pages * 64 - 1]
