"""Packed 4-bit weights (`kernels.scaled.pack`) to bf16 in registers, in the order of Hopper's tensor cores.

A word holds a thread's operands of 32 columns, so nothing is shuffled. Both types become tiny numbers, which are
multiplied by 2^62 and their scales. e2m1's eight weights take eight integer operations and four multiplications, and
are exact; int4's take five and four, which also subtract the zero point, and are rounded once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of sums: converted weights are low by it, so that none overflows bf16.
E2M1_LIFT, INT4_LIFT = gl.constexpr(2.0**64), gl.constexpr(2.0**71)


def _code(first: list[str], pairs: dict[int, list[str]]) -> str:
    """Returns code that leaves the halves of `r`, after the lines of each pair, in the pair's two outputs."""
    lines = [".reg .b32 r, m, f, g, c; .reg .b16 s, t;", *first]
    for p, pair in pairs.items():
        lines += [*pair, f"mov.b32 {{${2 * p}, ${2 * p + 1}}}, r;"]
    return "{" + "\n".join(lines) + "}"


def _both_halves(of: str, to: str) -> list[str]:
    """Returns code that copies the low half of a register to both halves of another: no instruction, if multiplied."""
    return [f"mov.b32 {{s, t}}, {of};", f"mov.b32 {to}, {{s, s}};"]


def _e2m1_to_bf16() -> str:
    """Code for a word and, in low halves, the factors of its first and of its last two pairs."""
    masked = {
        0: ["and.b32 r, $8, 0x81c081c0;"],
        1: ["shl.b32 m, $8, 3;", "and.b32 r, m, 0x81c081c0;"],
        2: ["shf.l.wrap.b32 m, $8, $8, 6;", "and.b32 r, m, 0x81c081c0;"],
        # Three shifts at once: no two bits meet.
        3: ["and.b32 m, m, 0x001b001b;", "mul.lo.u32 m, m, 0x4108;", "and.b32 r, m, 0x81c081c0;"],
    }
    factors = [*_both_halves("$9", "f"), *_both_halves("$10", "g")]
    return _code(factors, {p: [*masked[p], f"mul.rn.bf16x2 r, r, {'fg'[p // 2]};"] for p in range(4)})


def _int4_to_bf16(scaled: bool, zeros: bool) -> str:
    """Code for a word and, in low halves, its factor if scaled and its zero point if not 8.

    The lowest eight bits of bf16 are a multiple of 2^-133, so a code needs no exponent; the factor of one that is four
    bits up is a 16th. The zero point is subtracted after the multiplication, with the same rounding, if its product is
    exact: 8 times a factor, or up to 15 times 2^62.
    """
    zero = f"${9 + scaled}"
    if scaled:
        first = [*_both_halves("$9", "f"), "sub.u32 g, $9, 0x200;", *_both_halves("g", "g")]
        first += _both_halves(zero, "c") if zeros else ["mov.b32 c, 0x80088008;", "mul.rn.bf16x2 c, f, c;"]
    else:
        first = ["mov.b32 f, 0x5e805e80;", "mov.b32 g, 0x5c805c80;"]
        both = [*_both_halves(zero, "c"), "mov.b32 m, 0xde80de80;", "mul.rn.bf16x2 c, c, m;"]
        first += both if zeros else ["mov.b32 c, 0x9d809d80;"]
    pairs = {}
    for p in (0, 2, 1, 3):
        pair = ["shr.b32 m, $8, 8;"] if p == 2 else []
        pair += [f"and.b32 r, {'m' if p > 1 else '$8'}, {'0x00f000f0' if p % 2 else '0x000f000f'};"]
        if zeros and scaled:
            pair += ["shl.b32 c, c, 4;"] if p == 1 else []
            pair += ["sub.rn.bf16x2 r, r, c;", f"mul.rn.bf16x2 r, r, {'fg'[p % 2]};"]
        else:
            pair += [f"fma.rn.bf16x2 r, r, {'fg'[p % 2]}, c;"]
        pairs[p] = pair
    return _code(first, pairs)


OPERANDS = gl.constexpr(["=h,=h,=h,=h,=h,=h,=h,=h" + ",r" * (1 + more) for more in range(3)])
E2M1_TO_BF16 = gl.constexpr(_e2m1_to_bf16())
INT4_TO_BF16, INT4_ZEROS_TO_BF16 = (gl.constexpr(_int4_to_bf16(False, zeros)) for zeros in (False, True))
INT4_TO_SCALED, INT4_ZEROS_TO_SCALED = (gl.constexpr(_int4_to_bf16(True, zeros)) for zeros in (False, True))


@gluon.constexpr_function
def product_layout(warps, columns, is_async):
    """Layout of sums [rows, columns] of a warpgroup's products, or of each warp's."""
    if is_async:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def e2m1_factors(codes, UE5M3: gl.constexpr):
    """Returns int32 whose halves are bf16 bits of 2^62 times the scales: UE8M0 to 2^65, or UE5M3.

    `codes` are int32, with a code in the low half or one in each.
    """
    if UE5M3:
        return codes * 16 + 0x5A005A00
    else:
        return codes * 128 + 0x1F001F00


@gluon.jit
def _as_words(bits, words):
    """Broadcasts [R, B] to the words [R, B, 4]."""
    bits = gl.convert_layout(bits, gl.SliceLayout(2, words.type.layout), assert_trivial=True)
    return bits[:, :, None] + gl.full_like(words, 0)


@gluon.jit
def _convert(ASM: gl.constexpr, words, more):
    """Runs code for words [R, B, 4] and int32 [R, B] -> bf16 [R, 32 B]."""
    given = (words,)
    for bits in gl.static_range(len(more)):
        given = given + (_as_words(more[bits], words),)  # type: ignore[assignment]  # noqa: RUF005
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        ASM, OPERANDS[len(more)], given,
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True, pack=1,
    )  # fmt: skip
    low, high = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    w = gl.permute(gl.join(low, high), (0, 1, 5, 4, 2, 3))
    return gl.reshape(w, [a.shape[0], 32 * a.shape[1]]).to(gl.bfloat16, bitcast=True)


@gluon.jit
def e2m1_to_bf16(words, first, second):
    """Converts words int32 [R, B, 4] of B blocks of 32 columns to bf16 [R, 32 B], 2^-64 times their values.

    `first` and `second` [R, B] are the `e2m1_factors`, in low halves, of the first and the last 16 columns of a block.
    """
    return _convert(E2M1_TO_BF16, words, (first, second))


@gluon.jit
def int4_to_bf16(words, scales, zeros):
    """Converts words int32 [R, B, 4] of B blocks of 32 columns to bf16 [R, 32 B], 2^-71 (code - zero point) scale.

    `scales` and `zeros` are int32 [R, B], or None: bf16 bits of the scale in low halves, default 1, and zero points,
    default 8.
    """
    if scales is not None:
        scales = scales + 0x1F00
    if scales is None:
        if zeros is None:
            return _convert(INT4_TO_BF16, words, ())
        else:
            return _convert(INT4_ZEROS_TO_BF16, words, (zeros,))
    elif zeros is None:
        return _convert(INT4_TO_SCALED, words, (scales,))
    else:
        return _convert(INT4_ZEROS_TO_SCALED, words, (scales, zeros))
