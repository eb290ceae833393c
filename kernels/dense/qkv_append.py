"""Fused QKV projection, RoPE and KV append: one launch from a layer's input to queries and cached keys and values.

A program computes rows d and d + D / 2 of a head, the pairs of RoPE, so that it can write final queries, keys and
values. One row of x runs as in `kernels.dense.linear`; on Hopper more rows run as in `kernels.dense.linear_sm90`. Heads
with QK norm, or stored in e4m3, need all of their rows: these run `kernels.attention.kv_append` after the projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.attention.kv_append import QKVTarget, kv_append, store_heads
from kernels.attention.paged_tiles import SMALL_HEAD_DIM
from kernels.dense import linear_fp8_sm90, linear_packed_sm90
from kernels.dense.linear import MAX_ROWS, RUN, fits_sm90, launch_sm90, linear, stream
from kernels.dense.scaled_rows import run_of, stored
from kernels.overlap import pdl_options, sm_count, start_successor, wait_for_predecessor
from kernels.scaled import Matrix, ScaledMatrix

WARPS = 48  # that fit an SM's registers


@triton.jit
def _qkv_append_kernel(
    x, weight, scales, bias, cos, sin, slot_mapping, k_cache, v_cache, q, x_n, N, K, k_page, v_page,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BEGIN: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    half: tl.constexpr = D // 2
    pairs: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * half
    p = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = p < pairs
    pair = tl.minimum(p, pairs - 1)  # past the last: read it again, store nothing
    head, d = pair // half, pair % half
    row = head * D + d
    n = tl.arange(0, BLOCK_N)
    # Overlaps with the loads of weights.
    slot = tl.load(slot_mapping + n, mask=n < N, other=-1)
    at = (n * half)[:, None] + d[None, :]
    c = tl.load(cos + at, mask=(n < N)[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=(n < N)[:, None], other=0.0).to(tl.float32)
    acc, ups = stream(
        x, weight, scales, row, row + half, x_n, N, 2 * pairs, K, GROUP, GROUPS, BEGIN,
        BLOCK_N, BLOCK_K, RUN, True, STAGES,
    )  # fmt: skip
    if D > SMALL_HEAD_DIM:  # as in `kernels.attention.kv_append`
        start_successor(PDL)
    first, second = tl.sum(acc, 2), tl.sum(ups, 2)
    if BIAS:
        first += tl.load(bias + row).to(tl.float32)[None, :]
        second += tl.load(bias + row + half).to(tl.float32)[None, :]
    store_heads(
        first, second, c, s, n[:, None].to(tl.int64), head[None, :], d[None, :], slot[:, None],
        (n < N)[:, None] & live[None, :], q, k_cache, v_cache, k_page, v_page, Q_HEADS, KV_HEADS, D, PAGE,
        SLOT, HEAD,
    )  # fmt: skip


def qkv_append(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Projects rows to heads, applies RoPE, writes this rank's keys and values, and returns the queries [N, Hq, D].

    Args:
        x: [N, H], last dim contiguous.
        weight: [(Hq + 2 Hkv) D, H] in x's dtype or quantized, contiguous: rows of query, key, value heads.
        bias: one value per weight row, or None.
        cos, sin, k_cache, v_cache, slot_mapping, norms, scales: see `kernels.attention.kv_append.kv_append`.
    """
    D = k_cache.shape[3]
    if norms is not None or scales[1] is not None or not can_fuse(x, weight, D):
        qkv = linear(x, weight, bias).unflatten(-1, (-1, D))
        return kv_append(qkv, cos, sin, k_cache, v_cache, slot_mapping, norms, scales)
    assert k_cache.dtype == v_cache.dtype == x.dtype
    heads = QKVTarget.create(x, len(weight) // D, cos, sin, k_cache, v_cache, slot_mapping)
    if on_hopper(x, weight, D):
        launch_sm90(x, weight, bias, heads, False)
        return heads.q
    (N, K), pairs = x.shape, len(weight) // 2
    (data, weight_scales, _, _), groups = stored(weight)
    tile = _tile(N, pairs, K, sm_count(x.device), run_of(weight, RUN))
    _qkv_append_kernel[(triton.cdiv(pairs, tile["BLOCK_R"]),)](
        x, data, weight_scales, bias, *heads.tensors, x.stride(0), N, K, *heads.strides,
        **heads.shape, **groups, BLOCK_N=triton.next_power_of_2(N), BIAS=bias is not None, **tile, **pdl_options(x),
    )  # fmt: skip
    return heads.q


def _tile(N: int, pairs: int, K: int, sms: int, run: int) -> dict[str, int]:
    """Chooses launch options, by H200 timings: many warps if all are resident at once and have much to read."""
    wide = N == 1 and K > 3072 and 8 * pairs <= WARPS * sms
    rows, warps = (1, 8 if wide else 4) if N == 1 else (2, 4)
    return dict(BLOCK_R=rows, BLOCK_K=warps * 32 * run, RUN=run, STAGES=1, num_warps=warps)


def can_fuse(x: torch.Tensor, weight: Matrix, D: int) -> bool:
    """Returns whether the fused kernels support these tensors."""
    if not dispatch.on_gpu(x) or 0 in weight.shape or D % 2:
        return False
    if isinstance(weight, torch.Tensor) and not (weight.is_contiguous() and x.dtype == weight.dtype):
        return False
    is_streamed = 0 < len(x) <= MAX_ROWS and not (isinstance(weight, ScaledMatrix) and weight.packed)
    return x.stride(1) == 1 and (is_streamed or on_hopper(x, weight, D))


def on_hopper(x: torch.Tensor, weight: Matrix, D: int) -> bool:
    """Returns whether the Hopper kernels support these tensors, and each tile is within one half of a head."""
    if isinstance(weight, ScaledMatrix) and weight.packed:
        rows = linear_packed_sm90.tile_of(len(x), True, weight)[0]
    else:
        rows = linear_fp8_sm90.rows_of(len(x))
    return x.is_cuda and D % rows == 0 and fits_sm90(x, weight, D // 2)
