"""What verification leaves of each key of a sequence, in pages as those of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helix.memory.transfers import to_device
from kernels.paged_keys import KeyScores


class ScorePages:
    """Planes of scores of the layers that read whole sequences, their pages, and who has which.

    A score belongs to a sequence, and so does its page: sequences that share pages of keys judge them apart.

    Args:
        layers: indices of those layers.
        planes: of a layer; `kernels.attention.flash_decode.score_planes` says how many queries fill.
        pages: of a plane.
        heads: KV heads of this rank.
        max_batch: slots.
        max_pages: of a sequence.
        rows: which queries count, as in `KeyScores`.

    Attributes:
        planes: [layers, planes, pages, Hkv, page_size] fp16.
        tables: [max_batch, max_pages] int32.
    """

    def __init__(
        self,
        layers: Sequence[int],
        planes: int,
        pages: int,
        heads: int,
        page_size: int,
        max_batch: int,
        max_pages: int,
        rows: str,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.planes = torch.empty(len(layers), planes, pages, heads, page_size, dtype=torch.float16, device=device)
        self.tables = torch.zeros(max_batch, max_pages, dtype=torch.int32, device=device)
        self._places = {index: place for place, index in enumerate(layers)}
        self._free = list(range(pages - 1, -1, -1))
        self._held: dict[int, list[int]] = {}

    def grow(self, slot: int, count: int) -> None:
        """Gives a slot pages until it has as many as its sequence has in the cache."""
        held = self._held.setdefault(slot, [])
        begin, count = len(held), max(count - len(held), 0)
        assert count <= len(self._free), f"{count} pages of scores wanted, {len(self._free)} free"
        held += [self._free.pop() for _ in range(count)]
        self.tables[slot, begin : len(held)] = to_device(
            torch.tensor(held[begin:], dtype=torch.int32), self.tables.device
        )

    def retire(self, slot: int) -> None:
        self._free.extend(reversed(self._held.pop(slot)))

    def layer(self, index: int, slots: slice) -> KeyScores:
        """Where the sequences of `slots` leave what they make of a layer's keys."""
        return KeyScores(self.planes[self._places[index]], self.tables[slots], self.rows)


def score_bytes(layers: int, planes: int, heads: int, page_size: int) -> int:
    """Bytes of a page of scores in all layers."""
    return layers * planes * heads * page_size * torch.float16.itemsize
