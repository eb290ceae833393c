"""Verification kernels that Kolawole's paper compares (CMU, 2026), each the baseline of the next.

One lane per sequence (`naive`), a warp ballot over 32 tokens at a time (`ballot`), one program that reduces all
tokens at once (`verify`), a joint copy of accepted rows (`pack`), and both in one launch of one program
(`verify_and_pack_one_block`). `benchmarks/papers/verify_and_pack.py` has the kernel without these limits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from benchmarks.papers import verification_reference as reference
from benchmarks.papers.verify_and_pack import (
    Launch,
    Like,
    Packed,
    Verified,
    accepted_lengths,
    block_of,
    copy_tiles,
    jit,
    like,
    load_tile,
    rows_of,
    share_of,
    tiles_of,
    tokens_of,
    verify_and_pack,
    write_lengths,
)
from kernels import dispatch
from kernels.overlap import start_successor, wait_for_predecessor

LANES = 32  # warp size: sequences per program of the naive kernel, tokens per ballot
LANE_BYTES = 16  # of a lane's widest load
ONE_BLOCK_BATCH = 32
WAITING_THREADS = 256  # of the packer that waits, which moves one element each at a time


@jit
def _naive_kernel(
    draft, target, accepted, has_mismatch, next_tokens, draft_b, target_b, B, G, LANES: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = b < B
    wait_for_predecessor(PDL)
    start_successor(PDL)
    row = b.to(tl.int64)
    k = tl.zeros([LANES], tl.int32)
    going = inside
    j = 0
    while (j < G) & (tl.max(going.to(tl.int32), 0) > 0):
        d = tl.load(draft + row * draft_b + j, mask=going, other=-1)
        t = tl.load(target + row * target_b + j, mask=going, other=-1)
        going = going & (d == t) & (d >= 0)
        k += going.to(tl.int32)
        j += 1
    write_lengths(target, accepted, has_mismatch, next_tokens, b, k, inside, target_b, G)


@triton.jit
def first_vote(wrong, VOTES: tl.constexpr):
    """Returns, in all lanes, the first lane of a warp whose bool [LANES] is set; LANES if none is."""
    if VOTES:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred wrong;
            .reg .b32 votes;
            setp.ne.s32 wrong, $1, 0;
            vote.sync.ballot.b32 votes, wrong, 0xffffffff;
            brev.b32 votes, votes;
            clz.b32 $0, votes;
            }""",
            "=r,r", [wrong.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    lane = tl.arange(0, wrong.shape[0])
    return lane * 0 + tl.min(tl.where(wrong, lane, wrong.shape[0]), 0)


@jit
def _ballot_kernel(
    draft, target, accepted, has_mismatch, next_tokens, draft_b, target_b, G,
    LANES: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    b = tl.program_id(0) + lane * 0
    row = b.to(tl.int64)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = tl.zeros([LANES], tl.int32)
    for chunk in range(CHUNKS):
        j = chunk * LANES + lane
        d = tl.load(draft + row * draft_b + j, mask=j < G, other=-1)
        t = tl.load(target + row * target_b + j, mask=j < G, other=-1)
        k += tl.where(k == chunk * LANES, first_vote((d != t) | (d < 0), PDL), 0)
    write_lengths(target, accepted, has_mismatch, next_tokens, b, k, lane == 0, target_b, G)


@jit
def _verify_kernel(
    draft, target, accepted, has_mismatch, next_tokens, draft_b, target_b, B, G,
    BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) + tl.arange(0, 1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = accepted_lengths(draft, target, b, B, draft_b, target_b, G, BLOCK_G)
    write_lengths(target, accepted, has_mismatch, next_tokens, b, k, b < B, target_b, G)


@jit
def _pack_kernel(
    kv, accepted, packed, offsets, kv_b, B, D,
    BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, MORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = tl.load(accepted + b).to(tl.int32)
    size = k * D  # the accepted rows of a sequence are one run
    begin, share = share_of(size)
    if (tl.program_id(0) == 0) | (begin < size):
        source = kv + b.to(tl.int64) * kv_b + begin
        x = load_tile(source, share, size - begin, BLOCK)
        before = tl.arange(0, BLOCK_B)
        offset = tl.sum(tl.load(accepted + before, mask=before < b, other=0), 0)
        if tl.program_id(0) == 0:
            tl.store(offsets + b, offset)
            tl.store(offsets + B, offset + k, mask=b == B - 1)
        copy_tiles(source, packed + offset * D + begin, x, share, size - begin, BLOCK, MORE)


@jit
def _one_block_kernel(
    draft, target, accepted, has_mismatch, next_tokens, kv, packed, offsets, draft_b, target_b, kv_b, B, G, D,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK_B)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = accepted_lengths(draft, target, b, B, draft_b, target_b, G, BLOCK_G)
    write_lengths(target, accepted, has_mismatch, next_tokens, b, k, b < B, target_b, G)
    ends = tl.cumsum(k, 0)
    tl.store(offsets + b, (ends - k).to(tl.int64), mask=b < B)
    tl.store(offsets + B, tl.sum(k, 0).to(tl.int64))
    # BLOCK is what a warp loads at once, so each of the 32 warps copies one sequence.
    source = kv + b.to(tl.int64)[:, None] * kv_b
    out = packed + (ends - k).to(tl.int64)[:, None] * D
    for at in range(0, tl.max(k, 0) * D, BLOCK):
        i = at + tl.arange(0, BLOCK)[None, :]
        inside = i < (k * D)[:, None]
        tl.store(out + i, tl.load(source + i, mask=inside), mask=inside)


def naive(draft: torch.Tensor, target: torch.Tensor, out: Verified) -> None:
    """Runs `verify` with one lane per sequence: a warp takes as long as its longest.

    A baseline; shapes as in `verify`.
    """
    return _scan("naive", draft, target, out)


def ballot(draft: torch.Tensor, target: torch.Tensor, out: Verified) -> None:
    """Runs `verify` with one warp per sequence, a ballot per 32 tokens. A baseline; shapes as in `verify`."""
    return _scan("ballot", draft, target, out)


def verify(draft: torch.Tensor, target: torch.Tensor, out: Verified) -> None:
    """Accepts drafts up to the first mismatch, where the target's token follows.

    Its time does not depend on what is accepted.

    Args:
        draft: [B, gamma] int64, gamma at most MAX_GAMMA, last dim contiguous; -1 (no token) is never accepted.
        target: the target's tokens at these positions and one more [B, gamma + 1] int64, last dim contiguous; -1, for a
            row with invalid logits, is passed on.
        out: of B sequences, contiguous.

    Source:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
    """
    return _scan("reduction", draft, target, out)


def pack(kv: torch.Tensor, accepted: torch.Tensor, packed: Packed) -> None:
    """Packs each sequence's first `accepted` rows after those of the sequences before it.

    Args:
        kv: [B, gamma, D], contiguous within a sequence, any dtype.
        accepted: [B] int64 in [0, gamma], contiguous.
        packed: in kv's dtype.
    """
    if not dispatch.on_gpu(kv):
        return packed.copy(*reference.pack(kv, accepted))
    launch = packing_launch(like(kv), like(accepted), packed.layout, kv.device)
    return launch(kv, accepted, packed.kv, packed.offsets)


def pack_waiting(kv: torch.Tensor, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs like the paper's first packer, which loses: a baseline.

    The host waits for the total to allocate the output, and one program of 256 threads copies each sequence.

    Returns:
        The rows [total, D], and their offsets [B + 1] int64.
    """
    if not dispatch.on_gpu(kv):
        return reference.pack(kv, accepted)
    total, offsets = int(accepted.sum().item()), reference.offsets_of(accepted)
    rows = kv.new_empty(total, kv.shape[2])
    waiting_launch(like(kv), kv.device)(kv, accepted, rows, offsets)
    return rows, offsets


def verify_and_pack_one_block(
    draft: torch.Tensor, target: torch.Tensor, kv: torch.Tensor, out: Verified, packed: Packed
) -> None:
    """Runs `verify_and_pack` as one program, for at most ONE_BLOCK_BATCH sequences: a baseline, limited to one SM."""
    if not dispatch.on_gpu(draft):
        return verify_and_pack(draft, target, kv, out, packed)
    launch = one_block_launch(like(draft), like(target), like(kv), out.layout, packed.layout, kv.device)
    return launch(
        draft, target, out.accepted, out.has_mismatch, out.next_tokens, kv, packed.kv, packed.offsets
    )  # fmt: skip


def _scan(variant: str, draft: torch.Tensor, target: torch.Tensor, out: Verified) -> None:
    if not dispatch.on_gpu(draft):
        return out.copy(*reference.verify(draft, target))
    launch = scan_launch(variant, like(draft), like(target), out.layout, draft.device)
    return launch(draft, target, out.accepted, out.has_mismatch, out.next_tokens)


@cache
def scan_launch(variant: str, draft: Like, target: Like, out: tuple[Like, ...], device: torch.device) -> Launch:
    """Checks shapes; returns the launch of a verification kernel."""
    B, G = tokens_of(draft, target, out)
    strides = draft[1][0], target[1][0]
    if variant == "naive":
        return Launch(_naive_kernel, (triton.cdiv(B, LANES), 1, 1), 1, (*strides, B, G), LANES=LANES)
    if variant == "ballot":
        chunks = triton.cdiv(G, LANES)
        return Launch(_ballot_kernel, (B, 1, 1), 1, (*strides, G), LANES=LANES, CHUNKS=chunks)
    return Launch(_verify_kernel, (B, 1, 1), 1, (*strides, B, G), BLOCK_G=block_of(G))


@cache
def packing_launch(kv: Like, accepted: Like, packed: tuple[Like, Like], device: torch.device) -> Launch:
    """Checks shapes; returns the launch of the packing kernel."""
    B, _, D = rows_of(kv, *packed)
    assert accepted[:3] == ((B,), (1,), torch.int64), f"{B} sequences, but lengths {tuple(accepted[0])} {accepted[2]}"
    splits, warps, tile = tiles_of(kv, device)
    return Launch(
        _pack_kernel, (splits, B, 1), warps, (kv[1][0], B, D), BLOCK_B=block_of(B), **tile
    )  # fmt: skip


@cache
def waiting_launch(kv: Like, device: torch.device) -> Launch:
    """Returns the launch of the packing kernel with one program for each sequence."""
    (B, _, D), (kv_b, *_), *_ = kv
    tile = {"BLOCK": WAITING_THREADS, "MORE": True}
    return Launch(_pack_kernel, (1, B, 1), WAITING_THREADS // LANES, (kv_b, B, D), BLOCK_B=block_of(B), **tile)


@cache
def one_block_launch(
    draft: Like, target: Like, kv: Like, out: tuple[Like, ...], packed: tuple[Like, Like], device: torch.device
) -> Launch:
    """Checks shapes; returns the launch of the one-block kernel."""
    B, G = tokens_of(draft, target, out)
    D = rows_of(kv, *packed)[2]
    assert B <= ONE_BLOCK_BATCH, f"one block takes at most {ONE_BLOCK_BATCH} sequences, got {B}"
    return Launch(
        _one_block_kernel, (1, 1, 1), 32, (draft[1][0], target[1][0], kv[1][0], B, G, D),
        BLOCK_B=ONE_BLOCK_BATCH, BLOCK_G=block_of(G), BLOCK=LANES * LANE_BYTES // kv[2].itemsize,
    )  # fmt: skip
