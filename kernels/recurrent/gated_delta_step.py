"""A decode step of the gated delta rule: convolution, norms, gates and one pass over the state.

A program has the state of one value head in registers. It loads the state and applies the accepted rows of the last
step while the projection before it still runs, writes the state, and goes on with this step's rows. So a step reads and
writes each state once, whatever the number of drafts, and a row's numbers do not depend on the rows beside it.

A warp has some columns of the state, all their keys, and runs through the rows without waiting for the others: rows
pass through memory, from which each warp loads what it needs of them, and outputs are normalised together at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.overlap import overlapped, prefetch, sm_count, start_successor, store_in_place, wait_for_predecessor
from kernels.recurrent.convolved import convolved, gate, norm_scale
from kernels.reference.gated_delta import gated_delta_step as reference

TWO_ON_AN_SM = 128  # registers of a thread
# Of the tile [keys / KI, values / VI, KI, VI] that the state is in registers: neighbours in the lanes of a warp.
KI, VI = tl.constexpr(8), tl.constexpr(16)
LINE = tl.constexpr(32)  # numbers of a cache line


@triton.jit
def _prefetch_taps(
    conv, ring, begin, channel, d,
    D: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Prefetches what `convolved` will read of the weights, and of the rows before position `begin`."""
    w, column = tl.minimum(tl.arange(0, BLOCK_W), W - 1)[:, None], channel + tl.minimum(d, D - 1)[None, :]
    prefetch(conv + w * WIDTH + column)
    prefetch(ring + (begin - (W - 1) + w + RING * W) % RING * WIDTH + column)


@triton.jit
def _over_keys(tile):
    """Sums over the keys of [keys / KI, values / VI, KI, VI]: dims 0 and 2."""
    return tl.sum(tl.sum(tile, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _delta(S, k, v, keep, beta):
    """Computes a row's delta [1, values / VI, 1, VI], and the state after the row."""
    delta = beta * (v - keep * _over_keys(k * S))
    return delta, tl.fma(k, delta, keep * S)


@triton.jit
def _gated_delta_step_kernel(
    qkv, gates, z, conv, a_log, dt_bias, norm, state, ring, kept_rows, kept_gates, accepted, slots, positions, live,
    work, out, qkv_n, gates_n, z_n, eps, q_scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, MOST: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    n = i.to(tl.int64) * ROWS
    key_head = (FIRST + head) // GROUP
    d, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    width: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    at_q, at_k, at_v = key_head * DK, (KEYS + key_head) * DK, 2 * KEYS * DK + head * DV
    outs = out + (n + r)[:, None] * (VALUES * DV) + head * DV + e[None, :]
    new = r < ROWS
    of_key, inside = new[:, None] & (d < DK)[None, :], new[:, None] & (e < DV)[None, :]
    if tl.load(live + n) == 0:
        wait_for_predecessor(PDL)
        tl.store(outs, tl.zeros((BLOCK_R, BLOCK_V), out.dtype.element_ty), mask=inside)
        return

    # What is older than the predecessor.
    slot = tl.load(slots + i).to(tl.int64)
    begin = tl.load(positions + n)
    count = tl.load(accepted + slot)
    row: tl.constexpr = VALUES * (DK + DV)  # from row to row
    last_rows = kept_rows + slot * (MOST * row) + head * (DK + DV)
    last_gates = kept_gates + slot * (MOST * VALUES * 2) + head * 2
    mine = ring + slot * (RING * width)
    if PDL:
        _prefetch_taps(conv, mine, begin, at_q, d, DK, width, W, BLOCK_W, RING)
        _prefetch_taps(conv, mine, begin, at_k, d, DK, width, W, BLOCK_W, RING)
        _prefetch_taps(conv, mine, begin, at_v, e, DV, width, W, BLOCK_W, RING)
        line = tl.arange(0, triton.next_power_of_2(triton.cdiv(DK + DV, LINE)))
        prefetch(last_rows + tl.minimum(r, MOST - 1)[:, None] * row + tl.minimum(line * LINE, DK + DV - 1)[None, :])
    # The tile's shape of two dims has one layout in all releases of Triton: a warp for each VI columns.
    h, c = tl.arange(0, BLOCK_K // KI * (BLOCK_V // VI))[:, None], tl.arange(0, KI * VI)[None, :]
    key, value = h // (BLOCK_V // VI) * KI + c // VI, h % (BLOCK_V // VI) * VI + c % VI
    states = state + (slot * VALUES + head) * (DK * DV) + key * DV + value
    whole = (key < DK) & (value < DV)
    S = tl.reshape(tl.load(states, mask=whole, other=0.0), [BLOCK_K // KI, BLOCK_V // VI, KI, VI])
    d4 = tl.arange(0, BLOCK_K // KI)[:, None, None, None] * KI + tl.arange(0, KI)[None, None, :, None]
    e4 = tl.arange(0, BLOCK_V // VI)[None, :, None, None] * VI + tl.arange(0, VI)[None, None, None, :]
    if count > 0:
        for x in range(count):
            k_x = tl.load(last_rows + x * row + d4, mask=d4 < DK, other=0.0)
            v_x = tl.load(last_rows + x * row + DK + e4, mask=e4 < DV, other=0.0)
            keep = tl.exp(tl.load(last_gates + x * (VALUES * 2)))
            _, S = _delta(S, k_x, v_x, keep, tl.load(last_gates + x * (VALUES * 2) + 1))
        tl.store(states, tl.reshape(S, [BLOCK_K // KI * (BLOCK_V // VI), KI * VI]), mask=whole)
    decay, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    gain = tl.load(norm + e, mask=e < DV, other=0.0).to(tl.float32)

    wait_for_predecessor(PDL)
    p = begin + r
    given = qkv + n * qkv_n
    q = convolved(mine, given, conv, p, begin, new, at_q, qkv_n, d, DK, width, W, RING)
    k = convolved(mine, given, conv, p, begin, new, at_k, qkv_n, d, DK, width, W, RING)
    v = convolved(mine, given, conv, p, begin, new, at_v, qkv_n, e, DV, width, W, RING)
    b = tl.load(gates + (n + r) * gates_n + head, mask=new, other=0.0)
    a = tl.load(gates + (n + r) * gates_n + VALUES + head, mask=new, other=0.0)
    gated = tl.load(z + (n + r)[:, None] * z_n + head * DV + e[None, :], mask=inside, other=0.0).to(tl.float32)
    # No program reads these places of the ring in this step.
    place = (p % RING)[:, None] * width
    raw = tl.load(given + r[:, None] * qkv_n + at_v + e[None, :], mask=inside, other=0.0)
    tl.store(mine + place + at_v + e[None, :], raw, mask=inside)
    if (head == 0) | ((FIRST + head) % GROUP == 0):
        raw_q = tl.load(given + r[:, None] * qkv_n + at_q + d[None, :], mask=of_key, other=0.0)
        raw_k = tl.load(given + r[:, None] * qkv_n + at_k + d[None, :], mask=of_key, other=0.0)
        tl.store(mine + place + at_q + d[None, :], raw_q, mask=of_key)
        tl.store(mine + place + at_k + d[None, :], raw_k, mask=of_key)
    q *= (norm_scale(q) * q_scale)[:, None]
    k *= norm_scale(k)[:, None]
    g, beta = gate(a, b, decay, bias)
    tl.debug_barrier()  # All warps have read the last step's rows.
    tl.store(last_rows + r[:, None] * row + d[None, :], k, mask=of_key)
    tl.store(last_rows + r[:, None] * row + DK + e[None, :], v, mask=inside)
    tl.store(last_gates + r * (VALUES * 2), g, mask=new)
    tl.store(last_gates + r * (VALUES * 2) + 1, beta, mask=new)
    ours = work + n * row + head * (DK + DV)  # queries and outputs
    tl.store(ours + r[:, None] * row + d[None, :], q, mask=of_key)
    tl.debug_barrier()
    for x in range(ROWS):
        q_x = tl.load(ours + x * row + d4, mask=d4 < DK, other=0.0)
        k_x = tl.load(last_rows + x * row + d4, mask=d4 < DK, other=0.0)
        v_x = tl.load(last_rows + x * row + DK + e4, mask=e4 < DV, other=0.0)
        keep = tl.exp(tl.load(last_gates + x * (VALUES * 2)))
        # Of S^T q the part that the row does not change, which does not wait for delta.
        before = _over_keys(q_x * S)
        delta, S = _delta(S, k_x, v_x, keep, tl.load(last_gates + x * (VALUES * 2) + 1))
        o = keep * before + _over_keys(q_x * k_x) * delta
        store_in_place(ours + x * row + DK + e4, o, e4 < DV, PDL)
    start_successor(PDL)
    tl.debug_barrier()
    o = tl.load(ours + r[:, None] * row + DK + e[None, :], mask=inside, other=0.0)
    o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * gain[None, :] * gated / (1.0 + tl.exp(-gated))
    tl.store(outs, o, mask=inside)


def gated_delta_step(
    x: DeltaInput, p: GatedDelta, kept: DeltaState, slots: torch.Tensor, positions: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Applies the accepted rows of the last step to the states, then computes this step's outputs and keeps its rows.

    Args:
        slots: of the n sequences [n] int64; each has N / n rows.
        positions: of the rows [N] int64.
        live: [N]; a sequence whose first row is not live keeps what it has, and its outputs are 0.

    Returns:
        [N, V dv] in x's dtype.
    """
    if not dispatch.on_gpu(x.z):
        return reference(x, p, kept, slots, positions, live)
    n, rows = len(slots), len(positions) // len(slots)
    _, values, key_dim, value_dim = kept.state.shape
    ring, most, conv_width = kept.qkv.shape[1], kept.rows.shape[1], p.conv.shape[0]
    assert rows <= most and conv_width - 1 + most <= ring
    assert x.qkv.stride(1) == x.gates.stride(1) == x.z.stride(1) == 1
    assert all(t.is_contiguous() for t in (kept.state, kept.qkv, kept.rows, kept.gates, p.conv))
    work = torch.empty(len(x.z), values, key_dim + value_dim, dtype=torch.float32, device=x.z.device)
    out = torch.empty(len(x.z), values * value_dim, dtype=x.z.dtype, device=x.z.device)
    _gated_delta_step_kernel[n, values](
        x.qkv, x.gates, x.z, p.conv, p.a_log, p.dt_bias, p.norm, kept.state, kept.qkv, kept.rows, kept.gates,
        kept.accepted, slots, positions, live, work, out, x.qkv.stride(0), x.gates.stride(0), x.z.stride(0), p.eps,
        key_dim**-0.5,
        ROWS=rows, KEYS=p.key_heads, VALUES=values, DK=key_dim, DV=value_dim, W=conv_width, GROUP=p.group,
        FIRST=p.first, RING=ring, MOST=most, BLOCK_W=triton.next_power_of_2(conv_width),
        # Not by this step's rows: lengths are summed in one order in steps with drafts and without.
        BLOCK_R=triton.next_power_of_2(most),
        BLOCK_K=triton.next_power_of_2(max(key_dim, KI.value)),
        BLOCK_V=triton.next_power_of_2(max(value_dim, VI.value)),
        num_warps=8, maxnreg=TWO_ON_AN_SM if n * values > sm_count(out.device) else None, **overlapped(out),
    )  # fmt: skip
    return out
