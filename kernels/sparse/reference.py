"""Plain torch reference of `kernels.sparse`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

NONE = -(2**31)  # below every score
TILE = 32  # pages per tile
FORCED = 0xFFFF  # above every score
NO_NUMBER = 0xFFFE  # above every other score
MAX_REACH = 16  # keys; pages of more than one key hold at least this many


def full_pages(length: int, start: int, *, kvp: int, kvp_rank: int, append_block: int, page_size: int) -> int:
    """Returns how many pages a sequence's first `length` tokens fill on a rank."""
    cycle = append_block * kvp
    rest = length % cycle - (kvp_rank - start) % kvp * append_block
    return (length // cycle * append_block + min(max(rest, 0), append_block)) // page_size


def fold_blocks(
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    bounds: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    *,
    kvp: int,
    kvp_rank: int,
    append_block: int,
    part_bounds: torch.Tensor | None = None,
) -> None:
    """Plain torch `kernels.sparse.block_bounds.fold_blocks`."""
    grid = {"kvp": kvp, "kvp_rank": kvp_rank, "append_block": append_block, "page_size": keys.shape[2]}
    for table, start, old, new in zip(tables, starts.tolist(), before.tolist(), after.tolist(), strict=True):
        pages = table[full_pages(old, start, **grid) : full_pages(new, start, **grid)].long()
        k = keys[:, pages].float()  # [layers, n, page_size, Hkv, D]
        if scales is not None:
            k *= scales[:, pages].transpose(2, 3)[..., None]
        if len(pages) == 0:
            continue
        bounds[:, pages] = torch.stack((k.amax(2), k.amin(2)), 3).to(bounds.dtype)
        if part_bounds is not None:
            parts = k.unflatten(2, (part_bounds.shape[3], -1))  # [layers, n, parts, tokens, Hkv, D]
            both = parts.amax(3), parts.amin(3)
            part_bounds[:, pages] = torch.stack(both, 4).transpose(2, 3).to(bounds.dtype)


def ordered_fp32(scores: torch.Tensor) -> torch.Tensor:
    """Maps fp32 to int32 of the same order; NaN is the highest."""
    bits = scores.contiguous().view(torch.int32)
    return torch.where(scores.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def block_scores(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Upper-bounds q.k per page for one query: the maximum over a KV head's query heads, fp32.

    Args:
        q: [Hq, D].
        bounds: [n, Hkv, 2, D], of n pages.

    Returns:
        [Hkv, n].
    """
    heads = bounds.shape[1]
    q = q.float().view(heads, -1, q.shape[-1])  # [Hkv, group, D]
    one, two = bounds.float().permute(2, 1, 3, 0)  # each [Hkv, D, n]
    found = q.clamp(min=0) @ one + q.clamp(max=0) @ two
    return found.amax(1)  # NaN propagates


def _bounds(bounds: torch.Tensor, entries: torch.Tensor, parts: int) -> torch.Tensor:
    head = torch.arange(len(entries), device=entries.device)[:, None]
    found = bounds[entries, head] if parts == 1 else bounds[entries // parts, head, entries % parts]
    return found.transpose(0, 1)


def _best(found: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the indices [Hkv, k] of the best scores, ascending; stable: ties go to the earlier page."""
    return found.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values


def _shares(begin: int, end: int, k: int, stretch: int | None) -> list[tuple[int, int, int]]:
    """Lists the stretches of pages (from the first page on), and how many of the k each contributes."""
    k = min(k, end - begin)
    if stretch is None or begin >= end:
        return [(0, end - begin, k)]
    first, tiles = begin // TILE, -(-end // TILE) - begin // TILE
    each = -(-tiles // -(-tiles // (stretch // TILE)))
    cuts = [max((first + tile) * TILE - begin, 0) for tile in range(0, tiles, each)] + [end - begin]
    return [(a, b, b * k // (end - begin) - a * k // (end - begin)) for a, b in pairwise(cuts)]


def select_blocks(
    q: torch.Tensor,
    bounds: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    pages: torch.Tensor,
    topk: int,
    width: int,
    page_counts: torch.Tensor,
    *,
    candidates: torch.Tensor | None = None,
    stretch: int | None = None,
) -> torch.Tensor:
    """Plain torch `kernels.sparse.select_blocks.select_blocks`.

    Args:
        stretch: max pages per stretch; None: a single stretch.
    """
    N, T = len(q), len(q) // len(block_table)
    heads, parts = bounds.shape[1], bounds.shape[2] if bounds.dim() == 5 else 1
    table = torch.full((N, heads, width), -1, dtype=torch.int32, device=q.device)
    for n in range(N):
        row = block_table[n // T].expand(heads, -1)
        if parts > 1:
            row = (row[..., None] * parts + torch.arange(parts, device=row.device)).flatten(1)
        begin, end, num_pages = int(first[n]), int(last[n]), int(pages[n])
        found = ordered_fp32(block_scores(q[n], _bounds(bounds, row[:, begin:end].long(), parts)))
        selected = torch.cat(
            [at + _best(found[:, at:until], k) for at, until, k in _shares(begin, end, topk, stretch)], 1
        )
        sinks = torch.arange(begin, device=q.device).expand(heads, -1)
        local = torch.arange(end, num_pages, device=q.device).expand(heads, -1)
        read = torch.cat([sinks, begin + selected, local], 1)  # [Hkv, pages read]
        table[n, :, : read.shape[1]] = row.gather(1, read)
        page_counts += torch.tensor([read.numel(), heads], device=q.device)
        if candidates is not None:
            candidates[n] = NONE
            candidates[n, :, : selected.shape[1], 0] = found.gather(1, selected)
            candidates[n, :, : selected.shape[1], 1] = begin + selected.int()
    return table


def keep_best(
    candidates: torch.Tensor,
    first: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    kvp_rank: int,
    page_counts: torch.Tensor,
) -> None:
    """Plain torch `kernels.sparse.keep_best.keep_best`."""
    ranks, _, _, topk, _ = candidates.shape
    source = torch.arange(ranks, device=candidates.device)[:, None, None, None]
    score, page = candidates.long().unbind(-1)  # [K, N, Hkv, topk]
    block = page * ranks + (source - starts[:, None, None]) % ranks
    # Score and block in one number: ties go to the earlier block.
    value = score * (1 << 31) - block
    threshold = value.permute(1, 2, 0, 3).flatten(2).sort(descending=True).values[..., topk - 1]  # [N, Hkv]
    lost = (value[kvp_rank] < threshold[..., None]) & (score[kvp_rank] > NONE)
    n, head, i = lost.nonzero().unbind(1)
    table[n, head, first[n].long() + i] = -1
    page_counts[0] -= len(n)


@dataclass(frozen=True)
class SelectionGroup:
    """Context of a selection over the keys of all ranks that hold shards of the same sequences.

    Ties go to the first rank. The `counts` of a call are then the capacity of a rank's share: unused entries are -1;
    keys that do not fit are dropped from the end, and counted.

    Attributes:
        gather: all-gathers a tensor -> [ranks, ...].
        rank: this rank's index in the group.
        counts: [B] int32, contiguous: keys that all ranks select together.
        overflow: [1] int64, incremented by the number of dropped keys.
    """

    gather: Callable[[torch.Tensor], torch.Tensor]
    rank: int
    counts: torch.Tensor
    overflow: torch.Tensor


def ordered_fp16(scores: torch.Tensor) -> torch.Tensor:
    """Maps fp16 to 16-bit numbers of the same order, in int32; NaN is the highest."""
    bits = scores.contiguous().view(torch.int16).int()
    return torch.where(scores.isnan(), NO_NUMBER, (bits ^ ((bits >> 31) | 0x8000)) & 0xFFFF)


def select_tokens(
    scores: torch.Tensor,
    score_tables: torch.Tensor,
    block_tables: torch.Tensor,
    num_keys: torch.Tensor,
    counts: torch.Tensor,
    sinks: torch.Tensor,
    windows: torch.Tensor,
    fresh: torch.Tensor,
    table: torch.Tensor,
    tail: int,
    *,
    reach: int = 0,
    selection_group: SelectionGroup | None = None,
) -> None:
    """Plain torch `kernels.sparse.select_tokens.select_tokens`."""
    page_size, heads = scores.shape[4], table.shape[2]
    for b in range(len(num_keys)):
        n, k, first, last = (int(x[b]) for x in (num_keys, counts, sinks, windows))
        if fresh[b]:
            x = torch.ones(len(scores), heads, n, dtype=torch.int32, device=scores.device)
        else:
            pages = score_tables[b, : -(-n // page_size)].long()
            planes = scores[:, :, pages].transpose(2, 3).flatten(3)[..., :n]  # [L, planes, Hkv, n]
            planes = planes if heads > 1 else planes.flatten(1, 2).unsqueeze(2)  # all heads add up
            x = ordered_fp16(_total(planes))
        if reach and n:
            x = torch.nn.functional.pad(x, (reach, 0)).unfold(-1, reach + 1, 1).amax(-1)
        x[..., :first] = x[..., n - last : n] = FORCED
        if selection_group is not None:
            _select_jointly(
                x, block_tables[b], page_size, n, k, int(selection_group.counts[b]), table[:, b], tail, selection_group
            )
            continue
        # Stable, and backwards: ties go to the latest key.
        selected = (
            n - 1 - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values.flip(-1)
        )
        slots = _slots(block_tables[b], page_size)
        table[:, b, :, :k] = slots[selected]
        _write_tail(table[:, b], slots, n, k, tail)


def _slots(blocks: torch.Tensor, page_size: int) -> torch.Tensor:
    return (blocks[:, None] * page_size + torch.arange(page_size, device=blocks.device)).flatten()


def _write_tail(table: torch.Tensor, slots: torch.Tensor, n: int, k: int, tail: int) -> None:
    after = slots[n : n + tail]
    table[..., k : k + len(after)] = after.int()
    table[..., k + len(after) : k + tail] = 0


def _select_jointly(
    x: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
    n: int,
    room: int,
    joint_counts: int,
    table: torch.Tensor,
    tail: int,
    selection_group: SelectionGroup,
) -> None:
    """Writes this rank's share [L, heads, width] of the `joint_counts` best keys, given its scores x [L, heads, n]."""
    max_keys = len(blocks) * page_size
    local_scores = torch.nn.functional.pad(x.flip(-1), (0, max_keys - n), value=-1)  # latest first
    all_scores = selection_group.gather(local_scores.contiguous())  # [ranks, L, heads, max_keys]
    flat = all_scores.permute(1, 2, 0, 3).flatten(2)
    best = flat.sort(dim=-1, descending=True, stable=True).indices[..., :joint_counts]
    is_selected = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, best, True)
    mine = is_selected[..., selection_group.rank * max_keys :][..., :n].flip(-1)
    slots = _slots(blocks, page_size)
    table[..., :room] = -1
    for layer, head in ((i, j) for i in range(len(x)) for j in range(x.shape[1])):
        selected = slots[:n][mine[layer, head]]
        table[layer, head, : min(len(selected), room)] = selected[:room].int()
        selection_group.overflow.add_(max(0, len(selected) - room))
    _write_tail(table, slots, n, room, tail)


def _total(planes: torch.Tensor) -> torch.Tensor:
    if planes.shape[1] == 1:
        return planes[:, 0]
    total = torch.zeros_like(planes[:, 0], dtype=torch.float32)
    for plane in planes.unbind(1):
        total += plane.float()
    return total.half()
