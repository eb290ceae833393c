"""What only one of the kernels that append shows; results are compared by `tests/kernels/test_suite.py`."""

from __future__ import annotations

import pytest
import torch

from helix.worker.blocks import BlockLayout
from helix.worker.kv_cache_spec import keys_and_values
from kernels.attention.kv_append import kv_append
from kernels.attention.reference import kv_append as append_reference
from kernels.dense.qkv_append import can_fuse, qkv_append
from kernels.mla.append import mla_append
from kernels.scaled_keys import dequantize_latents, quantize_fp8, quantize_latents
from tests.kernels.cases_append import E4M3


def test_few_rows_take_one_launch(device: torch.device) -> None:
    x, weight = torch.ones(4, 32, device=device).half(), torch.ones(4 * 64, 32, device=device).half()
    assert can_fuse(x, weight, 64)
    assert not can_fuse(x, weight.T.contiguous().T, 64), "rows of a weight have to be contiguous"


def test_a_projection_appends_the_same_bytes(device: torch.device) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.randn(7 * 32, 64, device=device)
    cos, sin, slots = torch.ones(3, 16, device=device), torch.zeros(3, 16, device=device), torch.arange(3).to(device)
    found = []
    for fused in (True, False):
        k, v = torch.zeros(2, 1, 16, 2, 32, device=device).to(E4M3)
        scales = torch.zeros(1, 2, 16, device=device), torch.zeros(1, 2, 16, device=device)
        if fused:
            q = qkv_append(x, weight, None, cos, sin, k, v, slots, None, scales)
        else:
            q = append_reference((x @ weight.T).view(3, 7, 32), cos, sin, k, v, slots, None, scales)
        stood = (cache.float() * scale.transpose(1, 2)[..., None] for cache, scale in zip((k, v), scales, strict=True))
        found.append((q, *stood))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.14, atol=1e-3)  # at most a neighboring number of e4m3


def test_numbers_of_e4m3_are_the_nearest() -> None:
    """A scale is the least power of two by which all numbers are at most 448."""
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 10.0 ** (torch.arange(50) - 25)[:, None] / 9
    x[:, ::3] *= 1e-4  # subnormal numbers beside large ones
    x[7] = 0
    few, scales = quantize_fp8(x)
    most = x.abs().amax(-1)
    assert (scales.log2() == scales.log2().round()).all()
    assert (most <= 448 * scales).all() and ((most > 224 * scales) | (most == 0)).all() and scales[7] == 1
    # Three bits after the first: half a unit in the last place is 2^-4 of a number, or of the scale's 2^-9.
    off = (few.double() * scales.double()[:, None] - x).abs()
    assert (off <= torch.maximum(x.abs() * 2**-4, scales[:, None] * 2**-10)).all()
    with_group, factors = quantize_latents(x[None])
    assert torch.equal(with_group[0, :, :128].float(), quantize_fp8(x[:, :128])[0].float()) and factors.shape == (
        1,
        50,
        3,
    )
    whole = dequantize_latents(with_group, factors.mT)
    assert torch.equal(whole[0, :, 256:], with_group[0, :, 256:].float() * factors[0, :, 2:])


@pytest.mark.parametrize("kv", ["auto", "k16v8", "fp8"])
def test_parts_lie_in_order(kv: str) -> None:
    """Keys come first, then values, then scales, at multiples of 16 bytes; in bf16, as [2, page_size, D]."""
    block = BlockLayout.of([keys_and_values(3, 24, "bfloat16", kv, None)], 5)
    memory = torch.zeros(6, block.words, dtype=torch.int32)
    views = block.pages(memory)
    scales = {"auto": [], "k16v8": ["value_scales"], "fp8": ["key_scales", "value_scales"]}
    assert [*views] == ["keys", "values", *scales[kv]]
    begins = [x.data_ptr() - memory.data_ptr() for x in views.values()]
    assert begins == sorted(begins) and all(x % 16 == 0 for x in (*begins, block.bytes))
    for i, x in enumerate(views.values()):
        for page_rows in x.view(torch.uint8) if x.dtype != torch.float32 else x:
            assert page_rows.eq(0).all(), "nothing overlaps"
            page_rows.fill_(i + 1)
    memory.copy_(torch.arange(memory.numel()).view_as(memory))
    for name, head_rows in block.shared_by_heads(memory).items():  # block 3 i + h under every head is h of page i
        wanted = views[name].transpose(1, 2) if head_rows.dim() == 4 else views[name]
        found = head_rows[:, :, 0] if head_rows.dim() == 4 else head_rows[:, 0]
        assert head_rows.shape[1:] == views[name].shape[1:]
        assert torch.equal(found.view(torch.uint8), wanted.flatten(0, 1).contiguous().view(torch.uint8)), name
    if kv == "auto":
        plain = memory.view(torch.bfloat16).view(2, 3, 2, 5, 24)
        assert torch.equal(plain[:, :, 0].transpose(1, 2), views["keys"])
        assert torch.equal(plain[:, :, 1].transpose(1, 2), views["values"])


@pytest.mark.gpu(gb=24)
def test_slots_of_keys_beyond_2_to_the_31_elements() -> None:
    pages = (1 << 32) // (64 * 128)
    k_cache = torch.zeros(pages, 64, 1, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    qkv = torch.randn(2, 3, 128, device="cuda").bfloat16()
    zero = torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([pages * 64 - 1, 5], device="cuda")
    kv_append(qkv, zero + 1, zero, k_cache, v_cache, slots)
    assert torch.equal(k_cache[-1, -1, 0], qkv[0, 1]) and torch.equal(v_cache[-1, -1, 0], qkv[0, 2])
    assert torch.equal(k_cache[0, 5, 0], qkv[1, 1]) and k_cache.count_nonzero() == 2 * 128


@pytest.mark.gpu(gb=12)
@pytest.mark.parametrize("few", [False, True])
def test_slots_of_latents_beyond_2_to_the_31_elements(few: bool) -> None:
    width = 512 if few else 576
    pages = (1 << 32) // (64 * width) + 1
    cache = torch.zeros(pages, 64, width, dtype=E4M3 if few else torch.bfloat16, device="cuda")
    more = [torch.zeros(pages, 4, 64, device="cuda"), torch.zeros(pages, 64, 64, device="cuda").bfloat16()] * few
    q, w_uk = torch.randn(2, 16, 192, device="cuda").bfloat16(), torch.randn(16, 128, 512, device="cuda").bfloat16()
    kv, zero = torch.randn(2, 576, device="cuda").bfloat16(), torch.zeros(2, 32, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([pages * 64 - 1, 5], device="cuda")
    mla_append(q, kv, zero + 1, zero, torch.ones_like(kv[0, :512]), 1e-6, w_uk, cache, slots, *more)
    ropes = more[1] if few else cache[..., 512:]
    assert torch.equal(ropes[-1, -1], kv[0, 512:]) and torch.equal(ropes[0, 5], kv[1, 512:])
    for plane in (cache.view(torch.int64), *([more[0].mT] if few else [])):
        written = plane.reshape(pages * 64, -1).any(-1).nonzero().flatten().tolist()
        assert written == [5, pages * 64 - 1]
