"""Producer warpgroup of the Hopper kernels of `kernels.mla.decode` for e4m3 latents: loads and dequantizes.

The MMAs read bf16 or fp16 from shared memory, so these warps load e4m3 and scales into registers, one tile ahead of the
one they wait for, multiply, and store. TMA loads the rope values as they are.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from kernels.attention.schedule_sm90 import TILE, item_at, schedule_of
from kernels.scaled_keys import GROUP

# Words of four elements, 16 bytes per thread, whole sectors; dequantized, eight threads store to all banks of swizzled
# rows. (As single bytes, each pending element would take a register.)
LOADED = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))  # same order as SHARED
# Word $2 of four e4m3 times scale $3 (fp32) -> words $0, $1 of two elements each; NaN stays NaN.
_UNPACK = """{
    .reg .b16 a, b, c, d;
    .reg .b32 low, high;
    .reg .f32 w, x, y, z;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 low, a;
    cvt.rn.f16x2.e4m3x2 high, b;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.f32.f16 w, a;
    cvt.f32.f16 x, b;
    cvt.f32.f16 y, c;
    cvt.f32.f16 z, d;
    mul.rn.f32 w, w, $3;
    mul.rn.f32 x, x, $3;
    mul.rn.f32 y, y, $3;
    mul.rn.f32 z, z, $3;
    cvt.rn.DTYPE.f32 $0, x, w;
    cvt.rn.DTYPE.f32 $1, z, y;
}"""
TO_BF16 = gl.constexpr(_UNPACK.replace("DTYPE", "bf16x2"))
TO_FP16 = gl.constexpr(_UNPACK.replace("DTYPE", "f16x2"))


@gluon.jit
def _fetch(
    latents, scales, column: gl.constexpr, page, page_stride, tile, R: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Starts loading half a tile from `column` on: four pieces [TILE, 16] and the scales [TILE] of two groups."""
    gl.static_assert(R // 2 == 2 * GROUP)
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, LOADED))
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, LOADED))
    slot = tile * TILE % PAGE + n
    rows = latents + page.to(gl.int64) * page_stride + ((slot * (R // 4))[:, None] + (column // 4 + c)[None, :])
    group_scale = scales + (page.to(gl.int64) * (R // GROUP) + column // GROUP) * PAGE + slot
    return (
        gl.load(rows),
        gl.load(rows + 16),
        gl.load(rows + 32),
        gl.load(rows + 48),
        gl.load(group_scale),
        gl.load(group_scale + PAGE),
    )


@gluon.jit
def _unpack(half, target):
    code: gl.constexpr = TO_BF16 if target.dtype == gl.bfloat16 else TO_FP16
    words = target._reinterpret(gl.int32, [TILE, target.shape[1] // 2], WORDS)
    for piece in gl.static_range(4):
        scale = half[4 + piece // 2][:, None]
        low, high = gl.inline_asm_elementwise(
            code, "=r,=r,r,f", [half[piece], scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        words.slice(piece * 32, 32, dim=1).store(gl.join(low, high).reshape([TILE, 32]))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def load_unpacked(
    latents, scales, page_stride, ropes, block_table, table_b, page_rows, bounds, keys, ready, free,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    TILES_M: gl.constexpr, T: gl.constexpr, BLOCK_B: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Fills the two stages piece by piece.

    A left half is ready after two arrivals: this warpgroup's and the TMA copy's.
    `latents` are words of four elements. Pages are `page_stride` words, and `page_rows` rows of `ropes`, apart.
    """
    k_left, k_right, k_rope = keys
    left_ready, right_ready = ready
    left_free, right_free = free
    schedule = schedule_of(bounds, TILES_M, T, BLOCK_B, EARLY)
    begin, end = schedule[7], schedule[8]
    loaded = 0
    at = begin
    while at < end:
        i, _, _, _, _, item_end, first, last = item_at(at, schedule)
        pages = block_table + i.to(gl.int64) * table_b
        page = gl.load(pages + first * TILE // PAGE, mask=first < last, other=0)
        next_page = gl.load(pages + (first + 1) * TILE // PAGE, mask=first + 1 < last, other=0)
        if EARLY:
            if page >= 0:  # always true; keeps the compiler from moving the wait above the load
                gdc_wait()
        left = _fetch(latents, scales, 0, page, page_stride, first, R, PAGE)
        right = _fetch(latents, scales, R // 2, page, page_stride, first, R, PAGE)
        for tile in range(first, last):
            slot = loaded % 2
            phase = loaded // 2 % 2
            mbarrier.wait(left_free.index(slot), phase ^ 1)
            mbarrier.expect(left_ready.index(slot), TILE * P * 2)
            row = page * page_rows + tile * TILE % PAGE
            tma.async_copy_global_to_shared(ropes, [row, 0], left_ready.index(slot), k_rope.index(slot))
            _unpack(left, k_left.index(slot))
            mbarrier.arrive(left_ready.index(slot))
            page = next_page
            next_page = gl.load(pages + (tile + 2) * TILE // PAGE, mask=tile + 2 < last, other=0)
            if tile + 1 < last:
                left = _fetch(latents, scales, 0, page, page_stride, tile + 1, R, PAGE)
            mbarrier.wait(right_free.index(slot), phase ^ 1)
            _unpack(right, k_right.index(slot))
            mbarrier.arrive(right_ready.index(slot))
            if tile + 1 < last:
                right = _fetch(latents, scales, R // 2, page, page_stride, tile + 1, R, PAGE)
            loaded += 1
        at = gl.minimum(end, item_end)
    if EARLY:
        gdc_wait()  # also in programs without items
