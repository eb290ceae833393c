"""Prefill attention over an FP8 (e4m3) KV or latent cache: dequantize once per chunk, then run the 16-bit kernels.

A chunk reads every key thousands of times, so converting inside the kernel would repeat the work for every tile of
rows. Pages are dequantized (exactly) a piece at a time; `merge_states` combines the partial results of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.merge_states import merge_states
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import GROUP, dequantize_latents, scale_at, scale_strides

PIECE_BYTES = 1 << 27  # dequantized; about 32K tokens of 8 heads x 128, where merging takes 1% of the attention time
SLOTS = 128  # max page slots per program


@triton.jit(do_not_specialize=["first"])
def _dequantize_pages_kernel(
    cache, scales, out, table, cu_q, lo, hi, first,
    page_stride, slot_stride, head_stride, out_page, out_slot, out_head, table_i,
    WIDTH: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE_NEXT: tl.constexpr, SCALE_HEAD: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (PAGE + BLOCK_N - 1) // BLOCK_N
    column = tl.program_id(0) // tiles
    segment = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    begin = tl.load(cu_q + segment)
    end = tl.load(cu_q + segment + 1)
    # bounds are monotonic within a segment
    start = tl.load(lo + begin, mask=begin < end, other=0)
    stop = tl.load(hi + end - 1, mask=begin < end, other=0)
    slot = (tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    key = (first + column) * PAGE + slot
    live = (key >= start) & (key < stop) & (slot < PAGE)
    if ((first + column) * PAGE < stop) & ((first + column + 1) * PAGE > start):
        page = tl.load(table + segment * table_i + first + column).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        inside = live[:, None] & ((d < D) & (head * D + d < WIDTH))[None, :]
        at = (page * page_stride + head * head_stride + slot * slot_stride)[:, None] + d[None, :]
        x = tl.load(cache + at, mask=inside, other=0.0)
        if scales is not None:
            scales_at = scale_at(scales, page, slot, head, PAGE, PAGE, SCALE_NEXT, SCALE_HEAD)
            x = x.to(tl.float32) * tl.load(scales_at, mask=live, other=0.0)[:, None]
        number = segment * (tl.num_programs(0) // tiles) + column
        tl.store(out + (number * out_page + head * out_head + slot * out_slot)[:, None] + d[None, :], x, mask=inside)


def _dequantize(
    cache: torch.Tensor, scales: torch.Tensor | None, to: torch.Tensor, keys: PagedKeys, cu_q: torch.Tensor, first: int
) -> None:
    """Dequantizes table columns from `first` on, as many as `to` has pages per segment."""
    page, segments = keys.page_size, len(cu_q) - 1
    heads, D, width = cache.shape[-2], cache.shape[-1], cache.shape[-2] * cache.shape[-1]
    head_strides = (cache.stride(-2), to.stride(-2))
    if cache.dim() == 3:  # a latent is split into heads of one scale each; the rope part is one head
        width = cache.shape[-1]
        D = width if scales is None else min(GROUP, triton.next_power_of_2(width))
        heads, head_strides = triton.cdiv(width, D), (D, D)
    strides = scale_strides(None, scales)
    block = min(SLOTS, triton.next_power_of_2(page))
    grid = len(to) // segments * triton.cdiv(page, block), segments, heads
    _dequantize_pages_kernel[grid](
        cache, scales, to, keys.table, cu_q, keys.lo, keys.hi, first,
        *cache.stride()[:2], head_strides[0], *to.stride()[:2], head_strides[1], keys.table.stride(0),
        WIDTH=width, D=D, PAGE=page, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(D), **strides,
    )  # fmt: skip


def dequantize_latent_rows(latents: torch.Tensor, scales: torch.Tensor, ropes: torch.Tensor) -> torch.Tensor:
    """Dequantizes e4m3 latents (exactly) and appends their rope part.

    Args:
        latents: [pages, page_size, R] e4m3.
        scales: [pages, ceil(R / 128), page_size]; see `kernels.paged_keys.PagedKeys`.
        ropes: [pages, page_size, P], 16 bits.

    Returns:
        [pages, page_size, R + P] in the dtype of `ropes`.
    """
    if not dispatch.on_gpu(latents):
        return torch.cat((dequantize_latents(latents, scales).to(ropes.dtype), ropes), -1)
    pages, page, R = latents.shape
    out = ropes.new_empty(pages, page, R + ropes.shape[2])
    each = torch.arange(max(pages, 2), dtype=torch.int32, device=latents.device)
    keys = PagedKeys(latents, latents, each[None, :pages], each[:1], torch.full_like(each[:1], pages * page), 1.0)
    for cache, scales_of_cache, to in ((latents, scales, out[..., :R]), (ropes, None, out[..., R:])):
        _dequantize(cache, scales_of_cache, to, keys, each[:2], 0)
    return out


def attend_dequantized(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Runs `attend` (`flash_prefill` or `mla_prefill`, which document the arguments) over dequantized keys."""
    page, segments = keys.page_size, len(cu_q) - 1
    entry = (keys.k.shape[2] + keys.rope.shape[2],) if keys.rope is not None else tuple(keys.k.shape[2:])
    planes = 1 if keys.rope is not None else 2
    numbers = planes * page * torch.Size(entry).numel()
    columns = max(1, min(keys.table.shape[1], triton.cdiv(max_k, page)))
    each = min(columns, max(1, PIECE_BYTES // (segments * numbers * q.itemsize)))  # pages per segment
    memory = q.new_empty(planes, segments * each, page, *entry)
    copies: tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], ...]
    if keys.rope is not None:
        latent = keys.k.shape[2]
        k, v = memory[0], memory[0, ..., :latent]
        copies = (keys.k, keys.k_scale, v), (keys.rope, None, memory[0, ..., latent:])
    else:
        k, v = memory
        copies = (keys.k, keys.k_scale, k), (keys.v, keys.v_scale, v)
    table = torch.arange(segments * each, dtype=torch.int32, device=q.device).view(segments, each)
    dequantized = replace(keys, k=k, v=v, table=table, k_scale=None, v_scale=None, rope=None)
    parts, part_lse = out[None], lse[None]
    if columns > each:
        parts, part_lse = q.new_empty(2, *out.shape), lse.new_empty(2, *lse.shape)
    tokens = each * page
    for first in range(0, columns, each):
        for cache, scales, to in copies:
            _dequantize(cache, scales, to, keys, cu_q, first)
        lo, hi = ((bound - first * page).clamp(0, tokens) for bound in (keys.lo, keys.hi))
        piece = replace(dequantized, lo=lo, hi=hi, sinks=keys.sinks if first == 0 else None)
        i = min(first, 1)
        attend(q, piece, cu_q, max_q, min(max_k, tokens), out=parts[i], lse=part_lse[i])
        if first > 0:
            merge_states(parts, part_lse, out=parts[0], out_lse=part_lse[0], return_lse=True)
    if columns > each:
        out.copy_(parts[0])
        lse.copy_(part_lse[0])
