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
    """Attends queries of B sequences to their keys, with an online softmax over blocks of keys in fp32.

    Args:
        q: [B, T, Hq, D], any float dtype.
        keys: keys of all sequences, any float dtype.
        pages: [B, max_pages] int, or [B, Hkv, max_pages], per KV head; negative: no page.
        lo: [B, T] int, first key of each query.
        hi: [B, T] int, one past the last key of each query.

    Returns:
        Output [B, T, Hq, D] fp32 and natural-log LSE [B, T, Hq] fp32; 0 and -inf (with sinks: the sink) where a query
        reads no key.
    """
    out = q.new_zeros(q.shape, dtype=torch.float32)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    live = (lo < hi).any(1)  # nothing is looked up for the others, whose pages may be no pages
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
    """Attends as `attend` does, without sinks, queries of sequences that all read some key."""
    B, T, Hq, D = q.shape
    page_size, Hkv = keys.k.shape[1:3]
    group = Hq // Hkv
    rows = (q.float() * keys.scale).view(B, T, Hkv, group, D).transpose(1, 2).reshape(B, Hkv, T * group, D)
    reads = lo < hi
    first = lo.masked_fill(~reads, torch.iinfo(lo.dtype).max).amin(1, keepdim=True)  # of a sequence [B, 1]
    last = hi.masked_fill(~reads, 0).amax(1, keepdim=True) - 1
    lo, hi = (bound.repeat_interleave(group, 1)[:, None, :, None] for bound in (lo, hi))  # [B, 1, T * group, 1]
    out = torch.zeros_like(rows)
    total = rows.new_zeros(B, Hkv, T * group, 1)
    # A finite floor: -inf minus -inf would be NaN for a row that has read no key yet.
    peak = torch.full_like(total, torch.finfo(torch.float32).min)

    stop = int(last.max()) + 1
    block = max(64, SCORES // max(1, B * T * Hq))
    for begin in range(int(first.min()), stop, block):
        at = torch.arange(begin, min(begin + block, stop), device=q.device)
        of_keys = torch.minimum(torch.maximum(at, first), last)  # [B, n]: instead of no key a sequence repeats one
        column, slot = of_keys // page_size, of_keys % page_size
        page = pages.gather(-1, column if pages.dim() == 2 else column[:, None].expand(-1, Hkv, -1))
        # Sequence by sequence, as views of what was read: long ones are not copied again for one product of all.
        places = [*zip(page, slot, strict=True)]
        scores = torch.stack([own @ _lookup(keys.k, *place).mT for own, place in zip(rows, places, strict=True)])
        if pages.dim() == 3:
            scores.masked_fill_(page[:, :, None] < 0, -torch.inf)  # [B, Hkv, T * group, n]
        if (lo > at[0]).any() or (hi <= at[-1]).any():
            scores.masked_fill_((at < lo) | (at >= hi), -torch.inf)
        before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
        rescale = (before - peak).exp_()
        weights = scores.sub_(peak).exp_()
        total = total * rescale + weights.sum(-1, keepdim=True)
        found = [own @ _lookup(keys.v, *place) for own, place in zip(weights, places, strict=True)]
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
