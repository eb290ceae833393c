"""Plain torch reference of `kernels.attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

import torch

from kernels.dense.reference import rms_norm, rotate
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.scaled_keys import store

# Scores held at once (8 MiB of fp32): large enough for the matmuls, small enough for the cache.
SCORES = 1 << 21
QUERIES = 256  # per block: keeps scores small and matmuls large


def attend(
    q: torch.Tensor,
    keys: PagedKeys,
    pages: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends queries of B sequences to their keys, with an online softmax over blocks of keys in fp32.

    Args:
        q: [B, T, Hq, D], any float dtype.
        keys: any float dtype.
        pages: [B, max_pages] int, or [B, Hkv, max_pages], per KV head; negative: no page.
        lo: [B, T] int, first key of each query.
        hi: [B, T] int, one past the last key of each query.

    Returns:
        Output [B, T, Hq, D] fp32 and natural-log LSE [B, T, Hq] fp32; 0 and -inf (with sinks: the sink) where a query
        reads no key.
    """
    out = q.new_zeros(q.shape, dtype=torch.float32)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    live = (lo < hi).any(1)  # skip the others: their page entries may be invalid
    if live.all():
        out, lse = _attend(q, keys, pages, lo, hi)
    elif live.any():
        out[live], lse[live] = _attend(q[live], keys, pages[live], lo[live], hi[live])
    if keys.sinks is None:
        return out, lse
    both = torch.logaddexp(lse, keys.sinks)
    return out * (lse - both).exp()[..., None], both


def _attend(
    q: torch.Tensor, keys: PagedKeys, pages: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` without sinks, for sequences that all read at least one key."""
    B, T, Hq, D = q.shape
    page_size, Hkv = keys.k.shape[1:3]
    group = Hq // Hkv
    rows = (q.float() * keys.scale).view(B, T, Hkv, group, D).transpose(1, 2).reshape(B, Hkv, T * group, D)
    reads = lo < hi
    first = lo.masked_fill(~reads, torch.iinfo(lo.dtype).max).amin(1, keepdim=True)  # per sequence [B, 1]
    last = hi.masked_fill(~reads, 0).amax(1, keepdim=True) - 1
    lo, hi = (bound.repeat_interleave(group, 1)[:, None, :, None] for bound in (lo, hi))  # [B, 1, T * group, 1]
    out = torch.zeros_like(rows)
    total = rows.new_zeros(B, Hkv, T * group, 1)
    # Finite: -inf minus -inf would be NaN for a row that has read no key yet.
    peak = torch.full_like(total, torch.finfo(torch.float32).min)

    stop = int(last.max()) + 1
    block = max(64, SCORES // max(1, B * T * Hq))
    for begin in range(int(first.min()), stop, block):
        at = torch.arange(begin, min(begin + block, stop), device=q.device)
        key_index = torch.minimum(torch.maximum(at, first), last)  # [B, n]; past its keys a sequence repeats the last
        column, slot = key_index // page_size, key_index % page_size
        page = pages.gather(-1, column if pages.dim() == 2 else column[:, None].expand(-1, Hkv, -1))
        # Per sequence, as views: one batched product would copy long sequences again.
        indices = [*zip(page, slot, strict=True)]
        scores = torch.stack([own @ _lookup(keys.k, *index).mT for own, index in zip(rows, indices, strict=True)])
        if pages.dim() == 3:
            scores.masked_fill_(page[:, :, None] < 0, -torch.inf)  # [B, Hkv, T * group, n]
        if (lo > at[0]).any() or (hi <= at[-1]).any():
            scores.masked_fill_((at < lo) | (at >= hi), -torch.inf)
        before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
        rescale = (before - peak).exp_()
        weights = scores.sub_(peak).exp_()
        total = total * rescale + weights.sum(-1, keepdim=True)
        found = [own @ _lookup(keys.v, *index) for own, index in zip(weights, indices, strict=True)]
        out = out.mul_(rescale).add_(torch.stack(found))

    out /= total.masked_fill(total == 0, 1)
    lse = peak + total.log()  # log 0 = -inf
    return (
        out.view(B, Hkv, T, group, D).transpose(1, 2).reshape(B, T, Hq, D),
        lse.view(B, Hkv, T, group).transpose(1, 2).reshape(B, T, Hq),
    )


def _lookup(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Reads slots [n] of pages [n], or of each head's pages [Hkv, n], as [Hkv, n, D] fp32; 0 for negative pages."""
    if page.dim() == 1:
        return cache[page, slot].float().transpose(0, 1)
    heads = torch.arange(len(page), device=page.device)[:, None]
    found = cache[page.clamp(min=0), slot, heads].float()
    return found.masked_fill_(page[..., None] < 0, 0)


def flash_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scores: KeyScores | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.attention.flash_decode.flash_decode`."""
    keys = keys.dequantize()
    rows_out, rows_lse = attend(q, keys, keys.table, keys.lo, keys.hi)
    out = rows_out.to(q.dtype) if out is None else out.copy_(rows_out)
    lse = rows_lse if lse is None else lse.copy_(rows_lse)
    if scores is not None:
        for b in range(len(q)):
            _collect(q[b], keys, b, scores)
    return out, lse


def _collect(q: torch.Tensor, keys: PagedKeys, b: int, scores: KeyScores) -> None:
    lo, hi = keys.lo[b], keys.hi[b]
    reads = lo < hi  # false before a rank's first key, and for unused drafts after the last
    if not reads.any():
        return
    at = torch.arange(int(lo[reads].min()), int(hi[reads].max()), device=q.device)
    page, slot = at // keys.page_size, at % keys.page_size
    heads = keys.k.shape[2]
    key_index = keys.k[keys.table[b, page].long(), slot].float()  # [n, Hkv, D]
    rows = q.float().masked_fill(~reads[:, None, None], 0).view(len(q), heads, -1, q.shape[-1])  # [T, Hkv, group, D]
    share = keys.scale * math.log2(math.e) / (len(q) * rows.shape[2])
    if scores.rows == "any":
        each = torch.einsum("thgd,nhd->nhtg", rows, key_index)
        each = each.masked_fill(~reads[:, None], -torch.inf).flatten(2)  # [n, Hkv, T * group]
        tile = 1 << (-(-each.shape[2] // len(scores.planes)) - 1).bit_length()  # rows per tile of the kernel
        by_key = torch.stack([part.amax(2) for part in each.split(tile, 2)])
        by_key = by_key.masked_fill(by_key == -torch.inf, 0)  # tiles in which no row counts
    else:
        first, last = reads.nonzero()[[0, -1], 0]
        query = torch.arange(len(q), device=q.device)
        counts = (query == first) | (query == last)
        query_sums = (rows.sum(2) * counts[:, None, None]).sum(0, keepdim=True)  # [1, Hkv, D]
        by_key = torch.einsum("phd,nhd->pnh", query_sums, key_index)
    scores.planes[:, scores.table[b, page].long(), :, slot] = 0
    for plane, mine in zip(scores.planes, by_key * share, strict=False):  # each [pages, Hkv, page_size] and [n, Hkv]
        plane[scores.table[b, page].long(), :, slot] = mine.to(plane.dtype)


def flash_prefill(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.attention.flash_prefill.flash_prefill`."""
    keys = keys.dequantize()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse
    if len(q) == len(keys.table) and max_q == 1:  # separate pages per query, such as selected tokens
        page_out, page_lse = attend(q[:, None], keys, keys.table, keys.lo[:, None], keys.hi[:, None])
        return out.copy_(page_out[:, 0]), lse.copy_(page_lse[:, 0])
    for i, (first, last) in enumerate(pairwise(cu_q.tolist())):
        for begin in range(first, last, QUERIES):
            part = slice(begin, min(begin + QUERIES, last))
            part_result = attend(q[None, part], keys, keys.table[i : i + 1], keys.lo[None, part], keys.hi[None, part])
            out[part], lse[part] = part_result[0][0], part_result[1][0]
    return out, lse


def kv_append(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch `kernels.attention.kv_append.kv_append`."""
    page_size, kv_heads = k_cache.shape[1:3]
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q_norm, k_norm, eps = norms
        if means is None:
            q, k = rms_norm(q, q_norm, eps)[0], rms_norm(k, k_norm, eps)[0]
        else:
            q_scale, k_scale = torch.rsqrt(means + eps)[:, :, None, None].unbind(1)
            q, k = (q.float() * q_scale).to(q.dtype) * q_norm, (k.float() * k_scale).to(k.dtype) * k_norm
    mine = slot_mapping >= 0
    where = slot_mapping[mine] // page_size, slot_mapping[mine] % page_size
    for x, cache, scale in zip((rotate(k, cos, sin)[mine], v[mine]), (k_cache, v_cache), scales, strict=True):
        if scale is None:
            cache[where] = x
        else:
            store(x, cache, scale, slot_mapping[mine])
    return rotate(q, cos, sin)


def head_squares(qkv: torch.Tensor, kv_heads: int, shares: tuple[float, float]) -> torch.Tensor:
    """Plain torch `kernels.attention.head_squares.head_squares`."""
    parts = qkv.float().split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)[:2]
    return torch.stack([part.square().sum((1, 2)) * share for part, share in zip(parts, shares, strict=True)], 1)


def merge_states(
    partials: torch.Tensor,
    lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.attention.merge_states.merge_states`."""
    out = torch.empty(partials.shape[1:], dtype=partials.dtype, device=partials.device) if out is None else out
    out_lse = torch.empty(lse.shape[1:], dtype=torch.float32, device=lse.device) if out_lse is None else out_lse
    empty = lse == -torch.inf
    peak = lse.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weights = (lse - peak).exp()
    total = torch.zeros_like(peak)
    merged = torch.zeros(partials.shape[1:], dtype=torch.float32, device=partials.device)
    for source, weight, skip in zip(partials, weights, empty, strict=True):
        total += weight
        # Skip, not multiply by zero: the partial of an empty source may be NaN.
        merged += (source.float() * weight[..., None]).masked_fill_(skip[..., None], 0)
    out.copy_(merged / total.masked_fill(total == 0, 1)[..., None])
    out_lse.copy_(peak + total.log())  # log 0 = -inf
    return out, out_lse


def merge_prefixes(
    out: torch.Tensor, lse: torch.Tensor, prefix_out: torch.Tensor, prefix_lse: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.attention.merge_prefixes`, for merged states.

    Args:
        out, lse: [N, Hq, D] and [N, Hq].
        prefix_out, prefix_lse: [count * tiles, each, Hq, D] and [count * tiles, each, Hq].
    """
    of_prefixes = (x.unflatten(0, (count, -1)).flatten(1, 2)[:, : len(out)] for x in (prefix_out, prefix_lse))
    outs, logs = (torch.cat((x[None], more)) for x, more in zip((out, lse), of_prefixes, strict=True))
    return merge_states(outs, logs)


def merge_states_pack(
    out: torch.Tensor, lse: torch.Tensor, send_out: torch.Tensor, send_lse: torch.Tensor, shares: Sequence[int]
) -> None:
    """Plain torch `kernels.attention.merge_states_pack`, for merged states.

    Args:
        out, lse: [N, sum(shares), D] and [N, sum(shares)].
    """
    lanes = send_out.shape[2]
    k = head = 0
    for h, same in groupby(shares):  # balanced shares have at most two sizes: at most two rounds of copies
        n = len(list(same))
        run = slice(head, head + n * h)
        send_out[k : k + n, :, :h] = out[:, run].unflatten(1, (n, h)).transpose(0, 1)  # [N, n*h, D] -> [n, N, h, D]
        send_lse[k : k + n, :, :h] = lse[:, run].unflatten(1, (n, h)).transpose(0, 1)
        if h < lanes:  # padding reads as an empty shard
            send_out[k : k + n, :, h:] = 0
            send_lse[k : k + n, :, h:] = -torch.inf
        k, head = k + n, run.stop
