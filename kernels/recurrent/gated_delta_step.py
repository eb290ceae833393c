"""A decode step of the gated delta rule: convolution, norms, gates and one pass over the state.

A program has the state of one value head in registers. It loads the state and applies the accepted rows of the last
step while the projection before it still runs, writes the state, and goes on with this step's rows. So a step reads and
writes each state once, whatever the number of drafts, and a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.overlap import overlapped, sm_count, start_successor, wait_for_predecessor
from kernels.recurrent.convolved import convolved, gate, norm_scale
from kernels.reference.gated_delta import gated_delta_step as reference

TWO_ON_AN_SM = 128  # registers of a thread


@triton.jit
def _row(tile, r, BLOCK_R: tl.constexpr):
    """Returns row r of [BLOCK_R, ...]."""
    if len(tile.shape) == 1:
        return tl.sum(tl.where(tl.arange(0, BLOCK_R) == r, tile, 0.0), 0)
    else:
        return tl.sum(tl.where((tl.arange(0, BLOCK_R) == r)[:, None], tile, 0.0), 0)


@triton.jit
def _gated_delta_step_kernel(
    qkv, gates, z, conv, a_log, dt_bias, norm, state, ring, gates_ring, accepted, slots, positions, live, out,
    qkv_n, gates_n, z_n, eps, q_scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    n = i.to(tl.int64) * ROWS
    key_head = (FIRST + head) // GROUP
    d, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    width: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    at_q, at_k, at_v = key_head * DK, (KEYS + key_head) * DK, 2 * KEYS * DK + head * DV
    outs = out + (n + r)[:, None] * (VALUES * DV) + head * DV + e[None, :]
    inside = (r < ROWS)[:, None] & (e < DV)[None, :]
    if tl.load(live + n) == 0:
        wait_for_predecessor(PDL)
        tl.store(outs, tl.zeros((BLOCK_R, BLOCK_V), out.dtype.element_ty), mask=inside)
        return

    # What is older than the predecessor.
    slot = tl.load(slots + i).to(tl.int64)
    begin = tl.load(positions + n)
    count = tl.minimum(tl.load(accepted + slot), begin)
    mine = ring + slot * (RING * width)
    gates_mine = gates_ring + slot * (RING * 2 * VALUES)
    decay, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    states = state + (slot * VALUES + head) * (DK * DV) + d[:, None] * DV + e[None, :]
    whole = (d < DK)[:, None] & (e < DV)[None, :]
    S = tl.load(states, mask=whole, other=0.0)
    if count > 0:
        p, there = begin - count + r, r < count
        k = convolved(mine, qkv, conv, p, begin, there, at_k, qkv_n, d, DK, width, W, RING, False)
        v = convolved(mine, qkv, conv, p, begin, there, at_v, qkv_n, e, DV, width, W, RING, False)
        k *= norm_scale(k)[:, None]
        b = tl.load(gates_mine + p % RING * (2 * VALUES) + head, mask=there, other=0.0)
        a = tl.load(gates_mine + p % RING * (2 * VALUES) + VALUES + head, mask=there, other=0.0)
        keep, beta = gate(a, b, decay, bias)
        keep = tl.exp(keep)
        for x in range(count):
            k_x = _row(k, x, BLOCK_R)
            S *= _row(keep, x, BLOCK_R)
            delta = _row(beta, x, BLOCK_R) * (_row(v, x, BLOCK_R) - tl.sum(k_x[:, None] * S, 0))
            S += k_x[:, None] * delta[None, :]
        tl.store(states, S, mask=whole)
    gain = tl.load(norm + e, mask=e < DV, other=0.0).to(tl.float32)

    wait_for_predecessor(PDL)
    new = r < ROWS
    p = begin + r
    rows = qkv + n * qkv_n
    q = convolved(mine, rows, conv, p, begin, new, at_q, qkv_n, d, DK, width, W, RING, True)
    k = convolved(mine, rows, conv, p, begin, new, at_k, qkv_n, d, DK, width, W, RING, True)
    v = convolved(mine, rows, conv, p, begin, new, at_v, qkv_n, e, DV, width, W, RING, True)
    q *= (norm_scale(q) * q_scale)[:, None]
    k *= norm_scale(k)[:, None]
    b = tl.load(gates + (n + r) * gates_n + head, mask=new, other=0.0)
    a = tl.load(gates + (n + r) * gates_n + VALUES + head, mask=new, other=0.0)
    keep, beta = gate(a, b, decay, bias)
    keep = tl.exp(keep)
    # No program reads these places of the ring in this step.
    place = (p % RING)[:, None]
    tl.store(gates_mine + p % RING * (2 * VALUES) + head, b, mask=new)
    tl.store(gates_mine + p % RING * (2 * VALUES) + VALUES + head, a, mask=new)
    raw = tl.load(rows + r[:, None] * qkv_n + at_v + e[None, :], mask=inside, other=0.0)
    tl.store(mine + place * width + at_v + e[None, :], raw, mask=inside)
    if (head == 0) | ((FIRST + head) % GROUP == 0):
        of_key = new[:, None] & (d < DK)[None, :]
        raw_q = tl.load(rows + r[:, None] * qkv_n + at_q + d[None, :], mask=of_key, other=0.0)
        tl.store(mine + place * width + at_q + d[None, :], raw_q, mask=of_key)
        raw_k = tl.load(rows + r[:, None] * qkv_n + at_k + d[None, :], mask=of_key, other=0.0)
        tl.store(mine + place * width + at_k + d[None, :], raw_k, mask=of_key)

    for x in range(ROWS):
        q_x, k_x = _row(q, x, BLOCK_R), _row(k, x, BLOCK_R)
        S *= _row(keep, x, BLOCK_R)
        delta = _row(beta, x, BLOCK_R) * (_row(v, x, BLOCK_R) - tl.sum(k_x[:, None] * S, 0))
        S += k_x[:, None] * delta[None, :]
        o = tl.sum(q_x[:, None] * S, 0)
        gated = tl.load(z + (n + x) * z_n + head * DV + e, mask=e < DV, other=0.0).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * gain * gated / (1.0 + tl.exp(-gated))
        tl.store(out + (n + x) * (VALUES * DV) + head * DV + e, o, mask=e < DV)
    start_successor(PDL)


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
    ring, width = kept.qkv.shape[1], p.conv.shape[0]
    most = (ring - width + 1) // 2
    assert rows <= most and x.qkv.stride(1) == x.gates.stride(1) == x.z.stride(1) == 1
    assert all(t.is_contiguous() for t in (kept.state, kept.qkv, kept.gates, p.conv))
    out = torch.empty(len(x.z), values * value_dim, dtype=x.z.dtype, device=x.z.device)
    _gated_delta_step_kernel[n, values](
        x.qkv, x.gates, x.z, p.conv, p.a_log, p.dt_bias, p.norm, kept.state, kept.qkv, kept.gates, kept.accepted,
        slots, positions, live, out, x.qkv.stride(0), x.gates.stride(0), x.z.stride(0), p.eps, key_dim**-0.5,
        ROWS=rows, KEYS=p.key_heads, VALUES=values, DK=key_dim, DV=value_dim, W=width, GROUP=p.group, FIRST=p.first,
        # Not by this step's rows: lengths are summed in one order in steps with drafts and without.
        RING=ring, BLOCK_R=triton.next_power_of_2(most),
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=8, maxnreg=TWO_ON_AN_SM if n * values > sm_count(out.device) else None, **overlapped(out),
    )  # fmt: skip
    return out
