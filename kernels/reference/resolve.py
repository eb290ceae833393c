"""resolve in plain torch."""

from __future__ import annotations

import torch

from kernels.hot_blocks import NOWHERE, FetchList, HotBlocks, Readers
from kernels.reference.block_bounds import full_pages


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
