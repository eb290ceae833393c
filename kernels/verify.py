"""Greedy verification of drafted tokens: how many of each sequence are accepted, which token follows, and packed KV.

Four kernels after Kolawole's "Batched Speculative Decoding Verification Kernels" (CMU, 2026), each the baseline of the
next: one lane a sequence (`naive`), one program a sequence (`verify`), accepted rows copied together (`pack`), and both
in one launch of one program (`verify_and_pack_one_block`). `verify_and_pack` lifts the limits of the last one, batch 32
and the bandwidth of one SM: many programs share the copy, and each finds where it begins by scanning the tokens of all
sequences before its own. Those are few beside the rows, which are on their way meanwhile. No program waits for another.

Whoever calls owns what is written: nothing is allocated here, so that captured steps and eager ones pay one launch. A
step that keeps its KV where it is needs `verify` alone; a kernel with another destination calls `accepted_lengths`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels import routing
from kernels.launching import overlapped, sm_count, start_successor, wait_for_predecessor
from kernels.reference import verify as reference

MAX_GAMMA = 1024  # drafted tokens of a sequence, which a program holds at once

LANES = 32  # sequences of a program of the naive kernel
WARPS = 8
PROGRAMS_PER_SM = 2  # of a copy: all resident at once, so that all of the first tiles are on their way
TILE_BYTES = 64 << 10  # 256 bytes a thread
TOKENS = 1024  # of other sequences that a program compares at once; more, and two programs no longer fit an SM
WIDE_TOKENS, WIDE_WARPS = 4096, 16  # where there are many tokens to compare, and one program an SM
ONE_BLOCK_BATCH = 32


@dataclass(frozen=True)
class Verified:
    """What verification says of B sequences.

    Attributes:
        accepted: drafted tokens before the first that differs [B] int64.
        has_mismatch: whether there is one [B] bool.
        next_tokens: the target's token behind the accepted ones [B] int64.
    """

    accepted: torch.Tensor
    has_mismatch: torch.Tensor
    next_tokens: torch.Tensor

    @classmethod
    def create(cls, batch: int, device: torch.device | str) -> Verified:
        """Buffers for `batch` sequences, not initialised."""
        accepted, next_tokens = torch.empty(2, batch, dtype=torch.int64, device=device)
        return cls(accepted, torch.empty(batch, dtype=torch.bool, device=device), next_tokens)

    def copy(self, accepted: torch.Tensor, has_mismatch: torch.Tensor, next_tokens: torch.Tensor) -> None:
        self.accepted.copy_(accepted)
        self.has_mismatch.copy_(has_mismatch)
        self.next_tokens.copy_(next_tokens)


@dataclass(frozen=True)
class Packed:
    """Accepted rows of all sequences, one behind the other.

    Attributes:
        kv: [B * gamma, D], contiguous; rows from offsets[B] on are left as they were.
        offsets: where each sequence's rows begin, and where the last ones end [B + 1] int64, contiguous.
    """

    kv: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def create(cls, kv: torch.Tensor) -> Packed:
        """Buffers for the rows of kv [B, gamma, D], not initialised."""
        return cls(
            torch.empty(kv.shape[0] * kv.shape[1], kv.shape[2], dtype=kv.dtype, device=kv.device),
            torch.empty(len(kv) + 1, dtype=torch.int64, device=kv.device),
        )

    def copy(self, kv: torch.Tensor, offsets: torch.Tensor) -> None:
        self.kv[: len(kv)] = kv
        self.offsets.copy_(offsets)


@triton.jit
def accepted_lengths(draft, target, b, end, draft_b, target_b, G, BLOCK_G: tl.constexpr):
    """Tokens before the first mismatch of sequences b [n], int32; 0 for those from `end` on."""
    row = b.to(tl.int64)[:, None]
    j = tl.arange(0, BLOCK_G)[None, :]
    inside = (b < end)[:, None] & (j < G)
    d = tl.load(draft + row * draft_b + j, mask=inside, other=-1)
    t = tl.load(target + row * target_b + j, mask=inside, other=-1)
    return tl.min(tl.where((d != t) | (d < 0), tl.minimum(j, G), G), 1)


@triton.jit
def _write(target, accepted, has_mismatch, next_tokens, b, k, inside, target_b, G):
    tl.store(accepted + b, k.to(tl.int64), mask=inside)
    tl.store(has_mismatch + b, k < G, mask=inside)
    tl.store(next_tokens + b, tl.load(target + b.to(tl.int64) * target_b + k, mask=inside), mask=inside)


@triton.jit
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
    _write(target, accepted, has_mismatch, next_tokens, b, k, inside, target_b, G)


@triton.jit
def _verify_kernel(
    draft, target, accepted, has_mismatch, next_tokens, draft_b, target_b, B, G,
    BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) + tl.arange(0, 1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = accepted_lengths(draft, target, b, B, draft_b, target_b, G, BLOCK_G)
    _write(target, accepted, has_mismatch, next_tokens, b, k, b < B, target_b, G)


@triton.jit
def _pack_kernel(
    kv, accepted, packed, offsets, kv_b, B, D,
    BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = tl.load(accepted + b).to(tl.int32)
    begin = tl.program_id(0) * BLOCK
    size = k * D  # the accepted rows of a sequence are one run
    if (begin == 0) | (begin < size):
        source = kv + b.to(tl.int64) * kv_b
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < size, eviction_policy="evict_first")
        before = tl.arange(0, BLOCK_B)
        offset = tl.sum(tl.load(accepted + before, mask=before < b, other=0), 0)
        if begin == 0:
            tl.store(offsets + b, offset)
            tl.store(offsets + B, offset + k, mask=b == B - 1)
        out = packed + offset * D
        tl.store(out + i, x, mask=i < size)
        for at in range(begin + tl.num_programs(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(out + i, tl.load(source + i, mask=i < size, eviction_policy="evict_first"), mask=i < size)


@triton.jit
def _one_block_kernel(
    draft, target, accepted, has_mismatch, next_tokens, kv, packed, offsets, draft_b, target_b, kv_b, B, G, D,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK_B)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    k = accepted_lengths(draft, target, b, B, draft_b, target_b, G, BLOCK_G)
    _write(target, accepted, has_mismatch, next_tokens, b, k, b < B, target_b, G)
    ends = tl.cumsum(k, 0)
    tl.store(offsets + b, (ends - k).to(tl.int64), mask=b < B)
    tl.store(offsets + B, tl.sum(k, 0).to(tl.int64))
    source = kv
    for s in range(B):
        size = tl.sum(tl.where(b == s, k, 0), 0) * D
        out = packed + tl.sum(tl.where(b == s, ends - k, 0), 0).to(tl.int64) * D
        for at in range(0, size, BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(out + i, tl.load(source + i, mask=i < size), mask=i < size)
        source += kv_b


@triton.jit
def _verify_and_pack_kernel(
    draft, target, accepted, has_mismatch, next_tokens, kv, packed, offsets, draft_b, target_b, kv_b, B, G, D,
    BLOCK_G: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK
    wait_for_predecessor(PDL)
    one = b + tl.arange(0, 1)
    k = accepted_lengths(draft, target, one, B, draft_b, target_b, G, BLOCK_G)
    if begin == 0:
        _write(target, accepted, has_mismatch, next_tokens, one, k, one < B, target_b, G)
    count = tl.sum(k, 0)
    size = count * D  # the accepted rows of a sequence are one run
    if (begin == 0) | (begin < size):
        # Own rows are asked for before the other sequences' tokens: where they go is known by the time they are here.
        source = kv + b.to(tl.int64) * kv_b
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < size, eviction_policy="evict_first")
        total = tl.zeros([ROWS], tl.int64)
        for first in range(0, b, ROWS):
            row = first + tl.arange(0, ROWS)
            total += accepted_lengths(draft, target, row, b, draft_b, target_b, G, BLOCK_G)
        offset = tl.sum(total, 0)
        start_successor(PDL)
        if begin == 0:
            tl.store(offsets + b, offset)
            tl.store(offsets + B, offset + count, mask=b == B - 1)
        out = packed + offset * D
        tl.store(out + i, x, mask=i < size)
        for at in range(begin + tl.num_programs(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(out + i, tl.load(source + i, mask=i < size, eviction_policy="evict_first"), mask=i < size)


def naive(draft: torch.Tensor, target: torch.Tensor, out: Verified) -> None:
    """`verify` with one lane a sequence: a warp takes as long as its longest sequence. A baseline; shapes as there."""
    if not routing.on_gpu(draft):
        return out.copy(*reference.verify(draft, target))
    B, G = _shape(draft, target)
    _naive_kernel[(triton.cdiv(B, LANES),)](
        draft, target, out.accepted, out.has_mismatch, out.next_tokens, draft.stride(0), target.stride(0), B, G,
        LANES=LANES, num_warps=1, **overlapped(draft),
    )  # fmt: skip
    return None


def verify(draft: torch.Tensor, target: torch.Tensor, out: Verified) -> None:
    """Accepts drafted tokens up to the first that differs from the target's, whose own token follows them.

    Takes the same time whatever is accepted.

    Args:
        draft: [B, gamma] int64, gamma at most MAX_GAMMA, last dim contiguous; -1 (no token) is never accepted.
        target: the target's tokens at these positions and one more [B, gamma + 1] int64, last dim contiguous; -1, of a
            row whose logits are broken, is handed on.
        out: of B sequences, contiguous.

    Source:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
    """
    if not routing.on_gpu(draft):
        return out.copy(*reference.verify(draft, target))
    B, G = _shape(draft, target)
    _verify_kernel[(B,)](
        draft, target, out.accepted, out.has_mismatch, out.next_tokens, draft.stride(0), target.stride(0), B, G,
        BLOCK_G=_block(G), num_warps=1, **overlapped(draft),
    )  # fmt: skip
    return None


def pack(kv: torch.Tensor, accepted: torch.Tensor, packed: Packed) -> None:
    """Copies each sequence's first `accepted` rows behind those of the sequences before it.

    Args:
        kv: [B, gamma, D], contiguous within a sequence, any dtype.
        accepted: [B] int64 in [0, gamma], contiguous.
        packed: in kv's dtype.
    """
    if not routing.on_gpu(kv):
        return packed.copy(*reference.pack(kv, accepted))
    B, D = len(kv), kv.shape[2]
    splits, block = _split(kv, packed)
    _pack_kernel[splits, B](
        kv, accepted, packed.kv, packed.offsets, kv.stride(0), B, D, BLOCK_B=_block(B), BLOCK=block,
        num_warps=WARPS, **overlapped(kv),
    )  # fmt: skip
    return None


def verify_and_pack(draft: torch.Tensor, target: torch.Tensor, kv: torch.Tensor, out: Verified, packed: Packed) -> None:
    """`verify` and `pack` in one launch, for any batch; arguments as there.

    A program reads the tokens of the sequences before its own: about 8 B gamma bytes each, twice over.
    """
    if not routing.on_gpu(draft):
        out.copy(*reference.verify(draft, target))
        return packed.copy(*reference.pack(kv, out.accepted))
    B, G = _shape(draft, target)
    splits, block = _split(kv, packed)
    block_g = _block(G)
    wide = B * G >= WIDE_TOKENS // 2 and splits * B <= sm_count(kv.device)
    tokens, warps = (WIDE_TOKENS, WIDE_WARPS) if wide else (TOKENS, WARPS)
    _verify_and_pack_kernel[splits, B](
        draft, target, out.accepted, out.has_mismatch, out.next_tokens, kv, packed.kv, packed.offsets,
        draft.stride(0), target.stride(0), kv.stride(0), B, G, kv.shape[2],
        BLOCK_G=block_g, ROWS=max(1, tokens // block_g), BLOCK=block, num_warps=warps, **overlapped(draft),
    )  # fmt: skip
    return None


def verify_and_pack_one_block(
    draft: torch.Tensor, target: torch.Tensor, kv: torch.Tensor, out: Verified, packed: Packed
) -> None:
    """`verify_and_pack` by a single program, for at most ONE_BLOCK_BATCH sequences: a baseline, bound by one SM."""
    if not routing.on_gpu(draft):
        return verify_and_pack(draft, target, kv, out, packed)
    B, G = _shape(draft, target)
    assert B <= ONE_BLOCK_BATCH, f"one block takes at most {ONE_BLOCK_BATCH} sequences, got {B}"
    _, block = _split(kv, packed)
    _one_block_kernel[(1,)](
        draft, target, out.accepted, out.has_mismatch, out.next_tokens, kv, packed.kv, packed.offsets,
        draft.stride(0), target.stride(0), kv.stride(0), B, G, kv.shape[2],
        BLOCK_B=ONE_BLOCK_BATCH, BLOCK_G=_block(G), BLOCK=block, num_warps=32, **overlapped(draft),
    )  # fmt: skip
    return None


def _shape(draft: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
    B, G = draft.shape
    assert target.shape == (B, G + 1), f"{G} drafted tokens need {G + 1} of the target, got {tuple(target.shape)}"
    assert B > 0 and G <= MAX_GAMMA, f"{B} sequences of {G} drafted tokens: at least one, at most {MAX_GAMMA}"
    assert draft.dtype == target.dtype == torch.int64 and target.stride(1) == 1 and (G < 2 or draft.stride(1) == 1)
    return B, G


@cache
def _block(n: int) -> int:
    return triton.next_power_of_2(max(n, 1))


def _split(kv: torch.Tensor, packed: Packed) -> tuple[int, int]:
    """How many programs share the copy of a sequence's rows, and how many elements each takes at once."""
    B, G, D = kv.shape
    size = G * D
    assert kv.dtype == packed.kv.dtype and packed.kv.is_contiguous() and kv.stride()[1:] == (D, 1)
    assert packed.kv.numel() >= B * size and packed.offsets.shape == (B + 1,) and size < 2**30
    return _splits(B, size, kv.element_size(), sm_count(kv.device))


@cache
def _splits(B: int, size: int, element_size: int, sms: int) -> tuple[int, int]:
    block = min(TILE_BYTES // element_size, max(256, triton.next_power_of_2(size)))
    return max(1, min(triton.cdiv(size, block), PROGRAMS_PER_SM * sms // B)), block
