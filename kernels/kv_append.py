"""Append: this rank's new keys and values go into its paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import routing
from kernels.reference.kv_append import kv_append as reference


@triton.jit
def _kv_append_kernel(
    k, v, k_cache, v_cache, slots,
    k_n, k_h, v_n, v_h, k_page, v_page,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n)
    if slot >= 0:
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = element < HEADS * D
        head, d = element // D, element % D
        inside = (slot % PAGE) * (HEADS * D) + element
        new_k = tl.load(k + n * k_n + head * k_h + d, mask=mask)
        new_v = tl.load(v + n * v_n + head * v_h + d, mask=mask)
        tl.store(k_cache + (slot // PAGE) * k_page + inside, new_k, mask=mask)
        tl.store(v_cache + (slot // PAGE) * v_page + inside, new_v, mask=mask)


def kv_append(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write new keys and values into their slots of the cache, in place.

    Args:
        k: [N, Hkv, D], last dim contiguous.
        v: [N, Hkv, D], last dim contiguous.
        k_cache: [pages, page_size, Hkv, D], contiguous within a page; pages may be strided.
        v_cache: like `k_cache`.
        slots: [N] int64, `page * page_size + offset`, distinct, or -1 for a token that another rank owns.
    """
    if not routing.on_gpu(k):
        reference(k, v, k_cache, v_cache, slots)
        return
    N, Hkv, D = k.shape
    page_size = k_cache.shape[1]
    for cache in (k_cache, v_cache):
        assert cache.stride()[1:] == (Hkv * D, D, 1), f"a page must be contiguous, got strides {cache.stride()}"
    assert k.stride(2) == v.stride(2) == 1 and slots.is_contiguous()
    block = min(1024, triton.next_power_of_2(Hkv * D))
    _kv_append_kernel[N, triton.cdiv(Hkv * D, block)](
        k, v, k_cache, v_cache, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_cache.stride(0), v_cache.stride(0),
        PAGE=page_size, HEADS=Hkv, D=D, BLOCK=block, num_warps=4,
    )  # fmt: skip
