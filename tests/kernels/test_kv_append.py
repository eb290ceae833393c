"""kv_append: kernel and reference write each token where its slot says, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.kv_append import kv_append
from kernels.reference.kv_append import kv_append as reference


@pytest.mark.parametrize("op", [kv_append, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("heads, dim, page_size", [(2, 64, 16), (1, 80, 1), (3, 8, 7), (8, 256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_slots_and_nothing_else(
    op: Any, heads: int, dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    pages, N = 5, 6
    gen = torch.Generator().manual_seed(dim)
    # Rows of a fused QKV: strided, and K and V with strides of their own.
    qkv = torch.randn(N, 4 * heads, dim, generator=gen).to(dtype).to(device)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads : 3 * heads]
    # Layers of one cache: pages are apart from each other.
    wide = torch.full((pages, 2, page_size, heads, dim), torch.nan, dtype=dtype, device=device)
    k_cache, v_cache = wide[:, 0], wide[:, 1]
    slots = torch.randperm(pages * page_size, generator=gen)[:N]
    slots = torch.cat([slots, torch.full((N - len(slots),), -1)])
    slots[2] = -1
    op(k, v, k_cache, v_cache, slots.to(device))
    untouched = set(range(pages * page_size))
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            untouched.remove(slot)
            assert torch.equal(k_cache[slot // page_size, slot % page_size], k[n])
            assert torch.equal(v_cache[slot // page_size, slot % page_size], v[n])
    for slot in untouched:
        assert k_cache[slot // page_size, slot % page_size].isnan().all()
        assert v_cache[slot // page_size, slot % page_size].isnan().all()


@pytest.mark.parametrize("op", [kv_append, reference], ids=["kernel", "reference"])
def test_a_step_of_other_ranks_tokens_writes_nothing(op: Any, device: torch.device) -> None:
    cache = torch.full((2, 4, 1, 16), torch.nan, device=device)
    other = cache.clone()
    k = torch.randn(3, 1, 16, device=device)
    op(k, k, cache, other, torch.full((3,), -1, device=device))
    assert cache.isnan().all() and other.isnan().all()


@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements() -> None:
    pages = (1 << 32) // (64 * 128)
    k_cache = torch.zeros(pages, 64, 1, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    k = torch.randn(2, 1, 128, device="cuda").bfloat16()
    slots = torch.tensor([pages * 64 - 1, 5], device="cuda")
    kv_append(k, 2 * k, k_cache, v_cache, slots)
    assert torch.equal(k_cache[-1, -1], k[0]) and torch.equal(v_cache[-1, -1], 2 * k[0])
    assert torch.equal(k_cache[0, 5], k[1]) and k_cache.count_nonzero() == 2 * 128
