"""Exact top-k token selection for many rows at once (prefill), over all ranks.

Counting a digit takes longer than reading a score, so only candidates are counted: a rank lists its best, at least
`topk` and at most 1.5 times as many. A key below `topk` others of its rank cannot be selected.

The listing launch has one program per row, and reads the row twice. First it finds a bound: each of GROUPS interleaved
groups of scores keeps its best in a register. At least `topk` scores reach the topk-th best of these, and few more, as
two of the best are seldom in one group. Then it lists all that reach the bound, in local order. If these are too many
(ties, or most of the best in few groups), it reads the row a few more times to find a bound.

The other launches read the lists: each counts one digit, which ranks all-gather, until all digits of the global bound
are found, and the last one writes the slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.indexer.keys import DIGITS, SCORE_PASSES, at_least, begin_alike, find_bound, keys_of
from kernels.indexer.reference import Shard
from kernels.overlap import pdl_options, start_successor, store_in_place, wait_for_predecessor

GROUPS = 8192  # of a row's scores; the best of each is kept
TILE = 4096  # scores per listing iteration
WARPS = 8  # of a listing program
LISTED = 1024  # listed keys per iteration that counts or writes
MIN_CODE = tl.constexpr(-2139095041)  # code of -inf


@triton.jit
def _codes(x):
    """Maps scores to int32 of the same order; adding 0 turns -0 into 0, and on a GPU makes all NaN the highest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def _tile(scored, at, length, TILE: tl.constexpr, RUN: tl.constexpr):
    """Loads the scores of a tile, padded with the lowest score, and their token indices in the row.

    Loads whole runs of RUN scores, with one instruction each.
    """
    j = at + tl.arange(0, TILE)
    if at + TILE <= length:
        x = tl.load(scored + j)
    else:
        x = tl.load(scored + j, mask=j < tl.cdiv(length, RUN) * RUN, other=0.0)
        x = tl.where(j < length, x, -float("inf"))
    return x, j


@triton.jit
def _all_of(code, length):
    """Returns the bound that all of `length` tokens with a code reach."""
    return (code << 31) + 2147483648 - length


@triton.jit
def _reach(x, j, bound):
    """Returns which scores reach a bound, whose low 31 bits are of the token, earlier above later."""
    code = _codes(x)
    min_code = (bound >> 31).to(tl.int32)
    last_token = 2147483647 - (bound & 2147483647).to(tl.int32)
    return (code > min_code) | ((code == min_code) & (j <= last_token))


@triton.jit
def _bound_of_groups(scored, length, topk, GROUPS: tl.constexpr, RUN: tl.constexpr):
    """Finds a bound that at least `topk` scores of a row reach, and one that none does."""
    group = tl.arange(0, GROUPS)
    best = tl.full([GROUPS], -float("inf"), tl.float32)
    for at in range(0, length, GROUPS):
        x, _ = _tile(scored, at, length, GROUPS, RUN)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    codes = _codes(best)
    reached = tl.minimum(length, GROUPS)
    low = tl.min(tl.where(group < length, codes, 2147483647), 0).to(tl.int64)
    low = tl.where(reached >= topk, low, MIN_CODE)
    beyond = tl.max(codes, 0).to(tl.int64) + 1
    high = beyond
    while (high - low > 1) & (reached > topk + topk // 16):
        middle = (low + high) >> 1
        some = tl.sum((codes >= middle.to(tl.int32)).to(tl.int32), 0)
        reached = tl.where(some >= topk, some, reached)
        low = tl.where(some >= topk, middle, low)
        high = tl.where(some >= topk, high, middle)
    return _all_of(low, length), beyond << 31


@triton.jit
def _bound_of_all(scored, length, topk, cap, low, high, number, TILE: tl.constexpr, RUN: tl.constexpr):
    """Finds a bound that `topk` to `cap` scores of a row reach, by a pass over the row per bit needed.

    `low` and `high` are bounds that more and fewer reach.
    """
    while number > cap:
        middle = (low + high) >> 1
        reached = tl.zeros([TILE], tl.int32)
        for at in range(0, length, TILE):
            x, j = _tile(scored, at, length, TILE, RUN)
            reached += _reach(x, j, middle).to(tl.int32)
        some = tl.sum(reached, 0)
        number = tl.where(some >= topk, some, number)
        low = tl.where(some >= topk, middle, low)
        high = tl.where(some >= topk, high, middle)
    return low


@triton.jit(do_not_specialize=["cap"])
def _list_local_topk_kernel(
    scored, hi, listed, scored_n, topk, cap,
    GROUPS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lists at least `topk` of a row's best scores, and at most `cap`, with their tokens, in local order.

    A list begins with its length, and ends with an entry that absorbs any excess.
    """
    n = tl.program_id(0).to(tl.int64)
    scored += n * scored_n
    listed += n * (2 + cap)
    wait_for_predecessor(PDL)
    length = tl.load(hi + n)
    bound = _all_of(tl.full([], MIN_CODE, tl.int64), length)
    beyond = bound
    if length > cap:
        bound, beyond = _bound_of_groups(scored, length, topk, GROUPS, RUN)
    number = cap + 1
    while number > cap:
        number = 0 * cap
        for at in range(0, length, TILE):
            x, j = _tile(scored, at, length, TILE, RUN)
            selected_counts = _reach(x, j, bound).to(tl.int32)
            to = tl.minimum(number + tl.cumsum(selected_counts, 0), 1 + cap)  # after their number
            entry = (x.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | j.to(tl.uint32, bitcast=True)
            store_in_place(listed + to, entry.to(tl.int64, bitcast=True), selected_counts, PDL)
            number += tl.sum(selected_counts, 0)
        if number > cap:  # ties, or many of the best in few groups
            bound = _bound_of_all(scored, length, topk, cap, bound, beyond, number, TILE, RUN)
    tl.store(listed, number.to(tl.int64))
    start_successor(PDL)


@triton.jit
def _cycle_index(first_ranks, n, kvp_rank, RANKS: tl.constexpr):
    return (kvp_rank - tl.load(first_ranks + n) + RANKS).to(tl.int32) % RANKS


@triton.jit
def _listed_keys(
    listed, at, number, cycle_index,
    CYCLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Loads a tile of a row's list: keys, local tokens, and a validity mask."""
    i = at + tl.arange(0, TILE)
    inside = i < number
    entry = tl.load(listed + 1 + i, mask=inside, other=0)
    x = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    j = (entry & 2147483647).to(tl.int32)
    return keys_of(x, j, cycle_index, CYCLE, BLOCK_TOKENS, BITS), j, inside


@triton.jit(do_not_specialize=["N", "cap", "kvp_rank"])
def _count_listed_kernel(
    positions, first_ranks, gathered, counts, min_keys, lefts, listed, N, topk, cap, kvp_rank,
    STAGE: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts digit `STAGE` of a row's listed keys that match the preceding digits."""
    n = tl.program_id(0).to(tl.int64)
    listed += n * (2 + cap)
    wait_for_predecessor(PDL)
    cycle_index = _cycle_index(first_ranks, n, kvp_rank, RANKS)
    number = tl.load(listed).to(tl.int32)
    bound, left = find_bound(positions, gathered, min_keys, lefts, n, N, topk, STAGE, PASSES, RANKS)
    tl.store(min_keys + STAGE * N + n, bound)
    tl.store(lefts + STAGE * N + n, left.to(tl.int32))
    if left > 0:
        shift: tl.constexpr = 8 * (PASSES - 1 - STAGE)
        found = tl.zeros([256], tl.int32)
        for at in range(0, number, TILE):
            keys, _, inside = _listed_keys(
                listed, at, number, cycle_index, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS, TILE
            )
            counted = inside & begin_alike(keys, bound, shift + 8)
            # From the third digit on, hardly any tile has keys that count.
            if tl.max(counted.to(tl.int32), 0) > 0:
                found += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=counted)
        tl.store(counts + n * 256 + tl.arange(0, 256), found.to(tl.int16))
    start_successor(PDL)


@triton.jit(do_not_specialize=["N", "cap", "width", "EACH", "kvp_rank"])
def _write_listed_kernel(
    positions, first_ranks, gathered, min_keys, lefts, listed, block_tables, query_rows,
    selected_slots, selected_counts, tables_b, width, N, topk, cap, EACH, kvp_rank,
    PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = n // EACH
    if query_rows is not None:
        row = tl.load(query_rows + n)
    pages = block_tables + row * tables_b
    listed += n * (2 + cap)
    wait_for_predecessor(PDL)
    cycle_index = _cycle_index(first_ranks, n, kvp_rank, RANKS)
    number = tl.load(listed).to(tl.int32)
    bound, _ = find_bound(positions, gathered, min_keys, lefts, n, N, topk, PASSES, PASSES, RANKS)
    done = 0 * number
    for at in range(0, number, TILE):
        keys, j, inside = _listed_keys(listed, at, number, cycle_index, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS, TILE)
        selected = inside & at_least(keys, bound)
        page = tl.load(pages + j // PAGE, mask=selected, other=0)
        to = done + tl.cumsum(selected.to(tl.int32), 0) - 1
        tl.store(selected_slots + n * width + to, page * PAGE + j % PAGE, mask=selected & (to < width))
        done += tl.sum(selected.to(tl.int32), 0)
    # Never more, except with emulated ranks, whose counts are not those of their tokens.
    tl.store(selected_counts + n, tl.minimum(done, width))
    start_successor(PDL)


def list_local_topk(scores: torch.Tensor, hi: torch.Tensor, topk: int) -> torch.Tensor:
    """Lists a rank's candidates, [N, 2 + cap] int64 (score in the upper half, local token in the lower half).

    See `_list_local_topk_kernel`.
    """
    N, S = scores.shape
    width = min(topk, S)
    cap = width + width // 2
    listed = torch.empty(N, 2 + cap, dtype=torch.int64, device=scores.device)
    _list_local_topk_kernel[(N,)](
        scores, hi, listed, scores.stride(0), topk, cap,
        GROUPS=GROUPS, TILE=TILE, RUN=4 if S % 4 == 0 else 1, num_warps=WARPS, **pdl_options(scores),
    )  # fmt: skip
    return listed


def index_topk_many_rows(
    scores: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    hi: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor | None,
    topk: int,
    passes: int,
    shard: Shard,
    slots: torch.Tensor,
    selected_counts: torch.Tensor,
) -> None:
    """Implements `index_topk` with keys of `passes` digits; writes `slots` and `selected_counts`."""
    N, device = len(scores), scores.device
    listed = list_local_topk(scores, hi, topk)
    cap = listed.shape[1] - 2
    min_keys = torch.empty(passes, N, dtype=torch.int64, device=device)
    lefts = torch.empty(passes, N, dtype=torch.int32, device=device)
    options = dict(PASSES=passes, BITS=8 * (passes - SCORE_PASSES), RANKS=shard.kvp, BLOCK_TOKENS=shard.append_block)
    options |= dict(TILE=LISTED, num_warps=4, **pdl_options(scores))
    assert cap < 1 << 15
    gathered = lefts  # not read: there are no counts before the first digit
    for stage in range(passes):
        counts = torch.empty(N, DIGITS, dtype=torch.int16, device=device)  # half the bytes to send
        _count_listed_kernel[(N,)](
            positions, starts, gathered, counts, min_keys, lefts, listed, N, topk, cap, shard.kvp_rank,
            STAGE=stage, **options,
        )  # fmt: skip
        # NCCL has no 16-bit integers.
        gathered = counts if shard.gather is None else shard.gather(counts.view(torch.int32)).view(torch.int16)
    _write_listed_kernel[(N,)](
        positions, starts, gathered, min_keys, lefts, listed, tables, rows, slots, selected_counts,
        tables.stride(0), slots.shape[1], N, topk, cap, max(1, N // len(tables)), shard.kvp_rank,
        PAGE=shard.page_size, **options,
    )  # fmt: skip
