"""Exact choice of the best-scored tokens of a sequence, over all ranks that hold parts of it.

A token's key (`kernels.indexer.keys`) is a number of its score, then of its position. Each launch counts one digit of
eight bits, of the keys whose digits before are those of the k-th largest; `index_scores` may have counted the first.
Ranks gather these counts, and the next launch finds the digit in their sum. Once all keys with the digits found are
chosen, further launches count nothing.

Two digits leave few keys between chosen ones and others, some hundred of a million. The next launch lists them, ranks
gather the lists, and each program of the last launch finds what tells chosen keys from the others. It writes the chosen
tokens in local order; the launch that lists has counted those of each part of a row.

Many rows would send too much, and have a program each: `kernels.indexer.choose_many_rows` chooses for them.

With the keys of a rank alone, all of this is the same without the gathers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.indexer.choose_many_rows import choose_among_many
from kernels.indexer.keys import DIGITS, SCORE_PASSES, at_least, begin_alike, digit_of, find_bound, keys_of
from kernels.indexer.reference import Shard
from kernels.indexer.reference import choose_tokens as reference
from kernels.overlap import overlapped, sm_count, start_successor, wait_for_predecessor

TILE = 1024  # scores of a program per iteration
PROGRAMS = 4  # per SM
COUNTED = tl.constexpr(2)  # digits before keys between are listed
FEW_ROWS = 32  # with several programs each
PLANES = COUNTED.value + 1  # of numbers of a row that launches add to: counts of its digits, and a ticket
LISTED = 1024  # listed keys of all ranks that a program keeps in registers


@triton.jit
def _part(hi, first_ranks, n, part, parts, own_rank, RANKS: tl.constexpr, TILE: tl.constexpr):
    """Returns a row's tokens on this rank, begin and end of a part of them, and the rank's turn in a cycle."""
    length = tl.load(hi + n)
    run = tl.cdiv(tl.cdiv(length, TILE), parts) * TILE
    begin = part * run
    turn = (own_rank - tl.load(first_ranks + n) + RANKS).to(tl.int32) % RANKS
    return length, begin, tl.minimum(begin + run, length), turn


@triton.jit
def _tile(scored, begin, end, TILE: tl.constexpr):
    """Loads the scores of a tile, before waiting where an older launch than the predecessor has written them."""
    j = begin + tl.arange(0, TILE)
    return tl.load(scored + j, mask=j < end, other=0.0)


@triton.jit(do_not_specialize=["N", "parts", "listed_n", "own_rank"])  # they change from chunk to chunk
def _count_digits_kernel(
    scored, positions, first_ranks, hi, gathered, counts, least_keys, lefts, listed,
    scored_n, N, topk, parts, listed_n, own_rank,
    STAGE: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    scored += n * scored_n
    _, begin, end, turn = _part(hi, first_ranks, n, part, parts, own_rank, RANKS, TILE)
    if STAGE == 0 or RANKS == 1:
        wait_for_predecessor(PDL)  # which may have written the scores
    x = _tile(scored, begin, end, TILE)
    wait_for_predecessor(PDL)
    bound, left = find_bound(positions, gathered, least_keys, lefts, n, N, topk, STAGE, PASSES, RANKS)
    if STAGE > 0 and part == 0:
        tl.store(least_keys + STAGE * N + n, bound)
        tl.store(lefts + STAGE * N + n, left.to(tl.int32))
        tl.store(listed + n * listed_n, tl.zeros([], tl.int64))  # none yet
    if (left > 0) & (begin < end):
        shift: tl.constexpr = 8 * (PASSES - 1 - STAGE)
        found = tl.zeros([256], tl.int32)
        for at in range(begin, end, TILE):
            j = at + tl.arange(0, TILE)
            inside = j < end
            if SEVERAL:
                x = _tile(scored, at, end, TILE)
            keys = keys_of(x, j, turn, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
            counted = inside & begin_alike(keys, bound, shift + 8)
            # From the third digit on, hardly any tile has keys that count.
            if tl.max(counted.to(tl.int32), 0) > 0:
                found += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=counted)
        tl.atomic_add(counts + n * 256 + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")
    start_successor(PDL)


@triton.jit
def _list_best(
    scored, listed, length, bound, turn, cap,
    SHIFT: tl.constexpr, CYCLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists the `cap` largest of more keys with the digits of `bound`; one program reads the whole row several times.

    Only equal scores are so many.
    """
    low = bound
    want = cap
    digit = tl.arange(0, 256)
    for place in range(SHIFT // 8):
        at_bit = SHIFT - 8 - 8 * place
        counts = tl.zeros([256], tl.int32)
        for at in range(0, length, TILE):
            j = at + tl.arange(0, TILE)
            inside = j < length
            x = tl.load(scored + j, mask=inside, other=0.0)
            keys = keys_of(x, j, turn, CYCLE, BLOCK_TOKENS, BITS)
            counted = inside & (keys >> (at_bit + 8) == low >> (at_bit + 8))
            counts += tl.histogram(((keys >> at_bit) & 255).to(tl.int32), 256, mask=counted)
        reach = tl.cumsum(counts, 0, reverse=True)
        found = tl.sum((reach >= want).to(tl.int32), 0) - 1
        want -= tl.max(tl.where(digit == found + 1, reach, 0), 0)
        low += found.to(tl.int64) << at_bit
    done = want * 0
    for at in range(0, length, TILE):
        j = at + tl.arange(0, TILE)
        inside = j < length
        x = tl.load(scored + j, mask=inside, other=0.0)
        keys = keys_of(x, j, turn, CYCLE, BLOCK_TOKENS, BITS)
        taken = (inside & at_least(keys, low) & (keys >> SHIFT == bound >> SHIFT)).to(tl.int32)
        tl.store(listed + done + tl.cumsum(taken, 0), keys, mask=taken > 0)  # behind their number
        done += tl.sum(taken, 0)
    tl.store(listed, done.to(tl.int64))


@triton.jit(do_not_specialize=["N", "parts", "cap", "own_rank"])
def _list_between_kernel(
    scored, positions, first_ranks, hi, gathered, least_keys, lefts, part_counts, listed, tickets,
    scored_n, N, topk, parts, cap, own_rank,
    PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SEVERAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    scored += n * scored_n
    length, begin, end, turn = _part(hi, first_ranks, n, part, parts, own_rank, RANKS, TILE)
    x = _tile(scored, begin, end, TILE)
    wait_for_predecessor(PDL)
    bound, left = find_bound(positions, gathered, least_keys, lefts, n, N, topk, COUNTED, PASSES, RANKS)
    if part == 0:
        tl.store(least_keys + COUNTED * N + n, bound)
        tl.store(lefts + COUNTED * N + n, left.to(tl.int32))
    shift: tl.constexpr = 8 * (PASSES - COUNTED)
    listed += n * (1 + cap)
    # Keys from `chosen_from` on are chosen; those between are listed.
    chosen_from = bound + (tl.where(left > 0, 1, 0).to(tl.int64) << shift)
    count = part * 0
    for at in range(begin, end, TILE):
        j = at + tl.arange(0, TILE)
        inside = j < end
        if SEVERAL:
            x = _tile(scored, at, end, TILE)
        keys = keys_of(x, j, turn, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
        chosen = at_least(keys, chosen_from)
        count += tl.sum((inside & chosen).to(tl.int32), 0)
        between = (inside & at_least(keys, bound) & (chosen == 0)).to(tl.int32)
        some = tl.sum(between, 0)
        if some > 0:
            first = tl.atomic_add(listed, some.to(tl.int64), sem="relaxed")  # in any order: keys are distinct
            to = first + tl.cumsum(between, 0)
            tl.store(listed + to, keys, mask=(between > 0) & (to <= cap))
    tl.store(part_counts + n * parts + part, count)
    tl.debug_barrier()  # after the stores of all threads
    if tl.atomic_add(tickets + n * 256, 1) == parts - 1:  # the last one of the row
        if tl.load(listed, volatile=True) > cap:
            _list_best(
                scored, listed, length, bound, turn, cap,
                shift, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS, TILE,
            )  # fmt: skip
    start_successor(PDL)


@triton.jit
def _listed_keys(of_rank, numbers, begin, EACH: tl.constexpr):
    """Loads EACH listed keys of each rank from `begin` on, in any order; -1 behind the last."""
    i = begin + tl.arange(0, EACH)
    keys = tl.load(of_rank[:, None] + 1 + i[None, :], mask=i[None, :] < numbers[:, None], other=-1)
    return tl.ravel(keys, can_reorder=True)


@triton.jit
def _count_sixteen(keys, bound, shift):
    """Counts the values of the four bits from `shift` on, of keys whose bits above are those of `bound`."""
    counted = keys >> (shift + 4) == bound >> (shift + 4)
    return tl.histogram(((keys >> shift) & 15).to(tl.int32), 16, mask=counted)


@triton.jit
def _search(of_rank, numbers, cap, bound, left, SHIFT: tl.constexpr, EACH: tl.constexpr):
    """Finds the last SHIFT bits of a bound that `left` listed keys of all ranks reach.

    Four bits at a time, until the keys that reach it are told from the others, mostly after two or three steps. A full
    list may lack keys of the same digits: there the bound is the least key to the last bit.
    """
    most = tl.max(numbers, 0)
    first = _listed_keys(of_rank, numbers, 0, EACH)
    shift = tl.full([], SHIFT, tl.int32)
    while shift > 0:
        shift -= 4
        counts = _count_sixteen(first, bound, shift)
        for at in range(EACH, most, EACH):
            counts += _count_sixteen(_listed_keys(of_rank, numbers, at, EACH), bound, shift)
        found, left, all_chosen = digit_of(counts, left, 16)
        bound += found << shift
        shift = tl.where(all_chosen & (most < cap), 0, shift)
    return bound


@triton.jit(do_not_specialize=["N", "parts", "EACH", "width", "own_rank"])
def _write_chosen_kernel(
    scored, first_ranks, hi, all_listed, least_keys, lefts, part_counts, block_tables, owners,
    chosen_slots, chosen_counts, scored_n, tables_b, width, N, parts, EACH, own_rank,
    PASSES: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SEVERAL: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    n = (tl.program_id(0) // parts).to(tl.int64)
    scored += n * scored_n
    _, begin, end, turn = _part(hi, first_ranks, n, part, parts, own_rank, RANKS, TILE)
    row = n // EACH
    if owners is not None:
        row = tl.load(owners + n)
    x = _tile(scored, begin, end, TILE)
    wait_for_predecessor(PDL)
    bound = tl.load(least_keys + COUNTED * N + n)
    left = tl.load(lefts + COUNTED * N + n)
    q = tl.arange(0, BLOCK_PARTS)
    of_parts = tl.load(part_counts + n * parts + q, mask=q < parts, other=0)
    place = tl.sum(tl.where(q < part, of_parts, 0), 0)
    total = tl.sum(of_parts, 0)
    if left > 0:
        stride = 1 + width.to(tl.int64)
        rank = tl.arange(0, BLOCK_RANKS)
        of_rank = all_listed + (rank * N + n) * stride
        numbers = tl.load(of_rank, mask=rank < RANKS, other=0).to(tl.int32)
        bound = _search(of_rank, numbers, width, bound, left, 8 * (PASSES - COUNTED), LISTED)
        listed = all_listed + (own_rank * N + n) * stride
        own = tl.load(listed).to(tl.int32)
        for at in range(0, own, LISTED):
            i = at + tl.arange(0, LISTED)
            keys = tl.load(listed + 1 + i, mask=i < own, other=-1)
            at_token = (1 << BITS) - 1 - (keys & ((1 << BITS) - 1))
            local = at_token // (RANKS * BLOCK_TOKENS) * BLOCK_TOKENS + at_token % BLOCK_TOKENS
            taken = (i < own) & at_least(keys, bound)
            total += tl.sum(taken.to(tl.int32), 0)
            place += tl.sum((taken & (local < begin)).to(tl.int32), 0)
    if part == 0:
        # Never more, unless ranks are emulated, whose counts are not those of their tokens.
        tl.store(chosen_counts + n, tl.minimum(total, width))
    pages = block_tables + row * tables_b
    for at in range(begin, end, TILE):
        j = at + tl.arange(0, TILE)
        inside = j < end
        if SEVERAL:
            x = _tile(scored, at, end, TILE)
        keys = keys_of(x, j, turn, RANKS * BLOCK_TOKENS, BLOCK_TOKENS, BITS)
        chosen = (inside & at_least(keys, bound)).to(tl.int32)
        page = tl.load(pages + j // PAGE, mask=chosen > 0, other=0)
        to = place + tl.cumsum(chosen, 0) - 1
        tl.store(chosen_slots + n * width + to, page * PAGE + j % PAGE, mask=(chosen > 0) & (to < width))
        place += tl.sum(chosen, 0)
    start_successor(PDL)


def choose_tokens(
    scores: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    hi: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor | None,
    topk: int,
    most: int,
    shard: Shard,
    numbers: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the `topk` best-scored tokens of a sequence for each query, or all of fewer; ties to the lower position.

    NaN is the highest score, so that it surfaces.

    Args:
        scores: [N, S] fp32, last dim contiguous: of this rank's tokens in local order, the first `hi` of a row.
        positions, starts: [N] int64, contiguous: positions of the queries, which read all tokens up to their own, and
            the kvp ranks of their sequences' first blocks.
        hi: [N] int32, contiguous: tokens of a row on this rank.
        tables: [n, P] int32, rows contiguous: pages of each sequence.
        rows: [N] int64, contiguous: the row of each query's sequence in `tables`; None: N / n queries of each.
        topk: tokens of a query, over all ranks.
        most: an upper bound of positions.
        shard: this rank's part of the tokens; with other ranks, this is a collective.
        numbers: [PLANES, N, 256] int32, rows contiguous, overwritten: zeros, but for the first digit's counts, which
            `index_scores` added to the first plane. None: nothing is counted. Not read for more rows than FEW_ROWS.

    Returns:
        Cache slots [N, min(topk, S)] int32 of the tokens chosen here, in local order, and how many they are [N] int32;
        the entries behind them may be anything.

    Source:
        DeepSeek-V3.2 (arXiv:2512.02556), section 2.1; radix select.
    """
    if not dispatch.on_gpu(scores):
        return reference(scores, positions, starts, hi, tables, rows, topk, most, shard)
    N, S = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(1) == tables.stride(1) == 1 and shard.kvp * most > 0
    assert positions.is_contiguous() and starts.is_contiguous() and hi.is_contiguous()
    assert (shard.gather is None) == (shard.kvp == 1) and topk < 1 << 22  # which `digit_of` packs
    device, passes = scores.device, SCORE_PASSES + triton.cdiv(max(most, 2).bit_length(), 8)
    width = min(topk, S)
    slots = torch.empty(N, width, dtype=torch.int32, device=device)
    taken = torch.empty(N, dtype=torch.int32, device=device)
    if N == 0:
        return slots, taken
    if N > FEW_ROWS:
        choose_among_many(scores, positions, starts, hi, tables, rows, topk, passes, shard, slots, taken)
        return slots, taken
    tiles = triton.cdiv(S, TILE)
    parts = max(1, min(tiles, triton.cdiv(PROGRAMS * sm_count(device), N)))
    counted = 0 if numbers is None else 1
    counts = torch.zeros(PLANES, N, DIGITS, dtype=torch.int32, device=device) if numbers is None else numbers
    assert counts.shape == (PLANES, N, DIGITS) and counts.stride()[1:] == (DIGITS, 1)
    least_keys = torch.empty(passes, N, dtype=torch.int64, device=device)
    lefts = torch.empty(passes, N, dtype=torch.int32, device=device)
    part_counts = torch.empty(N, parts, dtype=torch.int32, device=device)
    listed = torch.empty(N, 1 + width, dtype=torch.int64, device=device)
    common = dict(PASSES=passes, RANKS=shard.kvp, TILE=TILE, num_warps=4, **overlapped(scores))
    options = dict(BITS=8 * (passes - SCORE_PASSES), BLOCK_TOKENS=shard.append_block, SEVERAL=tiles > parts, **common)
    gathered = counts
    for stage in range(COUNTED.value):
        if stage >= counted:
            _count_digits_kernel[(parts * N,)](
                scores, positions, starts, hi, gathered, counts[stage], least_keys, lefts, listed,
                scores.stride(0), N, topk, parts, 1 + width, shard.kvp_rank, STAGE=stage, **options,
            )  # fmt: skip
        gathered = counts[stage] if shard.gather is None else shard.gather(counts[stage])
    _list_between_kernel[(parts * N,)](
        scores, positions, starts, hi, gathered, least_keys, lefts, part_counts, listed, counts[-1],
        scores.stride(0), N, topk, parts, width, shard.kvp_rank, **options,
    )  # fmt: skip
    ranks = triton.next_power_of_2(shard.kvp)
    _write_chosen_kernel[(parts * N,)](
        scores, starts, hi, listed if shard.gather is None else shard.gather(listed), least_keys, lefts, part_counts,
        tables, rows, slots, taken,
        scores.stride(0), tables.stride(0), width, N, parts, max(1, N // len(tables)), shard.kvp_rank,
        PAGE=shard.page_size, BLOCK_PARTS=triton.next_power_of_2(parts), BLOCK_RANKS=ranks,
        LISTED=max(16, LISTED // ranks), **options,
    )  # fmt: skip
    return slots, taken
