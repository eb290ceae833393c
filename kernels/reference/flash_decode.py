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
    """Attention of a few queries per sequence over paged keys; shapes as in `kernels.attention.flash_decode`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    for b in range(q.shape[0]):
        row_out, row_lse = attend(q[b], keys, keys.table[b], keys.lo[b], keys.hi[b])
        out[b].copy_(row_out)
        lse[b].copy_(row_lse)
        if scores is not None:
            _collect(q[b], keys, b, scores)
    return out, lse


def _collect(q: torch.Tensor, keys: PagedKeys, b: int, scores: KeyScores) -> None:
    """Leaves one sequence's scores: the mean over the heads of each KV head, and over the queries that count."""
    lo, hi = keys.lo[b], keys.hi[b]
    live = int((lo < hi).sum())
    if live == 0:
        return
    at = torch.arange(int(lo[:live].min()), int(hi[:live].max()), device=q.device)
    page, slot = at // keys.page_size, at % keys.page_size
    heads = keys.k.shape[2]
    of_heads = q.float().view(len(q), heads, -1, q.shape[-1]).mean(2) * keys.scale * math.log2(math.e)  # [T, Hkv, D]
    counts = torch.ones(live) if scores.rows != "ends" else torch.eye(live)[[0, -1]].amax(0)
    counts = counts.to(q.device)[:, None, None] / len(q)
    found = of_heads[:live] * counts
    found = found if scores.rows == "each" else found.sum(0, keepdim=True)  # [planes, Hkv, D]
    of_keys = keys.k[keys.table[b, page].long(), slot].float()  # [n, Hkv, D]
    by_key = torch.einsum("phd,nhd->pnh", found, of_keys)
    if scores.rows == "any":
        rows = q[:live].float().view(live, heads, -1, q.shape[-1])
        each = torch.einsum("thgd,nhd->nhtg", rows, of_keys).flatten(2)
        whole = len(q) * rows.shape[2]
        tile = 1 << (-(-whole // len(scores.planes)) - 1).bit_length()  # rows that the kernel takes at once
        best = torch.stack([part.amax(2) for part in each.split(tile, 2)])
        by_key = best * keys.scale * math.log2(math.e) / whole
    scores.planes[:, scores.table[b, page].long(), :, slot] = 0
    for plane, mine in zip(scores.planes, by_key, strict=False):  # each [pages, Hkv, page_size] and [n, Hkv]
        plane[scores.table[b, page].long(), :, slot] = mine.to(plane.dtype)
