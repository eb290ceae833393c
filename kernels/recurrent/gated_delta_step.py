"""Decode step of the gated delta rule: convolution, norms, gates and one pass over the state.

A program has one value head's state in registers. While the preceding projection still runs, it loads the state and
adds the last step's accepted rows; then it writes the state and processes this step's rows. So a step reads and writes
each state once, whatever the number of drafts.

The state is not advanced by this step's rows. Up to SYSTEM of them need S^T k and S^T q of the same state, and each
other's products: their deltas solve a triangular system, see `kernels.recurrent.reference.chunked`. A warp owns some
columns of the state, with all keys, and solves the system for these; rows and their products pass through memory, and
outputs are normalized together at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.overlap import pdl_options, prefetch, sm_count, start_successor, store_in_place, wait_for_predecessor
from kernels.recurrent.convolution import convolve, gate, norm_scale
from kernels.recurrent.reference import gated_delta_step as reference

TWO_ON_AN_SM = 128  # registers per thread
# The state is RUN tiles [keys / RUN / KI, values / VI, KI, VI] in registers, the last dims across a warp's lanes. Tile
# i has the keys that are i modulo RUN, so that one load gives a thread RUN elements of a row.
RUN, KI, VI = tl.constexpr(4), tl.constexpr(8), tl.constexpr(16)
SYSTEM = 8  # max rows whose deltas are solved for at once
HALVED_FROM = 7  # rows per step from which systems are halved where two programs share an SM's registers
LINE = tl.constexpr(32)  # elements per cache line


@triton.jit
def _prefetch_taps(
    conv, ring, begin, channel, d,
    D: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    w, column = tl.minimum(tl.arange(0, BLOCK_W), W - 1)[:, None], channel + tl.minimum(d, D - 1)[None, :]
    prefetch(conv + w * WIDTH + column)
    prefetch(ring + (begin - (W - 1) + w + RING * W) % RING * WIDTH + column)


@triton.jit
def _run(at, i, there, D: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads elements `i` to `i` + RUN - 1 of rows of D, as RUN tensors; one instruction if aligned.

    0 past the last element, and where `there` is false.
    """
    mask = (i < D) & there
    if ALIGNED:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.u32 wanted, $5, 0;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            @wanted ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
        return (
            a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True), c.to(tl.float32, bitcast=True),
            d.to(tl.float32, bitcast=True),
        )  # fmt: skip
    else:
        return (
            tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=(i + 1 < D) & there, other=0.0),
            tl.load(at + 2, mask=(i + 2 < D) & there, other=0.0), tl.load(at + 3, mask=(i + 3 < D) & there, other=0.0),
        )  # fmt: skip


@triton.jit
def _and(found, tile):
    return found + (tile,)  # noqa: RUF005


@triton.jit
def _plus(tile, factors, first: tl.constexpr, tiles, COUNT: tl.constexpr):
    """Adds the first COUNT tiles, each times a factor; the first factor has index `first`."""
    for j in tl.static_range(COUNT):
        tile += factors[first + j] * tiles[j]
    return tile


@triton.jit
def _times_state(x, S):
    """Computes S^T x [1, values / VI, 1, VI] of a row's runs x."""
    tile = x[0] * S[0]
    for i in tl.static_range(1, RUN):
        tile = tl.fma(x[i], S[i], tile)
    return tl.sum(tl.sum(tile, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _with_rows(
    S, rows, decays, begin, end, last, d4, e4,
    DK: tl.constexpr, DV: tl.constexpr, ROW: tl.constexpr, VALUES: tl.constexpr, COUNT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Adds k delta^T of stored rows [begin, end), at most COUNT, to a state that has decayed up to row `end` - 1."""
    S0, S1, S2, S3 = S
    for x in tl.static_range(COUNT):
        there = begin + x < end
        at = rows + (begin + x) * ROW
        k = _run(at + d4, d4, there, DK, ALIGNED)
        delta = tl.load(at + DK + e4, mask=(e4 < DV) & there, other=0.0)
        delta *= tl.exp(last - tl.load(decays + (begin + x) * VALUES, mask=there, other=0.0))
        S0, S1 = tl.fma(k[0], delta, S0), tl.fma(k[1], delta, S1)
        S2, S3 = tl.fma(k[2], delta, S2), tl.fma(k[3], delta, S3)
    return S0, S1, S2, S3


@triton.jit
def _gated_delta_step_kernel(
    qkv, gates, z, conv, a_log, dt_bias, norm, state, ring, cached_rows, cached_decays, accepted, req_indices,
    positions, live,
    work, out, qkv_n, gates_n, z_n, eps, q_scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, MAX_ROWS: tl.constexpr,
    SYSTEM: tl.constexpr, WORK: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DRAFTED: tl.constexpr, PDL: tl.constexpr,
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
    key_mask, inside = new[:, None] & (d < DK)[None, :], new[:, None] & (e < DV)[None, :]
    if tl.load(live + n) == 0:
        wait_for_predecessor(PDL)
        tl.store(outs, tl.zeros((BLOCK_R, BLOCK_V), out.dtype.element_ty), mask=inside)
        return

    req_idx = tl.load(req_indices + i).to(tl.int64)
    begin = tl.load(positions + n)
    count = tl.load(accepted + req_idx) if DRAFTED == 0 else DRAFTED
    row: tl.constexpr = VALUES * (DK + DV)
    last_rows = cached_rows + req_idx * (MAX_ROWS * row) + head * (DK + DV)
    last_decays = cached_decays + req_idx * (MAX_ROWS * VALUES) + head
    mine = ring + req_idx * (RING * width)
    if PDL:
        _prefetch_taps(conv, mine, begin, at_q, d, DK, width, W, BLOCK_W, RING)
        _prefetch_taps(conv, mine, begin, at_k, d, DK, width, W, BLOCK_W, RING)
        _prefetch_taps(conv, mine, begin, at_v, e, DV, width, W, BLOCK_W, RING)
        line = tl.arange(0, triton.next_power_of_2(triton.cdiv(DK + DV, LINE)))
        prefetch(last_rows + tl.minimum(r, MAX_ROWS - 1)[:, None] * row + tl.minimum(line * LINE, DK + DV - 1)[None, :])
    # In two dims the tile has the same layout in all Triton releases: one warp per VI columns.
    h, c = tl.arange(0, BLOCK_K // RUN // KI * (BLOCK_V // VI))[:, None], tl.arange(0, KI * VI)[None, :]
    key, value = (h // (BLOCK_V // VI) * KI + c // VI) * RUN, h % (BLOCK_V // VI) * VI + c % VI
    states = state + (req_idx * VALUES + head) * (DK * DV) + key * DV + value
    whole = (key < DK) & (value < DV)
    whole1, whole2, whole3 = whole, whole, whole
    if DK // RUN * RUN != DK:  # the last run is partial
        whole1, whole2 = (key + 1 < DK) & (value < DV), (key + 2 < DK) & (value < DV)
        whole3 = (key + 3 < DK) & (value < DV)
    tile: tl.constexpr = (BLOCK_K // RUN // KI, BLOCK_V // VI, KI, VI)
    flat: tl.constexpr = (BLOCK_K // RUN // KI * (BLOCK_V // VI), KI * VI)
    S0 = tl.reshape(tl.load(states, mask=whole, other=0.0), tile)
    S1 = tl.reshape(tl.load(states + DV, mask=whole1, other=0.0), tile)
    S2 = tl.reshape(tl.load(states + 2 * DV, mask=whole2, other=0.0), tile)
    S3 = tl.reshape(tl.load(states + 3 * DV, mask=whole3, other=0.0), tile)
    d4 = tl.arange(0, tile[0])[:, None, None, None] * (RUN * KI) + tl.arange(0, KI)[None, None, :, None] * RUN
    e4 = tl.arange(0, tile[1])[None, :, None, None] * VI + tl.arange(0, VI)[None, None, None, :]
    pair: tl.constexpr = 1 if MAX_ROWS == 1 else 2  # rows whose loads are in flight at once
    aligned: tl.constexpr = PDL and DK % RUN == 0 and DV % RUN == 0
    if count > 0:
        last = tl.load(last_decays + (count - 1) * VALUES)
        factor = tl.exp(last)
        S0, S1, S2, S3 = S0 * factor, S1 * factor, S2 * factor, S3 * factor
        for x in range(0, count, pair):
            S0, S1, S2, S3 = _with_rows(
                (S0, S1, S2, S3), last_rows, last_decays, x, count, last, d4, e4, DK, DV, row, VALUES,
                pair, aligned,
            )  # fmt: skip
        if DRAFTED == 0:
            tl.store(states, tl.reshape(S0, flat), mask=whole)
            tl.store(states + DV, tl.reshape(S1, flat), mask=whole1)
            tl.store(states + 2 * DV, tl.reshape(S2, flat), mask=whole2)
            tl.store(states + 3 * DV, tl.reshape(S3, flat), mask=whole3)
    decay, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    norm_weight = tl.load(norm + e, mask=e < DV, other=0.0).to(tl.float32)

    wait_for_predecessor(PDL)
    p = begin + r
    given = qkv + n * qkv_n
    q = convolve(mine, given, conv, p, begin, new, at_q, qkv_n, d, DK, width, W, RING)
    k = convolve(mine, given, conv, p, begin, new, at_k, qkv_n, d, DK, width, W, RING)
    v = convolve(mine, given, conv, p, begin, new, at_v, qkv_n, e, DV, width, W, RING)
    b = tl.load(gates + (n + r) * gates_n + head, mask=new, other=0.0)
    a = tl.load(gates + (n + r) * gates_n + VALUES + head, mask=new, other=0.0)
    gated = tl.load(z + (n + r)[:, None] * z_n + head * DV + e[None, :], mask=inside, other=0.0).to(tl.float32)
    # No program reads these ring entries in this step.
    ring_index = (p % RING)[:, None] * width
    raw = tl.load(given + r[:, None] * qkv_n + at_v + e[None, :], mask=inside, other=0.0)
    tl.store(mine + ring_index + at_v + e[None, :], raw, mask=inside)
    if (head == 0) | ((FIRST + head) % GROUP == 0):
        raw_q = tl.load(given + r[:, None] * qkv_n + at_q + d[None, :], mask=key_mask, other=0.0)
        raw_k = tl.load(given + r[:, None] * qkv_n + at_k + d[None, :], mask=key_mask, other=0.0)
        tl.store(mine + ring_index + at_q + d[None, :], raw_q, mask=key_mask)
        tl.store(mine + ring_index + at_k + d[None, :], raw_k, mask=key_mask)
    q *= (norm_scale(q) * q_scale)[:, None]
    k *= norm_scale(k)[:, None]
    g, beta = gate(a, b, decay, bias)
    total = tl.cumsum(tl.where(new, g, 0.0), 0)
    first = r // SYSTEM * SYSTEM
    since = total  # decay since then
    if ROWS > SYSTEM:
        since -= tl.sum(tl.where(r[None, :] == first[:, None] - 1, total[None, :], 0.0), 1)
    decay_since = tl.exp(since)
    ours = work + (n * VALUES + head) * WORK  # per row: q, beta v, its output, factors
    row_work = ours + r[:, None] * (VALUES * WORK)
    factors = row_work + DK + 2 * DV  # of deltas, in its delta and in its output; of S^T q and of S^T k
    tl.debug_barrier()  # all warps have read the last step's rows
    last_rows += DRAFTED * row
    tl.store(last_rows + r[:, None] * row + d[None, :], k, mask=key_mask)
    if DRAFTED == 0:
        tl.store(last_decays + r * VALUES, total, mask=new)
    else:  # summed from the first draft on
        before = tl.load(last_decays + (DRAFTED - 1) * VALUES)
        tl.store(last_decays + (DRAFTED + r) * VALUES, before + total, mask=new)
    tl.store(row_work + d[None, :], q, mask=key_mask)
    tl.store(row_work + DK + e[None, :], beta[:, None] * v, mask=inside)
    tl.store(factors + 2 * SYSTEM, decay_since[:, None], mask=new[:, None])
    tl.store(factors + 2 * SYSTEM + 1, (beta * decay_since)[:, None], mask=new[:, None])
    tl.debug_barrier()
    together: tl.constexpr = ROWS if ROWS < SYSTEM else SYSTEM
    if ROWS > 1:
        j8 = tl.arange(0, SYSTEM)[None, :]
        delta_products = tl.zeros((BLOCK_R, SYSTEM), tl.float32)
        out_products = tl.zeros((BLOCK_R, SYSTEM), tl.float32)
        for j in tl.static_range(together):
            other = (first + j)[:, None]
            k_j = tl.load(last_rows + other * row + d[None, :], mask=key_mask & (other < ROWS), other=0.0)
            delta_products = tl.where(j8 == j, tl.sum(k * k_j, 1)[:, None], delta_products)
            out_products = tl.where(j8 == j, tl.sum(q * k_j, 1)[:, None], out_products)
        other = first[:, None] + j8
        then = tl.load(last_decays + other * VALUES, mask=other < ROWS, other=0.0)
        decay_between = tl.exp(tl.minimum(total[:, None] - then, 0.0))
        tl.store(factors + j8, delta_products * -beta[:, None] * decay_between, mask=new[:, None])
        tl.store(factors + SYSTEM + j8, out_products * decay_between, mask=new[:, None])
    for x0 in range(0, ROWS, SYSTEM):
        by_keys, by_queries, wanted, seen, deltas, outputs = (), (), (), (), (), ()
        in_delta, in_output = (), ()
        for x in tl.static_range(together):
            there = x0 + x < ROWS
            k_x = _run(last_rows + (x0 + x) * row + d4, d4, there, DK, aligned)
            q_x = _run(ours + (x0 + x) * (VALUES * WORK) + d4, d4, there, DK, aligned)
            if ROWS == 1:
                in_output = _and(in_output, _times_state(q_x, k_x))
            by_keys = _and(by_keys, _times_state(k_x, (S0, S1, S2, S3)))
            by_queries = _and(by_queries, _times_state(q_x, (S0, S1, S2, S3)))
        if ROWS > 1:
            tl.debug_barrier()
        for x in tl.static_range(together):  # issue all loads first: they would wait behind stores
            there = x0 + x < ROWS
            u = tl.load(ours + (x0 + x) * (VALUES * WORK) + DK + e4, mask=(e4 < DV) & there, other=0.0)
            f = ours + (x0 + x) * (VALUES * WORK) + DK + 2 * DV
            seen = _and(seen, tl.load(f + 2 * SYSTEM, mask=there, other=0.0) * by_queries[x])
            wanted = _and(wanted, u - tl.load(f + 2 * SYSTEM + 1, mask=there, other=0.0) * by_keys[x])
            for j in tl.static_range(x + 1 if ROWS > 1 else 0):
                in_delta = _and(in_delta, tl.load(f + j, mask=there & (j < x), other=0.0))
                in_output = _and(in_output, tl.load(f + SYSTEM + j, mask=there, other=0.0))
        for x in tl.static_range(together):
            deltas = _and(deltas, _plus(wanted[x], in_delta, x * (x + 1) // 2, deltas, x))
            outputs = _and(outputs, _plus(seen[x], in_output, x * (x + 1) // 2, deltas, x + 1))
        for x in tl.static_range(together):
            held = (e4 < DV) & (x0 + x < ROWS)
            store_in_place(last_rows + (x0 + x) * row + DK + e4, deltas[x], held, PDL)
            store_in_place(ours + (x0 + x) * (VALUES * WORK) + DK + DV + e4, outputs[x], held, PDL)
        if ROWS > SYSTEM:
            end = tl.minimum(x0 + SYSTEM, ROWS)
            last = tl.load(last_decays + (end - 1) * VALUES)
            factor = tl.exp(last - tl.load(last_decays + (x0 - 1) * VALUES, mask=x0 > 0, other=0.0))
            S0, S1, S2, S3 = _with_rows(
                (S0 * factor, S1 * factor, S2 * factor, S3 * factor), last_rows, last_decays, x0, end, last, d4, e4, DK,
                DV,
                row, VALUES, SYSTEM, aligned,
            )  # fmt: skip
    start_successor(PDL)
    tl.debug_barrier()
    o = tl.load(row_work + DK + DV + e[None, :], mask=inside, other=0.0)
    o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * norm_weight[None, :] * gated / (1.0 + tl.exp(-gated))
    tl.store(outs, o, mask=inside)


def gated_delta_step(
    x: DeltaInput,
    p: GatedDelta,
    cache: DeltaState,
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    live: torch.Tensor,
    drafted: int = 0,
) -> torch.Tensor:
    """Applies the last step's accepted rows to the states, computes this step's outputs [N, V dv], stores its rows.

    After a step of one draft row, later drafts leave the state alone: they apply the rows of the drafts before them in
    registers, and store theirs after these. A step that verifies them overwrites these rows.

    Args:
        req_indices: of the n sequences [n] int64; each has N / n rows.
        positions: of the rows [N] int64.
        live: [N]; a sequence whose first row is not live is left unchanged, and its outputs are 0.
        drafted: rows of preceding draft steps, since the state; then N = n.
    """
    if not dispatch.on_gpu(x.z):
        return reference(x, p, cache, req_indices, positions, live, drafted)
    n, rows = len(req_indices), len(positions) // len(req_indices)
    _, values, key_dim, value_dim = cache.state.shape
    ring, max_rows, conv_width = cache.qkv.shape[1], cache.rows.shape[1], p.conv.shape[0]
    assert drafted + rows <= max_rows and (rows == 1 or not drafted) and conv_width - 1 + max_rows <= ring
    assert x.qkv.stride(1) == x.gates.stride(1) == x.z.stride(1) == 1
    assert all(t.is_contiguous() for t in (cache.state, cache.qkv, cache.rows, cache.decays, p.conv))
    block_r = triton.next_power_of_2(max_rows)
    crowded = n * values > sm_count(x.z.device)
    system = min(block_r, SYSTEM // 2 if crowded and rows >= HALVED_FROM else SYSTEM)
    width = key_dim + 2 * value_dim + triton.cdiv(2 * system + 2, RUN.value) * RUN.value  # row stride: runs are aligned
    work = torch.empty(len(x.z), values, width, dtype=torch.float32, device=x.z.device)
    out = torch.empty(len(x.z), values * value_dim, dtype=x.z.dtype, device=x.z.device)
    _gated_delta_step_kernel[n, values](
        x.qkv, x.gates, x.z, p.conv, p.a_log, p.dt_bias, p.norm, cache.state, cache.qkv, cache.rows, cache.decays,
        cache.accepted, req_indices, positions, live, work, out, x.qkv.stride(0), x.gates.stride(0), x.z.stride(0),
        p.eps,
        key_dim**-0.5,
        ROWS=rows, KEYS=p.key_heads, VALUES=values, DK=key_dim, DV=value_dim, W=conv_width, GROUP=p.group,
        FIRST=p.first, RING=ring, MAX_ROWS=max_rows, BLOCK_W=triton.next_power_of_2(conv_width),
        # Independent of this step's rows: lengths are summed in the same order with and without drafts.
        BLOCK_R=block_r,
        SYSTEM=system,
        WORK=width,
        BLOCK_K=triton.next_power_of_2(max(key_dim, RUN.value * KI.value)),
        BLOCK_V=triton.next_power_of_2(max(value_dim, VI.value)),
        DRAFTED=drafted,
        num_warps=8, maxnreg=TWO_ON_AN_SM if crowded else None, **pdl_options(out),
    )  # fmt: skip
    return out
