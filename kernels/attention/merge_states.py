"""Merges partial attention states of several KV shards into attention over all keys."""

from __future__ import annotations

from typing import Literal, overload

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.reference import merge_states as reference
from kernels.precompile import is_precompiling

MANY = 2048  # rows; below, one program each (a GPU starts about one program per ns)
ROWS = 8  # per program, from MANY on
SOURCES_PER_STEP = tl.constexpr(16)  # LSEs loaded per step for the maximum


# They change from chunk to chunk.
@triton.jit(do_not_specialize=["W", "rows", "l_w"])
def _merge_states_kernel(
    partials, lse, out, out_lse,
    p_w, p_n, p_h, l_w, l_n, l_h, o_n, o_h, ol_n, ol_h,
    W, H, rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    n, h = row // H, row % H
    lse += n * l_n + h * l_h
    partials += (n * p_n + h * p_h)[:, None]
    w = tl.arange(0, SOURCES_PER_STEP)[None, :]
    peaks = tl.full([ROWS, SOURCES_PER_STEP], float("-inf"), tl.float32)
    for first in range(0, W, SOURCES_PER_STEP):
        inside = live[:, None] & (first + w < W)
        at = lse[:, None] + (first + w).to(tl.int64) * l_w
        peaks = tl.maximum(peaks, tl.load(at, mask=inside, other=float("-inf")))
    peak = tl.max(peaks, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    d = tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # Sequential: the order of the sum is part of the contract; unrolling overlaps the loads.
    for _ in tl.range(0, W, loop_unroll_factor=8):
        source_lse = tl.load(lse, mask=live, other=float("-inf"))
        weight = tl.exp(source_lse - peak)
        total += weight
        # Do not read an empty source: it may be NaN. A NaN LSE propagates to the output.
        width = tl.where(source_lse == float("-inf"), 0, D)
        part = tl.load(partials + d, mask=d < width[:, None], other=0.0)
        acc += weight[:, None] * part.to(tl.float32)
        lse += l_w
        partials += p_w
    empty = total == 0.0
    tl.debug_barrier()  # all warps have read their rows: the output may alias a source
    acc /= tl.where(empty, 1.0, total)[:, None]
    tl.store(out + (n * o_n + h * o_h)[:, None] + d, acc, mask=live[:, None] & (d < D))
    tl.store(out_lse + n * ol_n + h * ol_h, tl.where(empty, float("-inf"), peak + tl.log(total)), mask=live)


@overload
def merge_states(
    partials: torch.Tensor,
    lse: torch.Tensor,
    *,
    out: torch.Tensor | None = ...,
    out_lse: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def merge_states(
    partials: torch.Tensor,
    lse: torch.Tensor,
    *,
    out: torch.Tensor | None = ...,
    out_lse: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def merge_states(
    partials: torch.Tensor,
    lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rescales and sums partial attention outputs, in fp32 and in the order of the sources.

    A source whose LSE is -inf is not read; if all are, the result is 0 with LSE -inf. A NaN LSE makes its output NaN.

    Args:
        partials: [W, N, H, D], each normalized over its own keys; last dim contiguous.
        lse: [W, N, H] fp32, natural log.
        out: [N, H, D], written if given (its dtype is the result's); last dim contiguous. May alias a source if
            `out_lse` aliases that source's LSE.
        out_lse: [N, H] fp32, written if given.
        return_lse: also return the LSE over all keys.

    Returns:
        Output [N, H, D] in the dtype of `out`, else of `partials`; with `return_lse` also [N, H] fp32.

    Source:
        Helix Parallelism (arXiv:2507.07120), section 2.1; FlashDecoding.
    """
    W, N, H, D = partials.shape
    if not dispatch.on_gpu(partials):
        out, out_lse = reference(partials, lse, out=out, out_lse=out_lse)
        return (out, out_lse) if return_lse else out
    out = torch.empty(N, H, D, dtype=partials.dtype, device=partials.device) if out is None else out
    out_lse = torch.empty(N, H, dtype=torch.float32, device=lse.device) if out_lse is None else out_lse
    assert partials.stride(3) == out.stride(2) == 1
    block_d = triton.next_power_of_2(D)
    # Whether a chunk splits its keys depends on its size; precompilation sees few sizes, so compile both.
    for rows in (1, ROWS) if is_precompiling() else (1 if N * H < MANY else ROWS,):
        _merge_states_kernel[(triton.cdiv(N * H, rows),)](
            partials, lse, out, out_lse,
            *partials.stride()[:3], *lse.stride(), *out.stride()[:2], *out_lse.stride(),
            W, H, N * H, D=D, ROWS=rows, BLOCK_D=block_d, num_warps=max(1, block_d // 128) * (2 if rows > 1 else 1),
        )  # fmt: skip
    return (out, out_lse) if return_lse else out
