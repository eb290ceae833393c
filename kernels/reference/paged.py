"""Blocked attention over paged keys, shared by the references of flash_decode and flash_prefill."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import unpacked_latents

# Scores held at once (8 MiB of fp32): large enough for the matmuls, small enough to stay near the cache.
SCORES = 1 << 21


def attend(
    q: torch.Tensor,
    keys: PagedKeys,
    pages: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends one sequence's queries to its keys, with an online softmax over blocks of keys in fp32.

    Args:
        q: [T, Hq, D], any float dtype.
        keys: keys of all sequences, any float dtype.
        pages: [max_pages] int, this sequence's row of the table, or [Hkv, max_pages], per KV head; negative: no page.
        lo: [T] int, first key of each query.
        hi: [T] int, one past the last key of each query.

    Returns:
        Output [T, Hq, D] fp32 and natural-log LSE [T, Hq] fp32; 0 and -inf (with sinks: the sink) where a query reads
        no key.
    """
    T, Hq, D = q.shape
    page_size, Hkv = keys.k.shape[1:3]
    group = Hq // Hkv
    rows = (q.float() * keys.scale).view(T, Hkv, group, D).transpose(0, 1).reshape(Hkv, T * group, D)
    lo, hi = (bound.repeat_interleave(group)[:, None] for bound in (lo, hi))  # [T * group, 1]
    out = rows.new_zeros(rows.shape)
    total = rows.new_zeros(Hkv, T * group, 1)
    # A finite floor: -inf minus -inf would be NaN for a row that has read no key yet.
    peak = rows.new_full(total.shape, torch.finfo(torch.float32).min)

    reads = lo < hi
    start, stop = (int(lo[reads].min()), int(hi[reads].max())) if reads.any() else (0, 0)
    block = max(64, SCORES // max(1, T * Hq))
    for begin in range(start, stop, block):
        at = torch.arange(begin, min(begin + block, stop), device=q.device)
        page = pages[..., at // page_size]
        k, v = (_lookup(cache, page, at % page_size) for cache in (keys.k, keys.v))  # [Hkv, keys, D]
        scores = rows @ k.mT  # [Hkv, T * group, keys]
        if page.dim() == 2:
            scores.masked_fill_(page[:, None] < 0, -torch.inf)
        if (lo > at[0]).any() or (hi <= at[-1]).any():
            scores.masked_fill_((at < lo) | (at >= hi), -torch.inf)
        last, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
        rescale = (last - peak).exp_()
        weights = scores.sub_(peak).exp_()
        total = total * rescale + weights.sum(-1, keepdim=True)
        out = torch.baddbmm(out.mul_(rescale), weights, v)

    out /= total.masked_fill(total == 0, 1)
    lse = peak + total.log()  # log 0 = -inf
    out = out.view(Hkv, T, group, D).transpose(0, 1).reshape(T, Hq, D)
    lse = lse.view(Hkv, T, group).transpose(0, 1).reshape(T, Hq)
    if keys.sinks is None:
        return out, lse
    both = torch.logaddexp(lse, keys.sinks)
    return out * (lse - both).exp()[..., None], both


def _lookup(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Reads slots [n] of pages [n], or of each head's pages [Hkv, n], as [Hkv, n, D] fp32; 0 for negative pages."""
    if page.dim() == 1:
        return cache[page, slot].float().transpose(0, 1)
    heads = torch.arange(len(page), device=page.device)[:, None]
    found = cache[page.clamp(min=0), slot, heads].float()
    return found.masked_fill_(page[..., None] < 0, 0)


def whole(latents: PagedKeys) -> PagedKeys:
    """Returns latents as one KV head whose values are whole entries; the caller cuts the output."""
    entries = latents.k
    if latents.k_scale is not None and latents.rope is not None:
        scales, page = latents.k_scale, latents.page_size
        if scales.shape[2] != page:  # slot i of all pages in a row
            scales = scales.mT.flatten(0, 1).unflatten(0, (-1, page)).mT
        entries = torch.cat((unpacked_latents(entries, scales), latents.rope.float()), -1)
    slots = entries.unsqueeze(2)
    return replace(latents, k=slots, v=slots, k_scale=None)
