"""Fused verification of drafts and packing of their KV in one launch.

The last kernel of Kolawole's "Batched Speculative Decoding Verification Kernels" (CMU, 2026) without its limits, batch
32 and the bandwidth of one SM: many programs share the copy of accepted rows, and each finds its offset while its
first rows are in flight. In small batches each program compares the tokens of all sequences before its own. In large
ones it compares its own sequence's and looks up the other lengths, which their first programs publish as tagged words
(`kernels.peers.ll_protocol`); if one is late it compares those tokens too, so that no program depends on another being
resident. The paper's other kernels are in `benchmarks/papers/verification_kernels.py`. A decode step does not pack:
accepted KV stays where it was appended (`kernels.tokens.commit`).

The caller owns the buffers: nothing is allocated here, so captured and eager steps pay for one launch. Checks
and launch geometry depend on shapes only, and are cached for each (`Launch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.papers import verification_reference as reference
from kernels import dispatch
from kernels.overlap import pdl_options, sm_count, start_successor, wait_for_predecessor
from kernels.peers.ll_protocol import end_epoch, epoch, send
from kernels.tokens.commit import before_first

MAX_GAMMA = 1024  # drafts of a sequence, which a program holds at once

PROGRAMS_PER_SM = 2  # all resident at once, so that all first tiles are in flight
TILE_BYTES = 64 << 10  # maximum per program; half of it if the next tile is loaded while one is stored
MIN_TILE_BYTES = 4 << 10
THREAD_BYTES = 128  # of a tile in a thread's registers, if eight warps can hold it like this
AHEAD_BYTES = 3 << 20  # of all drafts: up to here, if nothing is looked up, loads do not wait for acceptance
TOKENS = 1024  # of all sequences, padded: up to here each program compares those before its own
LATE_TOKENS = 256  # at once, of sequences whose lengths are late: few, so that registers leave room for two programs
LOOKS = 1000  # polls of late lengths, about 1 us each
RUN = tl.constexpr(256)  # elements: programs' shares differ by at most one run
UNKNOWN = tl.constexpr(1 << 40)  # more than any sum of lengths


# Shape, strides, dtype, and whether the address is a multiple of 16 bytes: what a launch depends on.
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


def like(t: torch.Tensor) -> Like:
    """Returns what a launch depends on."""
    return t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0


@dataclass(frozen=True)
class Verified:
    """Verification outputs of B sequences.

    Attributes:
        accepted: drafts before the first mismatch [B] int64.
        has_mismatch: whether there is one [B] bool.
        next_tokens: the target's token after the accepted ones [B] int64.
    """

    accepted: torch.Tensor
    has_mismatch: torch.Tensor
    next_tokens: torch.Tensor

    @classmethod
    def create(cls, batch: int, device: torch.device | str) -> Verified:
        """Allocates buffers for `batch` sequences, uninitialized."""
        accepted, next_tokens = torch.empty(2, batch, dtype=torch.int64, device=device)
        return cls(accepted, torch.empty(batch, dtype=torch.bool, device=device), next_tokens)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.accepted, self.has_mismatch, self.next_tokens

    @cached_property
    def layout(self) -> tuple[Like, ...]:
        """Cached, as every launch needs it."""
        return tuple(map(like, self.tensors))

    def copy(self, accepted: torch.Tensor, has_mismatch: torch.Tensor, next_tokens: torch.Tensor) -> None:
        self.accepted.copy_(accepted)
        self.has_mismatch.copy_(has_mismatch)
        self.next_tokens.copy_(next_tokens)


@dataclass(frozen=True)
class Packed:
    """Accepted rows of all sequences, concatenated.

    Attributes:
        kv: [B * gamma, D], contiguous; rows from offsets[B] on are unchanged.
        offsets: where each sequence's rows begin, and where the last ones end [B + 1] int64, contiguous.
        shared: scratch for the programs of `verify_and_pack` [B + 1] int64, zeroed before first use: a count of
            launches, which must not overlap in time, and each sequence's length tagged with its launch.
    """

    kv: torch.Tensor
    offsets: torch.Tensor
    shared: torch.Tensor

    @classmethod
    def create(cls, kv: torch.Tensor) -> Packed:
        """Allocates buffers for the rows of kv [B, gamma, D], outputs uninitialized."""
        return cls(
            torch.empty(kv.shape[0] * kv.shape[1], kv.shape[2], dtype=kv.dtype, device=kv.device),
            torch.empty(len(kv) + 1, dtype=torch.int64, device=kv.device),
            torch.zeros(len(kv) + 1, dtype=torch.int64, device=kv.device),
        )

    @cached_property
    def layout(self) -> tuple[Like, Like]:
        """Cached, as every launch needs it."""
        return like(self.kv), like(self.offsets)

    def copy(self, kv: torch.Tensor, offsets: torch.Tensor) -> None:
        self.kv[: len(kv)] = kv
        self.offsets.copy_(offsets)


# Specialize on the alignment of rows only: tokens are loaded one by one, from any address.
jit = triton.jit(
    do_not_specialize_on_alignment=[
        "draft", "target", "accepted", "has_mismatch", "next_tokens", "offsets", "shared"
    ]
)  # fmt: skip


@triton.jit
def accepted_lengths(draft, target, b, end, draft_b, target_b, G, BLOCK_G: tl.constexpr):
    """Returns the tokens before the first mismatch of sequences b [n], int32; 0 for those from `end` on."""
    row = b.to(tl.int64)[:, None]
    j = tl.arange(0, BLOCK_G)[None, :]
    inside = (b < end)[:, None] & (j < G)
    d = tl.load(draft + row * draft_b + j, mask=inside, other=-1)
    t = tl.load(target + row * target_b + j, mask=inside, other=-1)
    return before_first((d != t) | (d < 0), j, G)


@triton.jit
def write_lengths(target, accepted, has_mismatch, next_tokens, b, k, inside, target_b, G):
    """Stores lengths, flags and next tokens."""
    tl.store(accepted + b, k.to(tl.int64), mask=inside)
    tl.store(has_mismatch + b, k < G, mask=inside)
    tl.store(next_tokens + b, tl.load(target + b.to(tl.int64) * target_b + k, mask=inside), mask=inside)


@triton.jit
def share_of(size):
    """Returns where a program's share of `size` elements begins, and its size: whole runs, so that loads are wide."""
    share = tl.cdiv(tl.cdiv(size, tl.num_programs(0)), RUN) * RUN
    return tl.program_id(0) * share, share


@triton.jit
def load_tile(source, share, left, BLOCK: tl.constexpr):
    """Loads the first tile of a share."""
    i = tl.arange(0, BLOCK)
    return tl.load(source + i, mask=(i < share) & (i < left), eviction_policy="evict_first")


@triton.jit
def copy_tiles(source, out, x, share, left, BLOCK: tl.constexpr, MORE: tl.constexpr):
    """Stores the first tile x and copies the rest of the share, loading each tile before the last is stored."""
    i = tl.arange(0, BLOCK)
    if MORE:
        for _ in range(BLOCK, tl.minimum(share, left), BLOCK):
            source += BLOCK
            following = load_tile(source, share - BLOCK, left - BLOCK, BLOCK)
            tl.store(out + i, x, mask=i < left)  # tiles before the last are full
            x = following
            out += BLOCK
            share -= BLOCK
            left -= BLOCK
    tl.store(out + i, x, mask=(i < share) & (i < left))


@triton.jit
def looked_up(lengths, tag, b, LOOKS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Returns the sum of lengths before b; at least UNKNOWN if one is missing after LOOKS polls."""
    total = tl.zeros([], tl.int64)
    for first in range(0, b, BLOCK_B):
        row = first + tl.arange(0, BLOCK_B)
        # One sum has both the total and whether it is complete, so that all threads agree.
        here = tl.full([], UNKNOWN, tl.int64)
        looks = 0
        while (here >= UNKNOWN) & (looks < LOOKS):
            word = tl.load(lengths + row, mask=row < b, other=0, volatile=True)
            length = tl.where((word >> 32).to(tl.int32) == tag, word & 0xFFFFFFFF, UNKNOWN)
            here = tl.sum(tl.where(row < b, length, 0), 0)
            looks += 1
        total += here
    return total


@jit
def _verify_and_pack_kernel(
    draft, target, accepted, has_mismatch, next_tokens, kv, packed, offsets, shared, draft_b, target_b, kv_b, G, D,
    BLOCK_G: tl.constexpr, ROWS: tl.constexpr, BLOCK_B: tl.constexpr, LOOKS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, MORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies a program's share of a sequence's accepted rows after those of the sequences before it."""
    wait_for_predecessor(PDL)
    b, B = tl.program_id(1), tl.num_programs(1)
    source = kv + b.to(tl.int64) * kv_b
    if AHEAD:
        begin, share = share_of(G * D)
        x = load_tile(source + begin, share, G * D - begin, BLOCK)
    one = b + tl.arange(0, 1)
    k = accepted_lengths(draft, target, one, B, draft_b, target_b, G, BLOCK_G)
    count = tl.sum(k, 0)
    if shared is not None:
        tag = epoch(shared)
    if tl.program_id(0) == 0:
        if shared is not None:
            send(shared + 1 + b, count, tag, True)
        write_lengths(target, accepted, has_mismatch, next_tokens, one, k, one < B, target_b, G)
    size = count * D  # the accepted rows of a sequence are contiguous
    if not AHEAD:
        begin, share = share_of(size)
    if (tl.program_id(0) == 0) | (begin < size):
        # Load own rows before the other sequences' lengths: the destination is known by the time they arrive.
        if not AHEAD:
            x = load_tile(source + begin, share, size - begin, BLOCK)
        offset = UNKNOWN
        if shared is not None:
            offset = looked_up(shared + 1, tag, b, LOOKS, BLOCK_B)
        if offset >= UNKNOWN:
            total = tl.zeros([ROWS], tl.int64)
            for first in range(0, b, ROWS):
                row = first + tl.arange(0, ROWS)
                total += accepted_lengths(draft, target, row, b, draft_b, target_b, G, BLOCK_G)
            offset = tl.sum(total, 0)
        start_successor(PDL)
        if tl.program_id(0) == 0:
            tl.store(offsets + b, offset)
            tl.store(offsets + B, offset + count, mask=b == B - 1)
        copy_tiles(source + begin, packed + offset * D + begin, x, share, size - begin, BLOCK, MORE)
    if shared is not None:
        end_epoch(shared, b * tl.num_programs(0) + tl.program_id(0), B * tl.num_programs(0))


class Launch:
    """A kernel with its grid and non-tensor arguments; the first call compiles, later ones skip Triton's cache lookup.

    Triton selects code by the arguments of every call. The holder of a `Launch` guarantees that shapes,
    strides, dtypes, device, and 16-byte alignment of rows are the same in each call.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], warps: int, sizes: tuple[int, ...], **constants: Any):
        self.kernel, self.grid, self.warps, self.sizes, self.constants = kernel, grid, warps, sizes, constants
        self.run: Any = None
        self.rest: tuple[Any, ...] = ()

    def __call__(self, first: torch.Tensor, *others: torch.Tensor | None) -> None:
        if self.run is not None:
            return self.run(first, *others, *self.rest)
        options = {**self.constants, **pdl_options(first)}
        compiled = self.kernel[self.grid](first, *others, *self.sizes, **options, num_warps=self.warps)
        if compiled is not None:  # the interpreter does not compile
            self.rest = (*self.sizes, *self.constants.values(), options["PDL"])
            self.run = compiled[self.grid]
        return None


def verify_and_pack(draft: torch.Tensor, target: torch.Tensor, kv: torch.Tensor, out: Verified, packed: Packed) -> None:
    """Accepts drafts up to the first mismatch, and packs the accepted rows of each sequence.

    The target's token follows the accepted ones. A sequence's rows follow those of the sequences before it.

    Args:
        draft: [B, gamma] int64, gamma at most MAX_GAMMA, last dim contiguous; -1 (no token) is never accepted.
        target: the target's tokens at these positions and one more [B, gamma + 1] int64, last dim contiguous; -1, for a
            row with invalid logits, is passed on.
        kv: [B, gamma, D], contiguous within a sequence, any dtype.
        out: of B sequences, contiguous.
        packed: in kv's dtype.

    Source:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
    """
    if not dispatch.on_gpu(draft):
        out.copy(*reference.verify(draft, target))
        return packed.copy(*reference.pack(kv, out.accepted))
    launch, looks = fused_launch(like(draft), like(target), like(kv), out.layout, packed.layout, kv.device)
    return launch(
        draft, target, out.accepted, out.has_mismatch, out.next_tokens, kv, packed.kv, packed.offsets,
        packed.shared if looks else None,
    )  # fmt: skip


@cache
def fused_launch(
    draft: Like, target: Like, kv: Like, out: tuple[Like, ...], packed: tuple[Like, Like], device: torch.device
) -> tuple[Launch, bool]:
    """Returns the launch, and whether its programs look up lengths."""
    B, G = tokens_of(draft, target, out)
    D = rows_of(kv, *packed)[2]
    splits, warps, tile = tiles_of(kv, device)
    block_b, block_g = block_of(B), block_of(G)
    looks = block_b * block_g > TOKENS
    launch = Launch(
        _verify_and_pack_kernel, (splits, B, 1), warps, (draft[1][0], target[1][0], kv[1][0], G, D),
        BLOCK_G=block_g, ROWS=min(block_b, max(1, (LATE_TOKENS if looks else TOKENS) // block_g)),
        BLOCK_B=min(max(block_b, 32 * warps), 1024),  # at least one word per thread, so that all see the same
        LOOKS=LOOKS, AHEAD=not looks and B * G * D * kv[2].itemsize <= AHEAD_BYTES, **tile,
    )  # fmt: skip
    return launch, looks


def block_of(n: int) -> int:
    """Returns the padded block size of n elements."""
    return triton.next_power_of_2(max(n, 1))


def tokens_of(draft: Like, target: Like, out: tuple[Like, ...]) -> tuple[int, int]:
    """Checks tokens and outputs; returns batch and gamma."""
    (B, G), strides, *_ = draft
    kinds = torch.int64, torch.bool, torch.int64
    for (shape, (stride,), dtype, _), wanted in zip(out, kinds, strict=True):
        assert shape == (B,) and stride == 1 and dtype == wanted, f"{B} sequences, but outputs {tuple(shape)} {dtype}"
    assert target[0] == (B, G + 1), f"{G} drafted tokens need {G + 1} of the target, got {tuple(target[0])}"
    assert B > 0 and G <= MAX_GAMMA, f"{B} sequences of {G} drafted tokens: at least one, at most {MAX_GAMMA}"
    assert draft[2] == target[2] == torch.int64 and target[1][1] == 1 and (G < 2 or strides[1] == 1)
    return B, G


def rows_of(kv: Like, packed: Like, offsets: Like) -> tuple[int, ...]:
    """Checks rows and buffers; returns the shape of kv."""
    B, G, D = kv[0]
    assert kv[2] == packed[2] and packed[1] == (D, 1) and kv[1][1:] == (D, 1), "rows that are not contiguous"
    assert packed[0][0] >= B * G and packed[0][1] == D and offsets[0] == (B + 1,) and G * D < 2**30
    return B, G, D


def tiles_of(kv: Like, device: torch.device) -> tuple[int, int, dict[str, Any]]:
    """Returns how many programs share a sequence's copy, their warps, and their tiles."""
    (B, G, D), _, dtype, _ = kv
    size = G * D
    max_splits = max(1, PROGRAMS_PER_SM * sm_count(device) // B)
    share = triton.cdiv(size, max_splits)
    more = share * dtype.itemsize > TILE_BYTES
    block = TILE_BYTES // 2 if more else max(block_of(share) * dtype.itemsize, MIN_TILE_BYTES)
    splits = max(1, min(max_splits, triton.cdiv(size * dtype.itemsize, block)))
    warps = min(max(block // (32 * THREAD_BYTES), 4), 8)
    return splits, warps, {"BLOCK": block // dtype.itemsize, "MORE": more}
