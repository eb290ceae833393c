"""Quest-style key bounds (per-channel min and max) of full pages and their subblocks, written once per page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.placement import local_length
from kernels.sparse.reference import fold_blocks as reference

SLOTS = 32  # slots of a page per iteration


@triton.jit
def _fold_blocks_kernel(
    k_cache, k_scales, block_bounds, part_bounds, tables, starts, before, after, tables_n,
    k_layer, k_page, k_slot, k_head, s_layer, s_page, s_head, b_layer, b_page, b_head, b_kind,
    p_layer, p_page, p_head, p_part, p_kind, MAX_PAGES,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // MAX_PAGES
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + n)
    full = local_length(tl.load(before + n), start, KVP, RANK, BLOCK_TOKENS) // PAGE
    stop = local_length(tl.load(after + n), start, KVP, RANK, BLOCK_TOKENS) // PAGE
    at = full + tl.program_id(0) % MAX_PAGES
    if at < stop:
        page = tl.load(tables + n.to(tl.int64) * tables_n + at).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        slot = tl.arange(0, SLOTS)
        row = k_cache + layer * k_layer + page * k_page + head * k_head
        one = tl.full([BLOCK_D], float("-inf"), tl.float32)
        two = tl.full([BLOCK_D], float("inf"), tl.float32)
        broken = tl.zeros([BLOCK_D], tl.float32)
        for begin in range(0, PAGE, SLOTS):
            inside = (begin + slot < PAGE)[:, None] & (d < D)[None, :]
            k = tl.load(row + (begin + slot)[:, None] * k_slot + d[None, :], mask=inside, other=0.0).to(tl.float32)
            if k_scales is not None:
                at_scales = k_scales + layer * s_layer + page * s_page + head * s_head + begin + slot
                k *= tl.load(at_scales, mask=begin + slot < PAGE, other=0.0)[:, None]
            max_pages = tl.max(tl.where(inside, k, float("-inf")), 0)
            min_value = tl.min(tl.where(inside, k, float("inf")), 0)
            no_number = tl.sum(tl.where(k != k, 1.0, 0.0), 0)
            if part_bounds is not None:  # a subblock is SLOTS keys
                to = part_bounds + layer * p_layer + page * p_page + head * p_head + begin // SLOTS * p_part + d
                tl.store(to, tl.where(no_number > 0, float("nan"), max_pages), mask=d < D)
                tl.store(to + p_kind, tl.where(no_number > 0, float("nan"), min_value), mask=d < D)
            one = tl.maximum(one, max_pages)
            two = tl.minimum(two, min_value)
            broken += no_number
        one = tl.where(broken > 0, float("nan"), one)  # max(NaN, x) may be x
        two = tl.where(broken > 0, float("nan"), two)
        to = block_bounds + layer * b_layer + page * b_page + head * b_head + d
        tl.store(to, one, mask=d < D)
        tl.store(to + b_kind, two, mask=d < D)


def fold_blocks(
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    bounds: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    max_pages: int,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    part_bounds: torch.Tensor | None = None,
) -> None:
    """Writes the bounds of the pages that sequences newly filled on this rank, for all layers in one launch.

    Args:
        keys: [layers, pages, page_size, Hkv, D], last dim contiguous.
        scales: [layers, pages, Hkv, page_size] fp32, last dim contiguous, if keys are e4m3; else None.
        bounds: [layers, pages, Hkv, 2, D] in the dtype of `keys` (of the model if these are e4m3), last dim contiguous;
            written for these pages: the exact max and min of the keys per channel.
        tables: int32 [n, max_pages], rows contiguous.
        starts: int64 [n], contiguous, the kvp rank of each sequence's first block.
        before, after: int64 [n], contiguous, committed tokens of each sequence over all ranks, before and now.
        max_pages: upper bound of the pages that one sequence fills on a rank in between.
        part_bounds: [layers, pages, Hkv, parts, 2, D], like `bounds`, of equal subblocks of a page; written if given.

    Source:
        Quest (arXiv:2406.10774).
    """
    grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block}
    if not dispatch.on_gpu(keys):
        reference(keys, scales, bounds, tables, starts, before, after, **grid, part_bounds=part_bounds)
        return
    layers, _, page_size, heads, D = keys.shape
    assert keys.stride(4) == bounds.stride(4) == tables.stride(1) == 1 and (scales is None or scales.stride(3) == 1)
    assert all(t.is_contiguous() for t in (starts, before, after))
    slots, part_strides = SLOTS, [0] * 5
    if part_bounds is not None:
        slots, part_strides = page_size // part_bounds.shape[3], [*part_bounds.stride()[:5]]
        assert slots * part_bounds.shape[3] == page_size and part_bounds.stride(5) == 1
    _fold_blocks_kernel[len(tables) * max_pages, heads, layers](
        keys, scales, bounds, part_bounds, tables, starts, before, after, tables.stride(0),
        *keys.stride()[:4], *(scales.stride()[:3] if scales is not None else (0, 0, 0)), *bounds.stride()[:4],
        *part_strides, max_pages,
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, PAGE=page_size, D=D,
        BLOCK_D=triton.next_power_of_2(D), SLOTS=slots,
    )  # fmt: skip
