"""Chunked prefill of the gated delta rule, 64 rows per chunk (arXiv:2406.06484, section 3; arXiv:2412.06464).

Four launches. 1: convolution, norms, gates. 2: solves each chunk's triangular system (I + A) d = beta (v - exp(G) S^T
k) up to S: with T = (I + A)^-1, d = u - w S, where u = T beta v, w = T beta exp(G) k. 3: scans a sequence's chunks with
the state in registers. 4: normalizes and gates the outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.overlap import sm_count
from kernels.recurrent.convolution import convolve, gate, norm_scale
from kernels.recurrent.reference import CHUNK as _CHUNK
from kernels.recurrent.reference import gated_delta_prefill as reference

CHUNK = tl.constexpr(_CHUNK)
BLOCK = tl.constexpr(16)  # rows solved one by one; matmuls merge blocks
COLUMNS = 32  # state columns per program
# Columns per tile of keys and of values. ptxas (12.8) miscompiles a second product of 64 x 64 by 64 x 32 halves: it
# takes words of its descriptors from the register of the loop counter in `_inverse`.
MIN_KEYS, MIN_VALUES = 32, 64
MIN_SEQUENCES = 64  # BLOCK_S is at least this, so that chunks of few sequences share one kernel


@triton.jit
def _chunk(cu_q, index, sequences, BLOCK_S: tl.constexpr):
    """Finds a chunk: its sequence (`sequences` if there is none), the sequence's first row, and rows [begin, end)."""
    s = tl.arange(0, BLOCK_S)
    begins = tl.load(cu_q + s, mask=s < sequences, other=0)
    ends = tl.load(cu_q + s + 1, mask=s < sequences, other=0)
    chunks = (ends - begins + CHUNK - 1) // CHUNK
    upto = tl.cumsum(chunks, 0)
    sequence = tl.sum(((upto <= index) & (s < sequences)).to(tl.int32), 0)
    mine = s == sequence
    first = tl.sum(tl.where(mine, begins, 0), 0)
    begin = first + (index - tl.sum(tl.where(mine, upto - chunks, 0), 0)) * CHUNK
    return sequence, first, begin, tl.minimum(begin + CHUNK, tl.sum(tl.where(mine, ends, 0), 0))


@triton.jit(do_not_specialize=["n"])
def _inputs_kernel(
    qkv, gates, conv, a_log, dt_bias, ring, req_indices, positions, cu_q, q, k, v, totals, betas, qkv_n, gates_n, n,
    q_scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    RING: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    sequence, first, begin, end = _chunk(cu_q, tl.program_id(0), n, BLOCK_S)
    if sequence == n:
        return
    head = tl.program_id(1)
    width: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    req_idx = tl.load(req_indices + sequence).to(tl.int64)
    position = tl.load(positions + first)
    t = begin + tl.arange(0, CHUNK).to(tl.int64)
    there = t < end
    p = position + (t - first)
    mine, rows = ring + req_idx * (RING * width), qkv + first.to(tl.int64) * qkv_n
    if head < 2 * KEYS:
        d = tl.arange(0, BLOCK_K)
        keys = convolve(mine, rows, conv, p, position, there, head * DK, qkv_n, d, DK, width, W, RING)
        scale = norm_scale(keys)
        to = q
        if head >= KEYS:
            to = k
        else:
            scale *= q_scale
        key_at = (t * KEYS + head % KEYS)[:, None] * DK + d[None, :]
        tl.store(to + key_at, keys * scale[:, None], mask=there[:, None] & (d < DK)[None, :])
    else:
        e, of = tl.arange(0, BLOCK_V), head - 2 * KEYS
        at_v = 2 * KEYS * DK + of * DV
        values = convolve(mine, rows, conv, p, position, there, at_v, qkv_n, e, DV, width, W, RING)
        values_at = (t * VALUES + of)[:, None] * DV + e[None, :]
        tl.store(v + values_at, values, mask=there[:, None] & (e < DV)[None, :])
        b = tl.load(gates + t * gates_n + of, mask=there, other=0.0)
        a = tl.load(gates + t * gates_n + VALUES + of, mask=there, other=0.0)
        g, beta = gate(a, b, tl.exp(tl.load(a_log + of)), tl.load(dt_bias + of))
        tl.store(totals + t * VALUES + of, tl.cumsum(g, 0), mask=there)
        tl.store(betas + t * VALUES + of, beta, mask=there)


@triton.jit
def _inverse(A):
    """Inverts I + A, A [CHUNK, CHUNK] strictly lower: within blocks row by row, then by matmuls."""
    r, c = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    same = r // BLOCK == c // BLOCK
    within, apart = tl.where(same, A, 0.0), tl.where(same, 0.0, A)
    one = tl.where(r == c, 1.0, 0.0)
    T = one
    for j in range(BLOCK - 1):
        column = tl.sum(tl.where(c == r // BLOCK * BLOCK + j, within, 0.0), 1)
        row = tl.sum(tl.where(r == c // BLOCK * BLOCK + j, T, 0.0), 0)
        T -= tl.where(same, column[:, None] * row[None, :], 0.0)
    # I + A = (I + within) (I + N), and N^4 = 0: (I + N)^-1 = (I - N) (I + N^2).
    N = tl.dot(T, apart, input_precision="tf32x3")
    square = tl.dot(N, N, input_precision="tf32x3")
    left = one - N
    left += tl.dot(left, square, input_precision="tf32x3")
    return tl.dot(left, T, input_precision="tf32x3")


@triton.jit(do_not_specialize=["n"])
def _systems_kernel(
    k, v, w, totals, betas, cu_q, n,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes w [N, V, dk], and u in place of v."""
    sequence, _, begin, end = _chunk(cu_q, tl.program_id(0), n, BLOCK_S)
    if sequence == n:
        return
    head = tl.program_id(1)
    dtype: tl.constexpr = k.dtype.element_ty
    t = begin + tl.arange(0, CHUNK).to(tl.int64)
    there = t < end
    d, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    key_mask = there[:, None] & (d < DK)[None, :]
    keys = tl.load(k + (t * KEYS + (FIRST + head) // GROUP)[:, None] * DK + d[None, :], mask=key_mask, other=0.0)
    G = tl.load(totals + t * VALUES + head, mask=there, other=0.0)
    beta = tl.load(betas + t * VALUES + head, mask=there, other=0.0)
    r = tl.arange(0, CHUNK)
    lower = (r[:, None] > r[None, :]) & there[:, None]
    decay = tl.exp(tl.where(lower, G[:, None] - G[None, :], 0.0))
    products = tl.dot(keys, tl.trans(keys), input_precision="tf32x3")
    T = _inverse(tl.where(lower, beta[:, None] * products * decay, 0.0)) * beta[None, :]
    at = (t * VALUES + head)[:, None]
    tl.store(
        w + at * DK + d[None, :],
        tl.dot((T * tl.exp(G)[None, :]).to(dtype), keys, input_precision="tf32x3"),
        mask=key_mask,
    )
    value_mask = there[:, None] & (e < DV)[None, :]
    values = v + at * DV + e[None, :]
    given = tl.load(values, mask=value_mask, other=0.0)
    tl.store(values, tl.dot(T.to(dtype), given, input_precision="tf32x3"), mask=value_mask)


@triton.jit
def _chunks_kernel(
    qkv, q, k, u, w, totals, state, ring, req_indices, positions, cu_q, out, qkv_n,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    GROUP: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = (FIRST + head) // GROUP
    width: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    dtype: tl.constexpr = k.dtype.element_ty
    req_idx = tl.load(req_indices + sequence).to(tl.int64)
    first, end = tl.load(cu_q + sequence).to(tl.int64), tl.load(cu_q + sequence + 1).to(tl.int64)
    d, e, r = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, CHUNK)
    whole = (d < DK)[:, None] & (e < DV)[None, :] & (req_idx >= 0)
    states = state + (req_idx * VALUES + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    S = tl.load(states, mask=whole, other=0.0)
    for begin in range(first, end, CHUNK):
        t, last = begin + r, tl.minimum(begin + CHUNK, end) - 1
        there = t <= last
        key_mask, value_mask = there[:, None] & (d < DK)[None, :], there[:, None] & (e < DV)[None, :]
        at = (t * VALUES + head)[:, None]
        from_state = tl.load(w + at * DK + d[None, :], mask=key_mask, other=0.0)
        values = tl.load(u + at * DV + e[None, :], mask=value_mask, other=0.0).to(tl.float32)
        row = (t * KEYS + key_head)[:, None] * DK + d[None, :]
        queries = tl.load(q + row, mask=key_mask, other=0.0)
        keys = tl.load(k + row, mask=key_mask, other=0.0)
        G = tl.load(totals + tl.minimum(t, last) * VALUES + head)
        chunk_total = tl.load(totals + last * VALUES + head)
        rounded = S.to(dtype)
        delta = values - tl.dot(from_state, rounded, input_precision="tf32x3")
        o = tl.dot(queries, rounded, input_precision="tf32x3") * tl.exp(G)[:, None]
        lower = r[:, None] >= r[None, :]
        decay = tl.exp(tl.where(lower, G[:, None] - G[None, :], 0.0))
        scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * decay
        o += tl.dot(tl.where(lower, scores, 0.0).to(dtype), delta.to(dtype), input_precision="tf32x3")
        tl.store(out + at * DV + e[None, :], o, mask=value_mask)
        left = (delta * tl.exp(chunk_total - G)[:, None]).to(dtype)
        S = S * tl.exp(chunk_total) + tl.dot(tl.trans(keys), left, input_precision="tf32x3")
    tl.store(states, S, mask=whole)

    # The last rows, which the next convolution reads; the first kernel has read what they overwrite.
    t = end - (W - 1) + tl.arange(0, BLOCK_W)
    there = (t >= first) & (t < end) & (req_idx >= 0)
    ring_index = (tl.load(positions + first, mask=first < end) + t - first + RING * W) % RING  # non-negative
    mine = ring + req_idx * (RING * width) + ring_index[:, None] * width
    rows = qkv + t[:, None] * qkv_n
    at_v, mask = 2 * KEYS * DK + head * DV + e[None, :], there[:, None] & (e < DV)[None, :]
    tl.store(mine + at_v, tl.load(rows + at_v, mask=mask, other=0.0), mask=mask)
    if (part == 0) & ((head == 0) | ((FIRST + head) % GROUP == 0)):
        at_q, key_inside = key_head * DK + d[None, :], there[:, None] & (d < DK)[None, :]
        tl.store(mine + at_q, tl.load(rows + at_q, mask=key_inside, other=0.0), mask=key_inside)
        at_k = KEYS * DK + at_q
        tl.store(mine + at_k, tl.load(rows + at_k, mask=key_inside, other=0.0), mask=key_inside)


@triton.jit
def _gated_norm_kernel(
    out, z, norm, z_n, eps, VALUES: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    h, e = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    inside = (h < VALUES)[:, None] & (e < DV)[None, :]
    at = h[:, None] * DV + e[None, :]
    o = tl.load(out + n * (VALUES * DV) + at, mask=inside, other=0.0).to(tl.float32)
    gated = tl.load(z + n * z_n + at, mask=inside, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm + e, mask=e < DV, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * norm_weight[None, :] * gated / (1.0 + tl.exp(-gated))
    tl.store(out + n * (VALUES * DV) + at, o, mask=inside)


def gated_delta_prefill(
    x: DeltaInput,
    p: GatedDelta,
    cache: DeltaState,
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    cu_q: torch.Tensor,
) -> torch.Tensor:
    """Computes the outputs [N, V dv] of prompt chunks, updates their states, and stores each chunk's last W - 1 rows.

    Args:
        req_indices: of the n sequences [n] int64; none has accepted rows. -1: padding, stores nothing.
        positions: of the rows [N] int64.
        cu_q: cumulative rows per sequence [n + 1] int32.
    """
    if not dispatch.on_gpu(x.z):
        return reference(x, p, cache, req_indices, positions, cu_q)
    (N, n), conv_width, ring = (len(x.z), len(req_indices)), p.conv.shape[0], cache.qkv.shape[1]
    _, values, key_dim, value_dim = cache.state.shape
    assert x.qkv.stride(1) == x.gates.stride(1) == x.z.stride(1) == 1
    assert all(t.is_contiguous() for t in (cache.state, cache.qkv, p.conv))
    q, k = (x.qkv.new_empty(N, p.key_heads, key_dim) for _ in range(2))
    v, w = (x.qkv.new_empty(N, values, width) for width in (value_dim, key_dim))
    totals, betas = (x.qkv.new_empty(N, values, dtype=torch.float32) for _ in range(2))
    out = x.qkv.new_empty(N, values * value_dim)
    heads = {"KEYS": p.key_heads, "VALUES": values, "DK": key_dim, "DV": value_dim}
    block_k = triton.next_power_of_2(max(key_dim, MIN_KEYS))
    block_v = triton.next_power_of_2(max(value_dim, MIN_VALUES))
    chunk_total = {"BLOCK_S": max(triton.next_power_of_2(n), MIN_SEQUENCES), "BLOCK_K": block_k, "BLOCK_V": block_v}
    chunks = N // _CHUNK + n  # upper bound
    _inputs_kernel[chunks, 2 * p.key_heads + values](
        x.qkv, x.gates, p.conv, p.a_log, p.dt_bias, cache.qkv, req_indices, positions, cu_q, q, k, v, totals, betas,
        x.qkv.stride(0), x.gates.stride(0), n, key_dim**-0.5, W=conv_width, RING=ring, **heads, **chunk_total,
        num_warps=8, maxnreg=128,
    )  # fmt: skip
    groups = {"GROUP": p.group, "FIRST": p.first}
    _systems_kernel[chunks, values](k, v, w, totals, betas, cu_q, n, **heads, **groups, **chunk_total, num_warps=4)
    # Three stages prefetch chunks, but a program of 16-bit rows then takes most of an SM.
    roomy = out.itemsize == 2 and triton.cdiv(value_dim, COLUMNS) * values <= sm_count(out.device)
    _chunks_kernel[triton.cdiv(value_dim, COLUMNS), values, n](
        x.qkv, q, k, v, w, totals, cache.state, cache.qkv, req_indices, positions, cu_q, out, x.qkv.stride(0),
        W=conv_width, RING=ring, BLOCK_W=triton.next_power_of_2(max(conv_width - 1, 1)), BLOCK_K=block_k,
        BLOCK_V=COLUMNS, **heads, **groups, num_warps=4,
        num_stages=3 if roomy else 2,
    )  # fmt: skip
    block_h = max(1, min(2048 // block_v, triton.next_power_of_2(values)))
    _gated_norm_kernel[N, triton.cdiv(values, block_h)](
        out, x.z, p.norm, x.z.stride(0), p.eps, VALUES=values, DV=value_dim, BLOCK_H=block_h, BLOCK_V=block_v,
        num_warps=4,
    )  # fmt: skip
    return out
