"""Block transfer between host and GPU memory, by lists on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.offload.reference import copy_blocks as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.resident_blocks import BlockList

PIECE = 8192  # max words of a block that a program copies at once: 32 KB in flight
LINE = 32  # words, 128 bytes
PROGRAMS = 16  # PCIe at 50 GB/s needs about 200 KB in flight


@triton.jit
def fence_system(FENCE: tl.constexpr):
    """Orders this thread's writes for the whole system, including host and other GPUs."""
    if FENCE:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _copy_blocks_kernel(
    copied_from, copied_to, listed_from, listed_to, block_counts, max_blocks, from_layer, to_layer,
    LISTS: tl.constexpr, BLOCK_L: tl.constexpr, WORDS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    pieces: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    lane = tl.arange(0, BLOCK_L)
    counts = tl.load(block_counts + lane, mask=lane < LISTS, other=0)
    ends = tl.cumsum(counts, 0)
    copied_from += tl.program_id(1).to(tl.int64) * from_layer
    copied_to += tl.program_id(1).to(tl.int64) * to_layer
    w = tl.arange(0, BLOCK)
    for at in range(tl.program_id(0), tl.max(ends, 0) * pieces, tl.num_programs(0)):
        block = at // pieces
        one = tl.sum((ends <= block).to(tl.int32), 0)
        entry = one * max_blocks + block - tl.sum(tl.where(lane < one, counts, 0), 0)
        word = at % pieces * PIECE + w
        inside = word < WORDS
        if PIECE < BLOCK:
            inside = inside & (w < PIECE)
        source = tl.load(listed_from + entry).to(tl.int64) * WORDS + word
        target = tl.load(listed_to + entry).to(tl.int64) * WORDS + word
        # Bypass L1, which may hold stale host memory from an earlier kernel.
        words = tl.load(copied_from + source, mask=inside, other=0, cache_modifier=".cg")
        tl.store(copied_to + target, words, mask=inside)
    if PDL:
        fence_system(PDL)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, blocks: BlockList, programs: int = PROGRAMS) -> None:
    """Copies the listed blocks, in all layers.

    Either tensor may be pinned, mapped host memory (`helix.worker.host_store`): loads and stores go over PCIe.

    Args:
        source, target: [layers, blocks, ...] of one dtype, each layer contiguous, blocks of a multiple of 16 bytes.
        blocks: on the GPU; no target occurs twice.
        programs: programs per layer, eight warps each.
    """
    if not dispatch.on_gpu(blocks.source):
        reference(source, target, blocks)
        return
    layers, lists = len(source), len(blocks.counts)
    from_words, to_words = (t.view(*t.shape[:2], -1).view(torch.int32) for t in (source, target))
    words = from_words.shape[2]
    assert blocks.source.stride() == blocks.target.stride() == (blocks.source.stride(0), 1)
    assert from_words.stride()[1:] == to_words.stride()[1:] == (words, 1) and words % 4 == 0
    _copy_blocks_kernel[programs, layers](
        from_words, to_words, blocks.source, blocks.target, blocks.counts, blocks.source.stride(0),
        from_words.stride(0), to_words.stride(0), LISTS=lists, BLOCK_L=triton.next_power_of_2(lists),
        **piece_shape(words), num_warps=8, **pdl_options(blocks.source),
    )  # fmt: skip


def piece_shape(words: int) -> dict[str, int]:
    """Returns the compile-time arguments for blocks of `words` words: equal pieces, for equal work."""
    each = triton.cdiv(triton.cdiv(words, triton.cdiv(words, PIECE)), LINE) * LINE
    return dict(WORDS=words, PIECE=each, BLOCK=triton.next_power_of_2(each))
