"""This rank's memory of sequences: what each layer keeps of them, in pages, rings and slots.

Pages hold all tokens of a sequence, and sequences share them. What a layer keeps for a sliding window lies in a ring of
pages that each slot has: local page i of its sequence is page `i % ring` of the ring. Nobody shares that, and what was
found in pages is computed again as far as the window lacks it. Tokens of a prompt's chunk that a ring has no room for
lie in pages of the chunk meanwhile. A state of a sequence has one place in each slot.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from helix.events.decision import Admission, StepKind
from helix.events.follower import Follower, Prefilled, Span, Taken
from helix.memory.keeps import Keeps, lacking, token_bytes
from helix.memory.transfers import to_device
from helix.placement import Placement
from kernels.sparse.block_bounds import fold_blocks


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the memory on this rank.

    Attributes:
        index: of the layer.
        kept: what it keeps, by name. Of tokens [pages, page_size, *entry], of pages [pages, *entry], of slots
            [slots, *entry], of rows [slots, rows, *entry].
        accepted: [slots] int64, rows of a sequence's last step that are a part of it; empty where nobody keeps rows.
    """

    index: int
    kept: Mapping[str, Tensor]
    accepted: Tensor

    @property
    def keys(self) -> Tensor:
        """Keys [pages, page_size, Hkv, D]."""
        return self.kept["keys"]

    @property
    def values(self) -> Tensor:
        """Values [pages, page_size, Hkv, D]."""
        return self.kept["values"]

    @property
    def bounds(self) -> Tensor:
        """Bounds [pages, Hkv, 2, D] of the keys in each page that is full of committed tokens."""
        return self.kept["bounds"]


@dataclass(frozen=True)
class Group:
    """Layers that keep the same, and their memory: by name [layers, ...], each layer's part as in `LayerCache`."""

    layers: tuple[int, ...]
    keeps: tuple[Keeps, ...]
    tensors: dict[str, Tensor]


class KVCache(Follower):
    """What this rank stores of the tokens that it owns, and of the sequences in its slots, for every layer.

    Rank 0 says who has which page (`helix.control.block_tables`). Memory is left uninitialised: whatever reads it masks
    by length.

    Args:
        keeps: of each layer.
        slots: sequences of the batch.
        rows: tokens of a sequence in a decode step, at most.
        chunk: tokens of a prefill step, at most.
        score: what the bounds of a page are, as `kernels.sparse.block_bounds` has it, in layers that keep some.

    Attributes:
        groups: the memory.
        rings: pages of a slot's ring, by the window that it serves; by None where it serves those without.
        lacking: tokens before the end of what was found in pages that are computed again.
        has_states: whether a layer keeps a state of each sequence.
        bytes_per_token: of a token that this rank owns, in pages.
        remedy: what makes room for more.
    """

    remedy = "raise kv.tokens or kv.memory_fraction, or use a larger layout.kvp"

    def __init__(
        self,
        keeps: Sequence[tuple[Keeps, ...]],
        pages: int,
        placement: Placement,
        device: torch.device,
        *,
        slots: int = 1,
        rows: int = 1,
        chunk: int = 1,
        score: str | None = None,
    ) -> None:
        self.pages = pages
        self.placement = placement
        self.score = score
        self.device = device
        self.bytes_per_token = sum(token_bytes(kept) for kept in keeps)
        self.lacking = lacking(keeps)
        self.rings: dict[int | None, int] = {
            k.reach: ring(placement, k.reach, rows) for kept in keeps for k in kept if k.reach is not None
        }
        self._slots, self._rows, self._chunk_pages = slots, rows, placement.chunk_pages(chunk, slots)
        of: dict[tuple[Keeps, ...], list[int]] = {}
        for index, kept in enumerate(keeps):
            of.setdefault(kept, []).append(index)
        self.groups = [
            Group(tuple(layers), kept, {k.name: self._allocate(k, len(layers)) for k in kept})
            for kept, layers in of.items()
        ]
        self._places = {index: (group, i) for group in self.groups for i, index in enumerate(group.layers)}
        self.has_states = any(k.per == "slot" for kept in keeps for k in kept)
        self._replays = any(k.per == "row" for kept in keeps for k in kept)
        self.accepted = torch.zeros(slots if self._replays else 0, dtype=torch.int64, device=device)

    def _allocate(self, kept: Keeps, layers: int) -> Tensor:
        """Memory of one thing that so many layers keep."""
        count = entries(kept, self.placement, self.pages, self._slots, self._rows, self._chunk_pages)
        return torch.empty(layers, *count, *kept.entry, dtype=kept.dtype, device=self.device)

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        """Returns one layer's part; `prefill`: for a step of prompts."""
        group, place = self._places[index]
        return LayerCache(index, {name: tensor[place] for name, tensor in group.tensors.items()}, self.accepted)

    @property
    def tensors(self) -> list[Tensor]:
        """All memory, [layers, ...] each."""
        return [tensor for group in self.groups for tensor in group.tensors.values()]

    @property
    def bounds(self) -> Tensor | None:
        """Bounds [layers, pages, Hkv, 2, D] of the layers that keep some."""
        return next((group.tensors["bounds"] for group in self.groups if "bounds" in group.tensors), None)

    def fold(self, span: Span) -> None:
        """Writes the bounds of pages that are full now, in all layers that keep some."""
        for group in self.groups:
            if (bounds := group.tensors.get("bounds")) is not None:
                assert self.score is not None
                fold_blocks(
                    group.tensors["keys"], bounds, span.tables, span.starts, span.before, span.after,
                    span.most // self.placement.page_size + 1, self.score, **self.placement.grid,
                )  # fmt: skip

    def admit(self, admission: Admission) -> None:
        slot = admission.slot
        if self._replays:
            self.accepted[slot].fill_(0)
        for group in self.groups:
            for kept in group.keeps:
                tensor = group.tensors[kept.name]
                if kept.per == "slot":
                    tensor[:, slot].fill_(0)
                elif kept.reach is not None and admission.resumes:
                    # What goes before is not there: of any numbers, so that what is computed of them is some.
                    pages = self.rings[kept.reach]
                    tensor[:, slot * pages : (slot + 1) * pages].fill_(0)

    def prefilled(self, chunk: Prefilled) -> None:
        for reach in self.rings.keys() - {None}:
            pages = self.rings[reach]
            last = [
                (part, range(part.begin // self.placement.page_size + 1, part.columns.stop)) for part in chunk.parts
            ]
            moved = [
                (self._slots * pages + part.page + column - part.columns.start, part.row * pages + column % pages)
                for part, columns in last
                for column in columns[-pages:]
            ]
            if moved:
                sources, to = (to_device(torch.tensor(x), self.device) for x in zip(*moved, strict=True))
                for group in self.groups:
                    for kept in group.keeps:
                        if kept.reach == reach:
                            group.tensors[kept.name][:, to] = group.tensors[kept.name][:, sources]
        self.fold(chunk.span)

    def takes(self, kind: StepKind) -> bool:
        return self.score is not None or self._replays

    def taken(self, step: Taken) -> None:
        if self._replays:
            self.accepted[: step.kind.rows] = step.span.after - step.span.before
        self.fold(step.span)

    def close(self) -> None:
        """Gives back what is not torch's; no kernel may use the cache any more. A second call does nothing."""

    def copy(self, sources: Tensor, to: Tensor) -> None:
        for group in self.groups:
            for kept in group.keeps:
                if kept.is_paged:
                    group.tensors[kept.name][:, to] = group.tensors[kept.name][:, sources]


def with_bounds(keeps: Sequence[tuple[Keeps, ...]]) -> list[tuple[Keeps, ...]]:
    """Adds bounds of the keys of each page to what layers keep that read whole sequences."""

    def more(kept: tuple[Keeps, ...]) -> tuple[Keeps, ...]:
        keys = [k for k in kept if k.name == "keys" and k.reach is None]
        return (*kept, *(Keeps("bounds", (k.entry[0], 2, k.entry[1]), k.dtype, "page") for k in keys))

    return [more(kept) for kept in keeps]


def ring(placement: Placement, reach: int, rows: int) -> int:
    """Counts the pages of a slot's ring that a window of `reach` tokens needs, where steps have `rows` tokens."""
    return placement.touched(reach + rows - 1)


def entries(
    kept: Keeps, placement: Placement, pages: int, slots: int, rows: int, chunk_pages: int
) -> tuple[int, ...]:  # fmt: skip
    """Shape of the entries of one thing that a layer keeps, for so many pages and slots."""
    if kept.reach is not None:
        return slots * ring(placement, kept.reach, rows) + chunk_pages, placement.page_size
    return {"token": (pages, placement.page_size), "page": (pages,), "slot": (slots,), "row": (slots, rows)}[kept.per]


def slot_bytes(
    keeps: Sequence[tuple[Keeps, ...]], placement: Placement, slots: int, rows: int, chunk: int
) -> int:  # fmt: skip
    """Counts the bytes of all that is not in pages; arguments as of `KVCache`."""
    chunk_pages = placement.chunk_pages(chunk, slots)
    others = (k for kept in keeps for k in kept if not k.is_paged)
    return sum(k.bytes * math.prod(entries(k, placement, 0, slots, rows, chunk_pages)) for k in others)


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses now: the GPU's, or an equal share of this host's for each of the ranks on it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets it
    raise RuntimeError("/proc/meminfo has no MemAvailable: set kv.tokens and run on Linux")
