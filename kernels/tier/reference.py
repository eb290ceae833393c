"""The ops of `kernels.tier` in plain torch."""

from __future__ import annotations

import torch

from kernels.hot_blocks import NOWHERE, BlockList, FetchList, HotBlocks, Readers
from kernels.sparse.reference import full_pages


def resolve(
    table: torch.Tensor,
    readers: Readers,
    hot: HotBlocks,
    misses: FetchList,
    *,
    parts: int = 1,
    apart: int = 1,
    **grid: int,
) -> None:
    """Replaces pages by the places of their blocks; arguments as in `kernels.tier.resolve.resolve`."""
    hi, pages, positions, starts, queries, first_row = readers
    ring_pages = hot.ring_pages
    N, heads, _ = table.shape
    columns, held = (-(-hi // (grid["page_size"] // parts))).tolist(), pages.tolist()
    full = [full_pages(*x, **grid) for x in zip(positions[::queries].tolist(), starts[::queries].tolist(), strict=True)]
    for h in range(heads):
        asks: dict[int, list[tuple[int, int]]] = {}  # entries of a page, in order
        for n in range(N):
            row = n // queries
            for j, entry in enumerate(table[n, h, : columns[n]].tolist()):
                column, page = (held[n] - columns[n] + j) // parts, entry // parts
                if page >= 0 and column >= full[row]:
                    place = ((first_row + row) * ring_pages + column % ring_pages) * heads + h
                    table[n, h, j] = place * apart + entry % parts
                elif page >= 0:
                    asks.setdefault(page, []).append((n, j))
        place_of, page_of, order = hot.place_of[h], hot.page_of[h], hot.order[:, h]
        turn = int(hot.turn[h])
        found = {int(place_of[page]) for page in asks if place_of[page] >= 0}
        missing = [page for page in asks if place_of[page] < 0]
        known = order[turn].tolist()
        stay = [place for place in known if place not in found]
        victims = stay[: len(missing)]
        assert len(victims) == len(missing), f"{len(asks)} blocks of a KV head chosen at once, {hot.places} places"
        for i, (page, place) in enumerate(zip(missing, victims, strict=True)):
            old = int(page_of[place])
            if old >= 0 and place_of[old] == place:
                place_of[old] = NOWHERE
            page_of[place] = page
            misses.source[h, i], misses.target[h, i] = page * heads + h, hot.begin + h * hot.places + place
        for page, place in zip(missing, victims, strict=True):
            place_of[page] = place
        if not misses.guess:
            recent = [place for place in known if place in found][::-1] + victims[::-1]
            order[1 - turn] = torch.tensor(stay[len(victims) :] + recent, dtype=torch.int32)
            hot.turn[h] = 1 - turn
        misses.counts[h] = len(missing)
        counted = [sum(map(len, asks.values())) - len(missing), len(missing)]
        misses.counted.add_(torch.tensor(counted, device=misses.counted.device))
        for page, entries in asks.items():
            for n, j in entries:
                place = hot.begin + h * hot.places + int(place_of[page])
                table[n, h, j] = place * apart + table[n, h, j] % parts


def copy_blocks(source: torch.Tensor, target: torch.Tensor, blocks: BlockList) -> None:
    """Copies listed blocks in all layers; shapes as in `kernels.tier.copy_blocks.copy_blocks`."""
    for of_source, of_target, count in zip(blocks.source, blocks.target, blocks.counts.tolist(), strict=True):
        copied = source[:, of_source[:count].long().to(source.device)]
        target[:, of_target[:count].long().to(target.device)] = copied.to(target.device)


def write_back(
    places: torch.Tensor,
    host: torch.Tensor,
    place_of: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    first_row: int,
    ring_pages: int,
    **grid: int,
) -> None:
    """Writes filled pages to the host; shapes as in `kernels.tier.write_back.write_back`."""
    heads = place_of.shape[1]
    head = torch.arange(heads, device=places.device)
    lengths = zip(tables, starts.tolist(), before.tolist(), after.tolist(), strict=True)
    for row, (table, start, old, new) in enumerate(lengths, first_row):
        for column in range(full_pages(old, start, **grid), full_pages(new, start, **grid)):
            page = int(table[column])
            of_ring = (row * ring_pages + column % ring_pages) * heads
            host[:, page * heads : (page + 1) * heads] = places[:, of_ring + head].to(host.device)
            place_of[:, :, page] = NOWHERE
