"""Prologue and epilogue of a projection tile, shared by the Hopper kernels: lookups, and where sums go."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from kernels.attention.kv_append import store_heads
from kernels.dense.silu_mul import rounded_swiglu
from kernels.dense.split_k_reduce_sm90 import send_pairs
from kernels.peers.ll_protocol import EPOCH_UNITS


@gluon.jit
def load_epilogue(
    bias, count, peers, cos, sin, slot_mapping, top, apart, row, N, R,
    RESULT: gl.constexpr, TILE: gl.constexpr, N_MAX: gl.constexpr, BIAS: gl.constexpr, PAIRED: gl.constexpr,
    RANKS: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Waits for the predecessor, and loads what the epilogue needs while the tile's weights arrive.

    The tile's sums are [TILE, N_MAX] in the layout RESULT, of output rows from `row` and weight rows from `top` on; or
    pairs of sums: of rows `apart` from each other, or of neighbors that share a word.

    Returns:
        Which sums are valid; the biases of both sums of a pair; and for words the epoch, pieces, columns and LL
        buffers, for heads their index, dims, slots, cosines and sines.
    """
    SENDS: gl.constexpr = RANKS > 0
    i = gl.arange(0, TILE, layout=gl.SliceLayout(1, RESULT))
    r = 2 * i if SENDS else i
    y_bias, up_bias = i, i
    if BIAS:
        y_bias = gl.load(bias + top + r, mask=row + r < R, other=0.0).to(gl.float32)[:, None]
        if PAIRED or SENDS:
            ups_at = top + r + (1 if SENDS else apart)
            up_bias = gl.load(bias + ups_at, mask=row + r < R, other=0.0).to(gl.float32)[:, None]
    gdc_wait()
    n = gl.arange(0, N_MAX, layout=gl.SliceLayout(0, RESULT))
    if SENDS:
        tag = gl.load(count) // EPOCH_UNITS + 1
        column = (row + r)[:, None] // 2 + (n * 0)[None, :]
        piece = column // SIZE + n[None, :] * ((R // 2 + SIZE - 1) // SIZE)
        ll_buffers = gl.load(peers + (piece % RANKS if TWO_SHOT else 0))
    live = (row + r < R)[:, None] & (n < N)[None, :]
    if D > 0:
        head, d = row // (D // 2), row % (D // 2) + i[:, None]
        slot = gl.load(slot_mapping + n, mask=n < N, other=-1)[None, :]
        angle = (n * (D // 2))[None, :] + d
        cosine = gl.load(cos + angle, mask=live, other=0.0).to(gl.float32)
        sine = gl.load(sin + angle, mask=live, other=0.0).to(gl.float32)
        return live, y_bias, up_bias, (head, d, slot, cosine, sine)
    elif SENDS:
        return live, y_bias, up_bias, (tag, piece, column, ll_buffers)
    else:
        return live, y_bias, up_bias, ()


@gluon.jit
def store_epilogue(
    y, up, live, y_bias, up_bias, found, out, peers, row, R, rank, k_cache, v_cache, q, k_page, v_page,
    dtype: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    RANKS: gl.constexpr, PIECES: gl.constexpr, SIZE: gl.constexpr, TWO_SHOT: gl.constexpr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SLOT: gl.constexpr,
    HEAD: gl.constexpr,
):  # fmt: skip
    """Writes or sends a tile's live sums, with bias and gate, or as heads; `found` comes from `load_epilogue`."""
    SENDS: gl.constexpr = RANKS > 0
    if BIAS:
        y += y_bias
    if (GATED or SENDS or D > 0) and BIAS:
        up += up_bias
    if GATED:
        y = rounded_swiglu(y, up, dtype)
    n = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))
    if SENDS:
        tag, piece, column, ll_buffers = found
        send_pairs(
            y, up, live, piece, column % SIZE, ll_buffers, peers, tag, rank, dtype, RANKS, PIECES, SIZE, TWO_SHOT
        )
    elif D > 0:
        head, d, slot, cosine, sine = found
        store_heads(
            y, up, cosine, sine, n[None, :].to(gl.int64), head, d, slot, live,
            q, k_cache, v_cache, k_page, v_page, Q_HEADS, KV_HEADS, D, PAGE, SLOT, HEAD,
        )  # fmt: skip
    else:
        r = row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout))
        gl.store(out + r[:, None] + (n * R)[None, :], y.to(out.dtype.element_ty), mask=live)
