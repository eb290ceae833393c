"""Sizes of a sparse draft's key selection: candidate local keys, keys to read, and the always-read ones among them.

Sink and candidate keys are global: a rank selects among the keys that it holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.placement import local_length

BLOCK = 128
MILLION = 1_000_000  # units of a share: kernel arguments are integers or rounded to fp32

_MILLION = tl.constexpr(MILLION)


@triton.jit
def _draft_ranges_kernel(
    positions, starts, live, num_keys, counts, sinks, num_recent, N, sink_tokens, min_keys, share, latest,
    KVP: tl.constexpr, RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    position = tl.load(positions + n, mask=inside, other=0)
    start = tl.load(starts + n, mask=inside, other=0)
    length = tl.where(tl.load(live + n, mask=inside, other=0) != 0, position + 1, 0)
    local_keys = local_length(length, start, KVP, RANK, BLOCK_TOKENS)
    sink_keys = local_length(tl.minimum(length, sink_tokens), start, KVP, RANK, BLOCK_TOKENS)
    count = tl.minimum(tl.maximum((local_keys * share + _MILLION - 1) // _MILLION, min_keys), local_keys)
    sink_keys = tl.minimum(sink_keys, count)
    tl.store(num_keys + n, local_keys.to(tl.int32), mask=inside)
    tl.store(counts + n, count.to(tl.int32), mask=inside)
    tl.store(sinks + n, sink_keys.to(tl.int32), mask=inside)
    tl.store(num_recent + n, tl.maximum(count * latest // _MILLION - sink_keys, 0).to(tl.int32), mask=inside)


def draft_ranges(
    positions: torch.Tensor,
    starts: torch.Tensor,
    live: torch.Tensor,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    sink_tokens: int,
    min_keys: int,
    share: int,
    latest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `helix.kv_placement.KVPlacement.draft_ranges`, int32 [n] each, for all sequences in one launch.

    Args:
        positions: last position that may be selected, int64 [n], contiguous.
        starts: int64 [n], contiguous.
        live: bool [n], contiguous.
    """
    out = tuple(torch.empty(len(positions), dtype=torch.int32, device=positions.device) for _ in range(4))
    assert positions.is_contiguous() and starts.is_contiguous() and live.is_contiguous()
    _draft_ranges_kernel[(triton.cdiv(len(positions), BLOCK),)](
        positions, starts, live.view(torch.uint8), *out, len(positions), sink_tokens, min_keys, share, latest,
        KVP=kvp, RANK=kvp_rank, BLOCK_TOKENS=append_block, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    num_keys, counts, sinks, num_recent = out
    return num_keys, counts, sinks, num_recent
