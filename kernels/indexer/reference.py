"""Plain torch reference of `kernels.indexer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.dense.reference import rotate
from kernels.scaled_keys import quantize_fp8

MIN_KEY = -(1 << 63)  # below every key


@dataclass(frozen=True)
class Shard:
    """Tokens of a sequence on this rank, and the ranks that have the others.

    Attributes:
        kvp, kvp_rank, append_block: the round-robin blocks, see `helix.layout`.
        page_size: tokens per page of the block tables.
        gather: all-gathers a tensor -> [kvp, ...]; None if `kvp` is 1.
    """

    kvp: int
    kvp_rank: int
    append_block: int
    page_size: int
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None


def ordered(scores: torch.Tensor) -> torch.Tensor:
    """Maps fp32 to int64 in [0, 2^32) of the same order; -0 equals 0, and NaN is the highest."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32).long()
    codes = torch.where(bits < 0, ~bits, bits + (1 << 31)) & 0xFFFFFFFF
    return torch.where(scores.isnan(), 0xFFFFFFFF, codes)


def index_topk(
    scores: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    hi: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor | None,
    topk: int,
    max_length: int,
    shard: Shard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.indexer.select_topk.index_topk`."""
    N, S = scores.shape
    block, cycle = shard.append_block, shard.append_block * shard.kvp
    local = torch.arange(S, device=scores.device)
    cycle_index = (shard.kvp_rank - starts + shard.kvp) % shard.kvp
    at = local // block * cycle + cycle_index[:, None] * block + local % block  # [N, S], global
    keys = (ordered(scores) - (1 << 31) << 32) | (0xFFFFFFFF - at)
    keys = torch.where(local < hi[:, None], keys, MIN_KEY)
    all_keys = keys[None] if shard.gather is None else shard.gather(keys)  # [kvp, N, S]
    all_keys = all_keys.transpose(0, 1).flatten(1)
    k = min(topk, all_keys.shape[1])
    bound = all_keys.topk(k, -1).values[:, -1:]
    mine = (keys >= bound) & (local < hi[:, None])
    width = min(topk, S)
    table = torch.zeros(N, width, dtype=torch.int32, device=scores.device)
    for n in range(N):
        selected = local[mine[n]]
        pages = tables[n // (N // len(tables)) if rows is None else rows[n]]
        table[n, : len(selected)] = pages[selected // shard.page_size] * shard.page_size + selected % shard.page_size
    return table, mine.sum(1, dtype=torch.int32)


def index_append(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
    digit_counts: torch.Tensor | None = None,
) -> None:
    """Plain torch `kernels.indexer.append.index_append`."""
    if digit_counts is not None:
        digit_counts.zero_()
    rope = 2 * cos.shape[1]
    normed = F.layer_norm(k.float(), norm_weight.shape, norm_weight.float(), bias.float(), eps)
    keys = torch.cat((rotate(normed[:, None, :rope], cos, sin)[:, 0], normed[:, rope:]), -1)
    mine = slot_mapping >= 0
    at = slot_mapping[mine] // cache.shape[1], slot_mapping[mine] % cache.shape[1]
    if scales is None:
        cache[at] = keys[mine].to(cache.dtype)
    else:
        cache[at], scales[at] = quantize_fp8(keys[mine])
    q[..., :rope] = rotate(q[..., :rope], cos, sin)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    hi: torch.Tensor,
    cu_q: torch.Tensor | None,
    max_q: int,
    scores: torch.Tensor,
    scales: torch.Tensor | None = None,
    digit_counts: torch.Tensor | None = None,
) -> None:
    """Plain torch `kernels.indexer.scores.index_scores`; sums are the same on every grid."""
    page_size = cache.shape[1]
    begins = torch.arange(0, len(q) + 1, max_q).tolist() if cu_q is None else cu_q.tolist()
    for pages, begin, end in zip(tables, begins, begins[1:], strict=False):
        for n in range(begin, end):
            at = torch.arange(int(hi[n]), device=q.device)
            slot_mapping = pages[at // page_size].long(), at % page_size
            keys = cache[slot_mapping].to(q.dtype).double()  # [keys, D]
            if scales is not None:
                keys *= scales[slot_mapping][:, None]
            products = (keys @ q[n].double().T).relu()
            scores[n, : len(at)] = (products @ weights[n].double()).float()
            if digit_counts is not None:
                digit_counts[0, n] += (ordered(scores[n, : len(at)]) >> 24).bincount(minlength=256)
