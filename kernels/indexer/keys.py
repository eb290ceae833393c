"""Sort keys of tokens for radix select, and digit counts; see `kernels.indexer.select_topk`.

A key is the score's bits, then the position, earlier above later: keys are distinct, so every grid breaks ties alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGITS = 256
SCORE_PASSES = 4  # digits of a score


@triton.jit
def score_codes(x):
    """Maps scores to 32 bits, as int64, of the same order; -0 equals 0, and NaN is the highest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    code = (bits ^ ((bits >> 31) | -2147483648)).to(tl.int64) & 0xFFFFFFFF
    return tl.where(x == x, code, 0xFFFFFFFF)


@triton.jit
def keys_of(x, j, cycle_index, CYCLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BITS: tl.constexpr):
    """Computes the keys of local tokens `j` with scores `x`, int64: 32 bits of score, BITS of position."""
    code = score_codes(x)
    at = j // BLOCK_TOKENS * CYCLE + cycle_index * BLOCK_TOKENS + j % BLOCK_TOKENS  # in the sequence
    return (code << BITS) + ((1 << BITS) - 1 - at.to(tl.int64))


@triton.jit
def at_least(keys, bound):
    """Unsigned comparison: keys >= `bound`."""
    return keys.to(tl.uint64, bitcast=True) >= bound.to(tl.uint64, bitcast=True)


@triton.jit
def begin_alike(keys, bound, BIT: tl.constexpr):
    """Returns which keys share the bits of `bound` from bit BIT up; all, if there are none."""
    if BIT < 64:
        return keys >> BIT == bound >> BIT
    else:
        return keys == keys


@triton.jit
def digit_of(counts, left, VALUES: tl.constexpr):
    """Finds the digit of the `left`-th largest key, given `counts` of keys per value.

    Returns it, how many keys with it are selected, and whether these are all keys with it.
    """
    value = tl.arange(0, VALUES)
    reach = tl.cumsum(counts, 0, reverse=True)
    above = reach - counts
    # Pack all results into one integer: a single reduction.
    packed = tl.where((above < left) & (reach >= left), above * (2 * VALUES) + value * 2 + (reach == left), 0)
    packed = tl.max(packed, 0)
    return (packed // 2 % VALUES).to(tl.int64), left - packed // (2 * VALUES), packed % 2 == 1


@triton.jit
def find_bound(
    positions, gathered, min_keys, lefts, n, N, topk, STAGE: tl.constexpr, PASSES: tl.constexpr, RANKS: tl.constexpr
):
    """Finds the lowest key selected so far, and how many keys with its digits are still to be selected; 0: none.

    `STAGE` digits are counted, each among the keys with the preceding digits.
    """
    if STAGE <= 1:
        bound = n * 0
        left = tl.where(tl.load(positions + n) + 1 > topk, topk, 0)
    else:
        bound = tl.load(min_keys + (STAGE - 1) * N + n)
        left = tl.load(lefts + (STAGE - 1) * N + n)
    if STAGE > 0:
        if left > 0:
            digit = tl.arange(0, 256)
            counts = tl.zeros([256], tl.int32)
            for rank in tl.static_range(RANKS):
                counts += tl.load(gathered + (rank * N + n) * 256 + digit).to(tl.int32)
            found, left, all_selected = digit_of(counts, left, 256)
            bound += found << (8 * (PASSES - STAGE))
            left = tl.where(all_selected, 0, left)
    return bound, left
