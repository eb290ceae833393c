"""Pages of key scores, which verification writes for each key of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from helix.worker.transfers import to_device
from kernels.paged_keys import KeyScores


class ScorePages:
    """Score planes of the layers without a window, with the block table of each slot.

    Sequences that share pages of keys score them separately, so score pages are not shared.

    Args:
        layers: indices of these layers.
        planes: [layers, planes, pages, Hkv, page_size] fp16; `score_planes` computes how many a step's queries need.
        tables: [slots, maximum pages of a sequence] int32.
        rows: queries that count, see `KeyScores`.
    """

    def __init__(self, layers: Sequence[int], planes: Tensor, tables: Tensor, rows: str) -> None:
        self.planes, self.tables, self.rows = planes, tables, rows
        self._layer_positions = {index: position for position, index in enumerate(layers)}
        self._free = list(range(planes.shape[2] - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    def grow(self, slot: int, count: int) -> None:
        pages = self._pages.setdefault(slot, [])
        begin, count = len(pages), max(count - len(pages), 0)
        assert count <= len(self._free), f"{count} pages of scores needed, but {len(self._free)} are free"
        pages += [self._free.pop() for _ in range(count)]
        self.tables[slot, begin : len(pages)] = to_device(
            torch.tensor(pages[begin:], dtype=torch.int32), self.tables.device
        )

    def release(self, slot: int) -> None:
        self._free.extend(reversed(self._pages.pop(slot)))

    def layer(self, index: int, slots: slice, planes: int) -> KeyScores:
        return KeyScores(self.planes[self._layer_positions[index], :planes], self.tables[slots], self.rows)


def score_bytes(layers: int, planes: int, heads: int, page_size: int) -> int:
    """Counts the bytes of a page of scores in all layers."""
    return layers * planes * heads * page_size * torch.float16.itemsize
