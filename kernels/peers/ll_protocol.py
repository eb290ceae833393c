"""NCCL's LL protocol: low-latency small messages between GPUs that can write to each other's memory.

Each 32-bit word travels in the lower half of a 64-bit store whose upper half is a tag, so a receiver that sees the tag
has the data: no fence and a single trip over the link, at twice the bytes. Right for the kilobytes of a decode step,
wrong for megabytes.

The tag is the epoch: the number of the launch. An LL buffer holds one piece of a message from one source, in two
halves; epoch t uses half t % 2. Reuse in t + 2 is safe: every rank waits for all others in every epoch, so no rank
sends t + 2 before it has received t + 1 from all, and a rank that sent t + 1 had read t.

The epoch is counted on the device, so that it advances at each replay of a captured graph. The programs of a launch add
EPOCH_UNITS to the counter together, each a share at its end; the epoch changes when the last one has added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

EPOCH_UNITS = tl.constexpr(1 << 16)  # upper bound of programs per launch
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class SumTarget:
    """Destination and format of a rank's partial sum.

    Attributes:
        peers: [W] int64, addresses of the ranks' LL buffers, int64 [2, W, pieces, slice_words]; a piece is a row's
            slice.
        count: int64 [1], epoch counter.
        rank: the sender, in the world.
        pieces: capacity of the LL buffers.
        slice_words: words per piece; a row begins a new piece.
        two_shot: send a piece only to its owner, rank `piece % W`, not to all ranks.
    """

    peers: torch.Tensor
    count: torch.Tensor
    rank: int
    pieces: int
    slice_words: int
    two_shot: bool


def sum_shape(sums: SumTarget | None) -> dict[str, int]:
    """Returns the compile-time arguments of a kernel that can send its sums; RANKS is 0 if it does not."""
    if sums is None:
        return dict(RANKS=0, PIECES=0, SIZE=0, TWO_SHOT=False)
    return dict(RANKS=sums.peers.numel(), PIECES=sums.pieces, SIZE=sums.slice_words, TWO_SHOT=sums.two_shot)


@triton.jit
def epoch(counter):
    """Loads the number of this launch, from 1 on; call it before sending anything."""
    return (tl.load(counter) // EPOCH_UNITS + 1).to(tl.int32)


@triton.jit
def end_epoch(counter, program, programs):
    """Counts this program as done with the launch; all its threads must have read the epoch before."""
    share = tl.where(program == 0, EPOCH_UNITS - programs + 1, 1).to(tl.int64)
    tl.atomic_add(counter, share, sem="relaxed")


@triton.jit
def ll_buffer(ll_buffers, tag, source, piece, SOURCES: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr):
    """Returns the address of the LL buffer of `piece` from `source` for `tag`."""
    return ll_buffers + (((tag & 1) * SOURCES + source) * PIECES + piece).to(tl.int64) * SIZE


@triton.jit
def peer_ll_buffers(peers, rank):
    """Loads the address of a peer's LL buffers."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def send(to, words, tag, mask):
    """Stores tagged int32 words."""
    tl.store(to, (tag.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@triton.jit
def receive(at, tag, mask, source, status, spins):
    """Polls int32 words [SOURCES, n] until all carry the tag, at most `spins` times after the first poll.

    On timeout, `status` is set to 1 + a missing source, and untagged words become -1: NaN in every dtype, so that
    results computed from them, on this rank or its peers, are NaN too.
    """
    got = tl.load(at, mask=mask, other=0, volatile=True)
    late = mask & ((got >> 32).to(tl.int32) != tag)
    missing = tl.max(tl.where(late, source + 1, 0))
    polls = 0
    while (missing > 0) & (polls < spins):
        got = tl.load(at, mask=mask, other=0, volatile=True)
        late = mask & ((got >> 32).to(tl.int32) != tag)
        missing = tl.max(tl.where(late, source + 1, 0))
        polls += 1
    if missing > 0:
        tl.store(status, missing)
        got = tl.where(mask & ((got >> 32).to(tl.int32) != tag), -1, got)
    return got.to(tl.int32)


@triton.jit
def poll_limit(status, spins):
    """Returns the polls allowed after the first: none after an earlier timeout, so that broken steps end soon."""
    return tl.where(tl.load(status) != 0, 0, spins)


@triton.jit
def low(words, DTYPE: tl.constexpr):
    """Unpacks the first element of each word to fp32."""
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high(words, DTYPE: tl.constexpr):
    """Unpacks the second element of each word to fp32; zero if a word holds one."""
    if tl.float32 == DTYPE:
        return tl.zeros_like(words).to(tl.float32)
    else:
        return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def pack(first, second, DTYPE: tl.constexpr):
    """Packs fp32 values, rounded to DTYPE, into words: two per word, or only the first."""
    if tl.float32 == DTYPE:
        return first.to(tl.int32, bitcast=True)
    else:
        lower = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return lower | (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def sum_words(y, DTYPE: tl.constexpr):
    """Packs consecutive fp32 values y [m * values per word] into words [m]."""
    if tl.float32 == DTYPE:
        return y.to(tl.int32, bitcast=True)
    else:
        first, second = tl.split(tl.reshape(y, [y.shape[0] // 2, 2]))
        return pack(first, second, DTYPE)


@triton.jit
def sum_ll_buffers(peers, piece, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr):
    """Loads the LL buffers of the ranks that sum `piece` [m]: its owner [1, m], or all ranks, padded [ranks, 1]."""
    if TWO_SHOT:
        return peer_ll_buffers(peers, piece % RANKS)[None, :]
    else:
        to = tl.arange(0, triton.next_power_of_2(RANKS))
        return peer_ll_buffers(peers, tl.minimum(to, RANKS - 1))[:, None]


@triton.jit
def send_sum(
    ll_buffers, words, piece, w, tag, rank, live, RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Sends words w [m] of `piece` of this rank's partial sum to `ll_buffers`."""
    to = tl.arange(0, ll_buffers.shape[0])
    there = ll_buffer(ll_buffers, tag, rank, piece[None, :], RANKS, PIECES, SIZE) + w[None, :]
    send(there, words[None, :], tag, (to < RANKS)[:, None] & live[None, :])
