"""index_append: kernel and reference against float64; a token goes where its slot says, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.indexer.append import index_append
from kernels.reference.index_append import index_append as reference
from tests.kernels.test_kv_append import expected

OPS = pytest.mark.parametrize("op", [index_append, reference], ids=["kernel", "reference"])


@OPS
@pytest.mark.parametrize("heads, width, rope, page_size", [(4, 32, 8, 16), (5, 24, 24, 1), (33, 128, 64, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_normalises_rotates_and_writes_slots_and_nothing_else(
    op: Any, heads: int, width: int, rope: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, pages = 6, 9
    gen = torch.Generator().manual_seed(width)
    # Parts of wider projections: strided.
    wide_q = torch.randn(rows, 3 + heads * width, generator=gen).to(dtype).to(device)
    q = wide_q[:, 3:].unflatten(1, (heads, width))
    k = torch.randn(rows, width + 5, generator=gen).to(device)[:, :width] * 3 + 1
    angle = torch.randn(rows, rope // 2, generator=gen) * 100
    cos, sin = angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
    gain, bias = (torch.randn(width, generator=gen).to(dtype).to(device) for _ in range(2))
    cache = torch.full((pages, 2, page_size, width), torch.nan, dtype=dtype, device=device)[:, 1]
    slots = torch.randperm(pages * page_size, generator=gen)[:rows]
    slots[2] = -1
    wide = k.double().cpu()
    wide = (wide - wide.mean(-1, keepdim=True)) * (wide.var(-1, unbiased=False, keepdim=True) + 1e-6).rsqrt()
    wide = wide * gain.double().cpu() + bias.double().cpu()
    want = torch.cat((expected(wide[:, None, :rope], cos, sin, None, 0)[:, 0], wide[:, rope:]), -1)
    want_q = torch.cat((expected(q[..., :rope], cos, sin, None, 0), q[..., rope:].double().cpu()), -1)
    op(q, k, cos, sin, gain, bias, 1e-6, cache, slots.to(device))

    # fp32: a few roundings of 2^-24 of values up to 30. fp16: one of 2^-11 of values up to 30, and of queries up to 8.
    tolerance = 3e-5 if dtype == torch.float32 else 30 * 2**-11
    torch.testing.assert_close(q.double().cpu(), want_q, atol=tolerance, rtol=0)
    untouched = set(range(pages * page_size))
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            untouched.remove(slot)
            stored = cache[slot // page_size, slot % page_size].double().cpu()
            torch.testing.assert_close(stored, want[n], atol=tolerance, rtol=0)
    assert all(cache[slot // page_size, slot % page_size].isnan().all() for slot in untouched)


def test_rotation_of_the_last_part_is_caught(device: torch.device) -> None:
    """MLA has its rotated part last, an indexer first: the classic mistake."""
    q, k = torch.randn(2, 1, 24, device=device), torch.randn(2, 24, device=device)
    angle, slots = torch.randn(2, 4, device=device), torch.tensor([0, 1], device=device)
    last = torch.cat((q[..., :16].double().cpu(), expected(q[..., 16:], angle.cos(), angle.sin(), None, 0)), -1)
    ones = torch.ones(24, device=device)
    cache = torch.zeros(1, 4, 24, device=device)
    index_append(q, k, angle.cos(), angle.sin(), ones, ones, 1e-6, cache, slots)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(q.double().cpu(), last, atol=1e-3, rtol=0)
