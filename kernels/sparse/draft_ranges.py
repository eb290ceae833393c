"""Sizes of a sparse draft's selection: candidate local keys, keys to read, and the always-read ones among them.

Sink and keys are global: a rank chooses among the keys that it holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.placement import local_length

BLOCK = 128
MILLION = 1_000_000  # units of a share: a kernel's argument is an integer or rounded to fp32

_MILLION = tl.constexpr(MILLION)


@triton.jit
def _draft_ranges_kernel(
    positions, starts, live, known, counts, sinks, recent, N, sink_tokens, least, share, latest,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    position = tl.load(positions + n, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    length = tl.where(tl.load(live + n, mask=inside, other=0) != 0, position + 1, 0)
    own = local_length(length, start, KVP, RANK, BLOCK_TOKENS)
    of_sink = local_length(tl.minimum(length, sink_tokens), start, KVP, RANK, BLOCK_TOKENS)
    count = tl.minimum(tl.maximum((own * share + _MILLION - 1) // _MILLION, least), own)
    of_sink = tl.minimum(of_sink, count)
    tl.store(known + n, own.to(tl.int32), mask=inside)
    tl.store(counts + n, count.to(tl.int32), mask=inside)
    tl.store(sinks + n, of_sink.to(tl.int32), mask=inside)
    tl.store(recent + n, tl.maximum(count * latest // _MILLION - of_sink, 0).to(tl.int32), mask=inside)


def draft_ranges(
    positions: torch.Tensor,
    starts: torch.Tensor,
    live: torch.Tensor,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    sink_tokens: int,
    least: int,
    share: int,
    latest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `helix.placement.Placement.draft_ranges` for all sequences, in one launch.

    Args:
        positions: position of the last token that may be chosen, int64 [n], contiguous.
        starts: int64 [n], contiguous.
        live: bool [n], contiguous.

    Returns:
        known, counts, sinks, recent: int32 [n].
    """
    out = tuple(torch.empty(len(positions), dtype=torch.int32, device=positions.device) for _ in range(4))
    assert positions.is_contiguous() and starts.is_contiguous() and live.is_contiguous()
    _draft_ranges_kernel[(triton.cdiv(len(positions), BLOCK),)](
        positions, starts, live.view(torch.uint8), *out, len(positions), sink_tokens, least, share, latest,
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    known, counts, sinks, recent = out
    return known, counts, sinks, recent
