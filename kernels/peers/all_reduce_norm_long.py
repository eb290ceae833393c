"""Variant of `kernels.peers.all_reduce_norm` for prefill chunks: untagged rows, with one flag per group of rows.

A program sends a group of rows to the group's owner, which sums and broadcasts; every rank then adds the residual and
normalizes. Untagged words are half the bytes of LL words; the fence before the flag is cheap for the 32 KB of a group.
(NCCL sends as many bytes, but the norm is a separate kernel.)

A buffer holds one group, and serves every NUM_BUFFERS-th group of a launch. Before a program sends, it checks that this
rank has read the buffer's previous sum. By then the owner has read this rank's rows, since it has sent their sum, so
buffers need no second half, within a launch or across launches.

A program waits for the same group on other ranks and for an earlier group on this rank. Programs start in order, so the
earliest unfinished group is resident on every rank and there is no need for co-residency of all programs. But no other
kernel that waits for peers may run concurrently: the two could take each other's place on different ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.peers.ll_protocol import DTYPES, end_epoch, epoch, poll_limit

BUFFER_BYTES = 32 << 10
ROUNDS = tl.constexpr(64)  # max uses of a buffer in a launch
PARTS, SUMS, PART_FLAGS, SUM_FLAGS = (tl.constexpr(i) for i in range(4))  # rows of `peers`


@triton.jit
def _await_flag(at, tag, source, status, polls):
    """Waits for a flag, acquiring what was stored before it; returns whether it came.

    After `polls` polls without it, `status` is set to 1 + source. A source of -1 leaves `status` alone: the flag is
    this rank's, and the program that sets it reports which peer it waits for.
    """
    got = tl.load(at, volatile=True)
    left = polls
    while (got != tag) & (left > 0):
        got = tl.load(at, volatile=True)
        left -= 1
    if (got != tag) & (source >= 0):
        tl.store(status, source + 1)
    return tl.atomic_add(at, 0, sem="acquire", scope="sys") == tag


@triton.jit
def _peer_flags(peers, table: tl.constexpr, rank, RANKS: tl.constexpr):
    return tl.load(peers + table * RANKS + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def _peer_buffers(peers, table: tl.constexpr, rank, RANKS: tl.constexpr, DTYPE: tl.constexpr):
    return tl.multiple_of(tl.load(peers + table * RANKS + rank).to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["rank", "N"])  # one kernel for all chunks
def _all_reduce_norm_long_kernel(
    x, residual, weight, y, total, peers, read_flags, count, status,
    rank, N, eps, spins,
    H: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, RANKS: tl.constexpr, NUM_BUFFERS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, RESIDUAL: tl.constexpr, EMULATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    group = tl.program_id(0)
    slot = group % NUM_BUFFERS
    owner, owner_slot = slot % RANKS, slot // RANKS  # NUM_BUFFERS is a multiple of RANKS
    row, h = tl.arange(0, GROUP)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (group * GROUP + row < N) & (h < H)
    at = (group.to(tl.int64) * GROUP + row) * H + h
    cell = row * H + h
    tag = epoch(count) * ROUNDS + group // NUM_BUFFERS
    polls = poll_limit(status, spins)
    part = tl.load(x + at, mask=inside, other=0.0)
    arrived = True
    if group >= NUM_BUFFERS:
        arrived = _await_flag(read_flags + slot, tag - 1, -1, status, polls)
    if owner == rank:
        added = tl.zeros([GROUP, BLOCK], tl.float32)
        for source in range(RANKS):  # in rank order, so that sums equal the other transports'
            if source == rank:
                added += part.to(tl.float32)
            else:
                here = source * (NUM_BUFFERS // RANKS) + owner_slot
                flag = _peer_flags(peers, PART_FLAGS, rank, RANKS) + here
                arrived &= _await_flag(flag, tag, source, status, polls)
                buffer = _peer_buffers(peers, PARTS, rank, RANKS, DTYPE) + here.to(tl.int64) * SIZE
                added += tl.load(buffer + cell, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        added = tl.where(arrived, added, float("nan"))
        summed = added.to(DTYPE)
        for step in range(1, RANKS):
            to = (rank + step) % RANKS
            buffer = _peer_buffers(peers, SUMS, to, RANKS, DTYPE) + slot.to(tl.int64) * SIZE
            tl.store(buffer + cell, summed, mask=inside)
        to = tl.arange(0, BLOCK_RANKS)
        flags = _peer_flags(peers, SUM_FLAGS, tl.minimum(to, RANKS - 1), RANKS)
        others = (to < RANKS) & (to != rank)
        tl.debug_barrier()
        tl.atomic_xchg(flags + slot, tag + 0 * to, mask=others, sem="release", scope="sys")
    else:
        here = rank * (NUM_BUFFERS // RANKS) + owner_slot
        tl.store(_peer_buffers(peers, PARTS, owner, RANKS, DTYPE) + here.to(tl.int64) * SIZE + cell, part, mask=inside)
        tl.debug_barrier()
        tl.atomic_xchg(_peer_flags(peers, PART_FLAGS, owner, RANKS) + here, tag, sem="release", scope="sys")
        arrived &= _await_flag(_peer_flags(peers, SUM_FLAGS, rank, RANKS) + slot, tag, owner, status, polls)
        buffer = _peer_buffers(peers, SUMS, rank, RANKS, DTYPE) + slot.to(tl.int64) * SIZE
        summed = tl.load(buffer + cell, mask=inside, other=0.0, cache_modifier=".cg")
        summed = tl.where(arrived, summed, float("nan")).to(DTYPE)
    tl.debug_barrier()
    tl.atomic_xchg(read_flags + slot, tag, sem="release")
    value = summed.to(tl.float32)
    if EMULATED:  # NaN stays, and with the comparison the reads of sums
        value = tl.where(value == value, (RANKS * part.to(tl.float32)).to(DTYPE).to(tl.float32), value)
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    # Round the sum to the model's dtype before normalizing, and the result before applying the weight.
    rounded = value.to(DTYPE)
    tl.store(total + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 1) / H + eps)[:, None]
    norm_weight = tl.load(weight + h, mask=h < H, other=0.0)
    tl.store(y + at, scaled.to(DTYPE).to(tl.float32) * norm_weight.to(tl.float32), mask=inside)
    end_epoch(count, group, tl.num_programs(0))


def rows_per_buffer(width: int, itemsize: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Returns how many rows of `width` elements share a buffer: a power of two, 0 if none fits."""
    fit = buffer_bytes // (width * itemsize)
    return 1 << fit.bit_length() - 1 if fit else 0


def fits(x: torch.Tensor, num_buffers: int, buffer_bytes: int = BUFFER_BYTES) -> bool:
    """Returns whether buffers for `num_buffers` groups suffice to reduce rows `x`."""
    group = rows_per_buffer(x.shape[1], x.element_size(), buffer_bytes)
    return group > 0 and x.dtype in DTYPES and -(-len(x) // group) <= ROUNDS.value * num_buffers


def all_reduce_norm_long(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: torch.Tensor,
    read_flags: torch.Tensor,
    count: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    num_buffers: int,
    spins: int,
    emulated: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `kernels.peers.all_reduce_norm.all_reduce_norm`, which documents the other arguments.

    Args:
        x: [N, H], which `fits` accepts.
        peers: [4, W] int64, addresses on the ranks of part buffers [W, num_buffers / W, buffer_bytes] and sum buffers
            [num_buffers, buffer_bytes], uint8, and of their flags [W, num_buffers / W] and [num_buffers], int32, zeroed
            before first use. Not shared with other functions. No other kernel that waits for peers may run
            concurrently.
        read_flags: int32 [num_buffers], zeroed before first use: this rank's flags.
        num_buffers: a multiple of W.
        emulated: see `kernels.peers.all_reduce_norm_rows.all_reduce_norm_rows`.
    """
    N, H = x.shape
    group, ranks = rows_per_buffer(H, x.itemsize, buffer_bytes), peers.shape[1]
    assert N > 0 and fits(x, num_buffers, buffer_bytes) and num_buffers % ranks == 0 and len(read_flags) == num_buffers
    assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(H)
    _all_reduce_norm_long_kernel[(-(-N // group),)](
        x, x if residual is None else residual, weight, y, total, peers, read_flags, count, status, rank, N, eps, spins,
        H=H, BLOCK=block, GROUP=group, RANKS=ranks, NUM_BUFFERS=num_buffers, BLOCK_RANKS=triton.next_power_of_2(ranks),
        SIZE=buffer_bytes // x.itemsize, DTYPE=DTYPES[x.dtype], RESIDUAL=residual is not None, EMULATED=emulated,
        num_warps=min(16, max(4, group * block // 1024)), **pdl_options(x),
    )  # fmt: skip
    return y, total
