"""Copies the tokens that queries selected from a layer's pages in host memory to the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.offload.reference import fetch_tokens as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

PIECE = 4096  # words that a program copies at a time: 16 KB in flight
PROGRAMS = 24  # over all rows: enough to saturate the link; the layer that runs meanwhile has the other SMs


@triton.jit
def _fetch_tokens_kernel(
    source, target, slots, counts, source_page, source_token, source_word, width,
    WORDS: tl.constexpr, PAGE: tl.constexpr, LAST: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    start_successor(PDL)
    n = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + n)
    e = tl.arange(0, BLOCK)
    word = e % WORDS
    begin = tl.maximum(count - LAST, 0) + tl.program_id(0) * TOKENS
    for first in range(begin, count, tl.num_programs(0) * TOKENS):
        column = first + e // WORDS
        inside = (e < TOKENS * WORDS) & (column < count)
        slot = tl.load(slots + n * width + column, mask=inside, other=0)
        at = (slot // PAGE).to(tl.int64) * source_page + (slot % PAGE) * source_token + word * source_word
        # Bypass L1, which may hold stale host memory from an earlier kernel.
        words = tl.load(source + at, mask=inside, other=0, cache_modifier=".cg")
        tl.store(target + (n * width + column) * WORDS + word, words, mask=inside)


def fetch_tokens(
    source: torch.Tensor, target: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, last: int | None = None
) -> None:
    """Copies tokens `slots[n, :counts[n]]` to `target[n]`.

    Args:
        source: [pages, page_size, words] int32, any strides; may be pinned, mapped host memory
            (`helix.worker.host_store`): then loads go over PCIe.
        target: [N, width, words] int32 on the GPU, contiguous.
        slots: [N, width] int32, contiguous: cache slots `page * page_size + i`; not read beyond `counts`.
        counts: [N] int32, contiguous.
        last: copies only so many of the last tokens of each row; None: all.
    """
    if not dispatch.on_gpu(target):
        reference(source, target, slots, counts, last)
        return
    (N, width), (_, page_size, words) = slots.shape, source.shape
    assert slots.is_contiguous() and counts.is_contiguous()
    assert target.is_contiguous() and target.shape == (N, width, words)
    last = width if last is None else last
    tokens = min(max(1, PIECE // words), last)
    _fetch_tokens_kernel[min(triton.cdiv(last, tokens), triton.cdiv(PROGRAMS, N)), N](
        source, target, slots, counts, *source.stride(), width, WORDS=words, PAGE=page_size, LAST=last,
        TOKENS=tokens, BLOCK=triton.next_power_of_2(tokens * words), num_warps=8, **pdl_options(target),
    )  # fmt: skip
