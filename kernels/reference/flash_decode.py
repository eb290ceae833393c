"""flash_decode in plain torch."""

from __future__ import annotations

import math

import torch

from kernels.paged_keys import KeyScores, PagedKeys
from kernels.reference.paged import attend


def flash_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scores: KeyScores | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends a few queries per sequence to paged keys; shapes as in `kernels.attention.flash_decode`."""
    keys = keys.unpacked()
    of_rows, of_lse = attend(q, keys, keys.table, keys.lo, keys.hi)
    out = of_rows.to(q.dtype) if out is None else out.copy_(of_rows)
    lse = of_lse if lse is None else lse.copy_(of_lse)
    if scores is not None:
        for b in range(len(q)):
            _collect(q[b], keys, b, scores)
    return out, lse


def _collect(q: torch.Tensor, keys: PagedKeys, b: int, scores: KeyScores) -> None:
    """Stores one sequence's key scores over the heads of each KV head and the queries that count."""
    lo, hi = keys.lo[b], keys.hi[b]
    reads = lo < hi  # queries before a rank's first key read none, and so do unused drafts behind the last
    if not reads.any():
        return
    at = torch.arange(int(lo[reads].min()), int(hi[reads].max()), device=q.device)
    page, slot = at // keys.page_size, at % keys.page_size
    heads = keys.k.shape[2]
    of_keys = keys.k[keys.table[b, page].long(), slot].float()  # [n, Hkv, D]
    rows = q.float().masked_fill(~reads[:, None, None], 0).view(len(q), heads, -1, q.shape[-1])  # [T, Hkv, group, D]
    share = keys.scale * math.log2(math.e) / (len(q) * rows.shape[2])
    if scores.rows == "any":
        each = torch.einsum("thgd,nhd->nhtg", rows, of_keys)
        each = each.masked_fill(~reads[:, None], -torch.inf).flatten(2)  # [n, Hkv, T * group]
        tile = 1 << (-(-each.shape[2] // len(scores.planes)) - 1).bit_length()  # rows of a tile of the kernel
        by_key = torch.stack([part.amax(2) for part in each.split(tile, 2)])
        by_key = by_key.masked_fill(by_key == -torch.inf, 0)  # tiles in which no row counts
    else:
        first, last = reads.nonzero()[[0, -1], 0]
        query = torch.arange(len(q), device=q.device)
        counts = (query == first) | (query == last)
        of_queries = (rows.sum(2) * counts[:, None, None]).sum(0, keepdim=True)  # [1, Hkv, D]
        by_key = torch.einsum("phd,nhd->pnh", of_queries, of_keys)
    scores.planes[:, scores.table[b, page].long(), :, slot] = 0
    for plane, mine in zip(scores.planes, by_key * share, strict=False):  # each [pages, Hkv, page_size] and [n, Hkv]
        plane[scores.table[b, page].long(), :, slot] = mine.to(plane.dtype)
