"""Words with tags: how kernels pass small messages between GPUs that can write to each other's memory.

A message is 32-bit words. Each travels in the lower half of a 64-bit word whose upper half is a tag, so that one store
carries both: a receiver that sees the tag has the data. That takes no fence and one trip over the link, at twice the
bytes: right for what a decode step sends, wrong for megabytes (the LL protocol of NCCL).

A turn is one launch of the collective, and the tag is its number. A box holds one piece of a message from one source,
in two halves; turn t uses half t % 2. Reuse in t + 2 is safe: in every turn every rank waits for all others, so nobody
sends t + 2 before it has heard everyone's t + 1, and who sent that had read t.

The turn is counted on the device, so that a captured graph moves it on at each replay. As they end, all programs of a
launch together add TURN to a counter, each a share; the turn stays the same until the last of them has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TURN = tl.constexpr(1 << 16)  # more than there are programs in a launch
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class SumTarget:
    """Where a rank sends its part of a sum, and as what.

    Attributes:
        peers: [W] int64, addresses of the ranks' boxes, int64 [2, W, pieces, slice_words]: `piece` of a row's slice.
        count: int64 [1], of turns.
        rank: the sender in the world.
        pieces: room in the boxes.
        slice_words: of a piece; a row begins a new one.
        two_shot: a piece goes to its owner, rank `piece % W`, otherwise to all ranks.
    """

    peers: torch.Tensor
    count: torch.Tensor
    rank: int
    pieces: int
    slice_words: int
    two_shot: bool


def sum_shape(sums: SumTarget | None) -> dict[str, int]:
    """Constants of a kernel that sends its sums; none to speak of where it does not."""
    if sums is None:
        return dict(RANKS=0, PIECES=0, SIZE=0, TWO_SHOT=False)
    return dict(RANKS=sums.peers.numel(), PIECES=sums.pieces, SIZE=sums.slice_words, TWO_SHOT=sums.two_shot)


@triton.jit
def turn(counter):
    """The number of this launch, from 1 on; to be read before anything is sent."""
    return (tl.load(counter) // TURN + 1).to(tl.int32)


@triton.jit
def end_turn(counter, program, programs):
    """Says that this program has done its part of the launch; it must have looked at the turn in all its threads."""
    share = tl.where(program == 0, TURN - programs + 1, 1).to(tl.int64)
    tl.atomic_add(counter, share, sem="relaxed")


@triton.jit
def box(boxes, tag, source, piece, SOURCES: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr):
    """Address of the box of `piece` from `source` for `tag`."""
    return boxes + (((tag & 1) * SOURCES + source) * PIECES + piece).to(tl.int64) * SIZE


@triton.jit
def boxes_of(peers, rank):
    """The memory of a peer, from the table of addresses."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def send(to, words, tag, mask):
    """Stores int32 words under a tag."""
    tl.store(to, (tag.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@triton.jit
def receive(at, tag, mask, source, status, spins):
    """int32 words [SOURCES, n] once all of them carry the tag, or after `spins` looks.

    Then `status` holds one more than a source that did not come, and words without the tag are -1: NaN in every dtype,
    so that nobody takes what follows from them for numbers, on this rank or on those that it sends to.
    """
    got = tl.load(at, mask=mask, other=0, volatile=True)
    late = mask & ((got >> 32).to(tl.int32) != tag)
    missing = tl.max(tl.where(late, source + 1, 0))
    looks = 0
    while (missing > 0) & (looks < spins):
        got = tl.load(at, mask=mask, other=0, volatile=True)
        late = mask & ((got >> 32).to(tl.int32) != tag)
        missing = tl.max(tl.where(late, source + 1, 0))
        looks += 1
    if missing > 0:
        tl.store(status, missing)
        got = tl.where(mask & ((got >> 32).to(tl.int32) != tag), -1, got)
    return got.to(tl.int32)


@triton.jit
def patience(status, spins):
    """How often to look: once only where an earlier collective has given up, so that a broken step ends soon."""
    return tl.where(tl.load(status) != 0, 0, spins)


@triton.jit
def low(words, DTYPE: tl.constexpr):
    """fp32 of the first value in each word."""
    if tl.float32 == DTYPE:
        return words.to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high(words, DTYPE: tl.constexpr):
    """fp32 of the second value in each word; zero where a word holds one."""
    if tl.float32 == DTYPE:
        return tl.zeros_like(words).to(tl.float32)
    else:
        return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def pack(first, second, DTYPE: tl.constexpr):
    """Words of fp32 values, rounded to DTYPE: two in each, or only the first."""
    if tl.float32 == DTYPE:
        return first.to(tl.int32, bitcast=True)
    else:
        lower = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return lower | (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def sum_words(y, DTYPE: tl.constexpr):
    """Words [m] of neighbouring values y [m * values of a word], fp32."""
    if tl.float32 == DTYPE:
        return y.to(tl.int32, bitcast=True)
    else:
        first, second = tl.split(tl.reshape(y, [y.shape[0] // 2, 2]))
        return pack(first, second, DTYPE)


@triton.jit
def sum_boxes(peers, piece, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr):
    """Memory of those that add up `piece` [m] of a sum: of its owner [1, m], or of all ranks, filled up [ranks, 1]."""
    if TWO_SHOT:
        return boxes_of(peers, piece % RANKS)[None, :]
    else:
        to = tl.arange(0, triton.next_power_of_2(RANKS))
        return boxes_of(peers, tl.minimum(to, RANKS - 1))[:, None]


@triton.jit
def send_sum(
    boxes, words, piece, w, tag, rank, live, RANKS: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Sends words w [m] of `piece` of this rank's part of a sum to `boxes`."""
    to = tl.arange(0, boxes.shape[0])
    there = box(boxes, tag, rank, piece[None, :], RANKS, PIECES, SIZE) + w[None, :]
    send(there, words[None, :], tag, (to < RANKS)[:, None] & live[None, :])
