"""index_append: kernel and reference against float64; a token goes where its slot says, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.indexer.append import index_append
from kernels.indexer.reference import index_append as reference
from kernels.scaled_keys import scales_of
from tests.kernels.test_kv_append import expected

OPS = pytest.mark.parametrize("op", [index_append, reference], ids=["kernel", "reference"])


@OPS
@pytest.mark.parametrize(
    "heads, width, rope, page_size", [(4, 32, 8, 16), (5, 24, 24, 1), (33, 128, 64, 7), (0, 16, 8, 4)]
)
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
    numbers = torch.full((3, rows, 256), 7, dtype=torch.int32, device=device)
    op(q, k, cos, sin, gain, bias, 1e-6, cache, slots.to(device), None, numbers)
    assert not numbers.any()

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


@OPS
@pytest.mark.parametrize("heads, width, rope, page_size", [(4, 32, 8, 16), (5, 24, 24, 1), (33, 128, 64, 7)])
def test_keys_in_e4m3(op: Any, heads: int, width: int, rope: int, page_size: int, device: torch.device) -> None:
    """Numbers are off by half a place at most; a scale is the least power of two by which all of a key fit."""
    rows, pages = 6, 9
    gen = torch.Generator().manual_seed(width)
    q, k = torch.randn(rows, heads, width, generator=gen), torch.randn(rows, width, generator=gen) * 10.0**-3
    angle = torch.randn(rows, rope // 2, generator=gen) * 100
    gain, bias = torch.randn(2, width, generator=gen) * torch.tensor([[100.0], [1.0]])
    gain[: width // 2] *= 1e-3  # subnormal numbers beside large ones
    slots = torch.randperm(pages * page_size, generator=gen)[:rows]
    slots[2] = -1
    given = [x.to(device) for x in (q, k, angle.cos(), angle.sin(), gain, bias)]
    plain = torch.full((pages, page_size, width), torch.nan, device=device)
    cache, scales = plain.to(torch.float8_e4m3fn), plain[..., 0].clone()
    reference(*[x.clone() for x in given], 1e-6, plain, slots.to(device))
    op(*given, 1e-6, cache, slots.to(device), scales)
    written = torch.zeros(pages * page_size, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    assert torch.equal(scales.flatten().isnan().cpu(), ~written)
    assert torch.equal(cache.float().flatten(0, 1).isnan().all(1).cpu(), ~written)
    stored, wanted, scales = (x.flatten(0, 1).cpu()[written] for x in (cache.float(), plain, scales))
    assert torch.equal(scales, scales_of(wanted))
    # Three bits: half of 2^-3 of a number, or of the least number's 2^-9; and fp32's 2^-22 at a boundary between two.
    most = torch.maximum(wanted.abs() * 2**-4, scales[:, None] * 2**-10) * (1 + 2**-6)
    assert ((stored * scales[:, None] - wanted).abs() <= most).all()


def test_a_scale_too_small_is_caught(device: torch.device) -> None:
    """e4m3 has no infinity: what is too large becomes its largest number, or NaN."""
    keys = torch.tensor([[700.0, 3.0]], device=device)
    stored = (keys / (scales_of(keys)[:, None] / 2)).clamp(max=448).to(torch.float8_e4m3fn).float()
    assert ((stored * scales_of(keys)[:, None] / 2 - keys).abs() > keys.abs() * 2**-4).any()


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
