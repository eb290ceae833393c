"""Gluon lookups in a few expert ids: which experts are active, and their pairs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _alike(size, warps):
    """Layout of [size]: consecutive elements in consecutive lanes, replicated in each warp."""
    lanes = [[1 << i] for i in range(5)]
    registers = [[1 << i] for i in range(5, size.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [[0]] * (warps.bit_length() - 1), [], [size])


@gluon.jit
def _popcount(x):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def active_experts(ids, P, first, EXPERTS: gl.constexpr, BLOCK_P: gl.constexpr):
    """Returns each local expert's index among the active ones, or -1, in vectors of 32; also their number."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _alike(BLOCK_P, WARPS)
    p = gl.arange(0, BLOCK_P, layout=LAYOUT)
    local = gl.load(ids + p, mask=p < P, other=-1) - first
    bit = gl.full_like(local, 1) << (local & 31)
    word_of = gl.where((local >= 0) & (local < EXPERTS), local >> 5, -1)
    lane = gl.arange(0, 32, layout=_alike(32, WARPS))
    below = (gl.full_like(lane, 1) << lane) - 1
    count = 0
    indices = ()
    for w in gl.static_range((EXPERTS + 31) // 32):
        word = gl.reduce_or(gl.where(word_of == w, bit, 0), 0)
        index = count + _popcount(word & below)
        indices = indices + (gl.where(((word >> lane) & 1) != 0, index, -1),)  # type: ignore[assignment]  # noqa: RUF005
        count += _popcount(word)
    return indices, count


@gluon.jit
def nth_expert(indices, j, EXPERTS: gl.constexpr):
    """Returns the j-th active local expert."""
    lane = gl.arange(0, 32, layout=_alike(32, gl.num_warps()))
    found = gl.full_like(lane, 0)
    for w in gl.static_range((EXPERTS + 31) // 32):
        found = gl.where(indices[w] == j, lane + w * 32, found)
    return gl.max(found, 0)


@gluon.jit
def slots(ids, n, N, TOP_K: gl.constexpr):
    """Loads the experts of tokens n, one vector per top-k slot."""
    found = ()
    for s in gl.static_range(TOP_K):
        found = found + (gl.load(ids + n * TOP_K + s, mask=n < N, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def pairs_with(of, n, expert, TOP_K: gl.constexpr):
    """Returns the first pair of each token n with the expert (global id), or -1."""
    pair = gl.full_like(n, -1)
    for s in gl.static_range(TOP_K - 1, -1, -1):
        pair = gl.where(of[s] == expert, n * TOP_K + s, pair)
    return pair


@gluon.jit
def weights_of(of, weights, n, expert, TOP_K: gl.constexpr):
    """Sums the expert's weights for tokens n."""
    total = gl.full_like(n, 0).to(gl.float32)
    for s in gl.static_range(TOP_K):
        total += gl.load(weights + n * TOP_K + s, mask=of[s] == expert, other=0.0)
    return total
