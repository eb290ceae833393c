"""mla_append: kernel and reference against float64; a token goes where its slot says, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.mla.append import mla_append
from kernels.mla.per_head_linear import MAX_ROWS
from kernels.mla.reference import mla_append as reference
from tests.kernels.test_kv_append import expected

OPS = pytest.mark.parametrize("op", [mla_append, reference], ids=["kernel", "reference"])


@OPS
@pytest.mark.parametrize(
    "heads, nope, latent, rope, page_size",
    [(4, 16, 32, 8, 16), (1, 24, 40, 24, 1), (20, 5, 136, 64, 64), (9, 128, 8, 8, 7), (0, 16, 32, 8, 16)],
)
@pytest.mark.parametrize("rows", [6, MAX_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_absorbs_rotates_and_writes_slots_and_nothing_else(
    op: Any,
    heads: int,
    nope: int,
    latent: int,
    rope: int,
    page_size: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    pages = max(5, -(-rows // page_size))
    gen = torch.Generator().manual_seed(latent)
    # Last parts of wider heads, and columns of a wider projection: strided. W_UK: a part of kv_b_proj.
    wide_q = torch.randn(rows, heads, 3 + nope + rope, generator=gen).to(dtype).to(device)
    wide_kv = torch.randn(rows, 5 + latent + rope, generator=gen).to(dtype).to(device)
    w_uk = torch.randn(heads, nope + 2, latent, generator=gen).to(dtype).to(device)[:, :nope]
    q, kv = wide_q[..., 3:], wide_kv[:, 5:]
    before_q, before_kv = wide_q.clone(), wide_kv.clone()
    angle = torch.randn(rows, rope // 2, generator=gen) * 100
    cos, sin = angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
    gain = torch.randn(latent, generator=gen).to(dtype).to(device)
    # Layers of one cache: pages are apart from each other.
    cache = torch.full((pages, 2, page_size, latent + rope), torch.nan, dtype=dtype, device=device)[:, 1]
    slots = torch.randperm(pages * page_size, generator=gen)[:rows]
    slots = torch.cat([slots, torch.full((rows - len(slots),), -1)])
    slots[2] = -1
    want_absorbed = torch.einsum("nha,har->nhr", q[..., :nope].double().cpu(), w_uk.double().cpu())
    want_q = expected(q[..., nope:], cos, sin, None, 0)
    want_key = expected(kv[:, None, latent:], cos, sin, None, 0)[:, 0]
    wide = kv[:, :latent].double().cpu()
    want_latent = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double().cpu()
    got = op(q, kv, cos, sin, gain, 1e-5, w_uk, cache, slots.to(device))

    assert got.dtype == dtype and got.shape == (rows, heads, latent + rope)
    assert torch.equal(wide_kv, before_kv) and torch.equal(wide_q, before_q)
    # fp32: a few roundings of 2^-24 of values up to 30. fp16: three roundings of 2^-11 of values up to 16.
    tolerance = 3e-5 if dtype == torch.float32 else 3 * 16 * 2**-11
    # fp32: as many roundings as products, of sums up to 64. fp16: one, of the sum.
    of_sums = nope * 64 * 2**-24 if dtype == torch.float32 else 64 * 2**-11
    torch.testing.assert_close(got[..., :latent].double().cpu(), want_absorbed, atol=of_sums, rtol=0)
    torch.testing.assert_close(got[..., latent:].double().cpu(), want_q, atol=tolerance, rtol=0)
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
    q, kv = torch.randn(3, 2, 24, device=device), torch.randn(3, 24, device=device)
    zero = torch.zeros(3, 4, device=device)
    slots = torch.full((3,), -1, device=device)
    same = torch.eye(16, device=device).expand(2, 16, 16)
    got = op(q, kv, zero + 1, zero, torch.ones(16, device=device), 1e-6, same, cache, slots)
    assert cache.isnan().all()
    assert torch.equal(got, q), "an angle of zero turns nothing, and the identity absorbs nothing"


def test_a_wrong_half_is_caught(device: torch.device) -> None:
    """Rotating neighbours instead of halves is the classic mistake."""
    q, kv = torch.randn(2, 1, 24, device=device), torch.randn(2, 24, device=device)
    angle = torch.randn(2, 4, device=device)
    cache = torch.zeros(1, 4, 24, device=device)
    slots = torch.tensor([0, 1], device=device)
    w_uk = torch.randn(1, 16, 16, device=device)
    got = mla_append(q, kv, angle.cos(), angle.sin(), torch.ones(16, device=device), 1e-6, w_uk, cache, slots)
    q = q[..., 16:]
    a, b = q[..., ::2].double(), q[..., 1::2].double()
    c, s = angle.cos().double()[:, None], angle.sin().double()[:, None]
    neighbours = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got[..., 16:].double(), neighbours, atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements() -> None:
    pages = (1 << 32) // (64 * 576) + 1
    cache = torch.zeros(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, 16, 192, device="cuda").bfloat16()
    w_uk = torch.randn(16, 128, 512, device="cuda").bfloat16()
    kv = torch.randn(2, 576, device="cuda").bfloat16()
    zero = torch.zeros(2, 32, dtype=torch.bfloat16, device="cuda")
    gain = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([pages * 64 - 1, 5], device="cuda")
    mla_append(q, kv, zero + 1, zero, gain, 1e-6, w_uk, cache, slots)
    assert torch.equal(cache[-1, -1, 512:], kv[0, 512:]) and torch.equal(cache[0, 5, 512:], kv[1, 512:])
    written = cache.view(-1, 576).any(-1).nonzero().flatten().tolist()
    assert written == [5, pages * 64 - 1]
