"""Memory of sequences on a rank: the data that each layer keeps, in pages, rings and slots.

Pages hold all tokens of a sequence, and sequences share them. Layers with a sliding window store the window in a ring
of pages per slot: local page i of the sequence is page `i % ring` of the ring. Rings are not shared: after a prefix
hit, the tokens that windows lack are computed again. Tokens of a prompt chunk beyond the ring's size lie in pages of
the chunk until it ends. A state of a sequence has one place per slot. Snapshots of states lie behind those of the
slots, and further ones in host memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from helix.engine.decision import Admission
from helix.placement import Placement
from helix.worker.follower import Follower, Prefilled, Span, Taken
from helix.worker.graph_keys import StepKind
from helix.worker.host_store import HostStore
from helix.worker.keeps import ITEMSIZE, RING_MOST, EngineSizes, Keeps, lacking, token_bytes
from helix.worker.transfers import to_device
from kernels.paged_keys import PagedKeys
from kernels.sparse.block_bounds import fold_blocks

SNAPPED = ("slot", "recent")  # what a snapshot has


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the memory on this rank.

    Attributes:
        index: index of the layer.
        kept: its data by name: per token [pages, page_size, *entry], per page [pages, *entry], per slot
            [slots, *entry], per row or recent token [slots, rows, *entry].
        accepted: [slots] int64, accepted rows of a sequence's last step; empty if no layer keeps rows.
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

    @property
    def part_bounds(self) -> Tensor:
        """Bounds [pages, Hkv, parts, 2, D] of the keys in each part of such a page."""
        return self.kept["part_bounds"]

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Factors [pages, Hkv, page_size] of keys and of values; None where they have none."""
        return self.kept.get("key_scales"), self.kept.get("value_scales")

    def paged(self, table: Tensor, lo: Tensor, hi: Tensor, scale: float, sinks: Tensor | None) -> PagedKeys:
        """Returns its keys and values for attention; arguments as in `kernels.paged_keys.PagedKeys`."""
        return PagedKeys(self.keys, self.values, table, lo, hi, scale, sinks, *self.scales)

    def paged_latents(self, latent: int, table: Tensor, lo: Tensor, hi: Tensor, scale: float) -> PagedKeys:
        """Returns its latents, of width `latent`, for attention; other arguments as in `paged`."""
        kept, scales, rope = self.kept["latents"], self.kept.get("latent_scales"), self.kept.get("ropes")
        return PagedKeys(kept, kept[..., :latent], table, lo, hi, scale, k_scale=scales, rope=rope)

    def chosen_latents(self, latent: int, slots: Tensor, lo: Tensor, hi: Tensor, scale: float) -> PagedKeys:
        """Returns the latents in columns [lo, hi) of cache slots [N, width], as pages of one token."""
        kept, scales, rope = self.kept["latents"], self.kept.get("latent_scales"), self.kept.get("ropes")
        tokens = kept.flatten(0, 1).unsqueeze(1)  # [slots, 1, R + P]
        ropes = None if rope is None else rope.flatten(0, 1).unsqueeze(1)
        return PagedKeys(tokens, tokens[..., :latent], slots, lo, hi, scale, k_scale=scales, rope=ropes)


@dataclass(frozen=True)
class Group:
    """Layers that keep the same data, and its memory.

    Attributes:
        tensors: by name [layers, ...], each layer's part as in `LayerCache`.
        on_host: what snapshots in host memory have of it, by name [snapshots, layers, ...].
    """

    layers: tuple[int, ...]
    keeps: tuple[Keeps, ...]
    tensors: dict[str, Tensor]
    on_host: dict[str, Tensor] = field(default_factory=dict)


class KVCache(Follower):
    """Data of the tokens that this rank owns, and of the sequences in its slots, for every layer.

    Rank 0 assigns pages to sequences (`helix.engine.block_tables`). Memory is left uninitialised: all reads are masked
    by length.

    Args:
        keeps: data that each layer keeps.
        sizes: the engine's sizes.
        host_states: host memory of further snapshots, [n, `snapshot_bytes`] uint8.

    Attributes:
        groups: the memory, by layers that keep the same data.
        rings: pages of a slot's ring, by window; by None for layers without one.
        lacking: tokens before the end of a prefix hit that are computed again.
        has_states: whether any layer keeps a state of each sequence.
        snapshots: number of snapshots of states, which lie behind those of the slots.
        host_snapshots: number of those in host memory, which are numbered from `snapshots` on.
        bytes_per_token: bytes in pages of a token that this rank owns.
        remedy: advice for an error: how to make room for more.
        fetches: whether each chunk of a prompt fetches the keys before it from host memory.
    """

    fetches = False
    remedy = "raise kv.tokens or kv.memory_fraction, or use a larger layout.kvp"

    def __init__(
        self,
        keeps: Sequence[tuple[Keeps, ...]],
        placement: Placement,
        sizes: EngineSizes,
        device: torch.device,
        host_states: HostStore | None = None,
    ) -> None:
        self.pages = sizes.pages
        self.placement = placement
        self.device = device
        self.bytes_per_token = sum(token_bytes(kept) for kept in keeps)
        self.lacking = lacking(keeps)
        self.rings: dict[int | None, int] = {
            k.reach: ring(placement, k.reach, sizes.queries) for kept in keeps for k in kept if k.reach is not None
        }
        self._sizes = sizes
        of: dict[tuple[Keeps, ...], list[int]] = {}
        for index, kept in enumerate(keeps):
            of.setdefault(kept, []).append(index)
        self.groups = [
            Group(tuple(layers), kept, {k.name: self._allocate(k, len(layers)) for k in kept})
            for kept, layers in of.items()
        ]
        self._places = {index: (group, i) for group in self.groups for i, index in enumerate(group.layers)}
        self.has_states = any(k.per == "slot" for kept in keeps for k in kept)
        self.snapshots = sizes.snapshots if self.has_states else 0
        self._host_states, self.host_snapshots = host_states, 0
        if host_states is not None:
            assert host_states.tensor is not None
            self.host_snapshots = len(host_states.tensor)
            self._share_out(host_states.tensor)
        self._replays = any(k.per in ("row", "recent") for kept in keeps for k in kept)
        self.accepted = torch.zeros(sizes.slots if self._replays else 0, dtype=torch.int64, device=device)

    def _allocate(self, kept: Keeps, layers: int) -> Tensor:
        """Allocates the memory of one kind of data, for `layers` layers."""
        count = entries(kept, self.placement, self._sizes)
        shape = (count[0], *kept.entry, count[1]) if kept.by_head else (*count, *kept.entry)
        return torch.empty(layers, *shape, dtype=getattr(torch, kept.dtype), device=self.device)

    def _share_out(self, numbers: Tensor) -> None:
        """Views host memory as snapshots: the widest numbers first, so that all are aligned."""
        parts, begin = [(group, k) for group in self.groups for k in group.keeps if k.per in SNAPPED], 0
        for group, kept in sorted(parts, key=lambda part: -ITEMSIZE[part[1].dtype]):
            shape = len(group.layers), *entries(kept, self.placement, self._sizes)[1:], *kept.entry
            end = begin + math.prod(shape) * ITEMSIZE[kept.dtype]
            group.on_host[kept.name] = numbers[:, begin:end].view(getattr(torch, kept.dtype)).view(len(numbers), *shape)
            begin = end

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        """Returns one layer's part; `prefill`: for a prefill step."""
        group, place = self._places[index]
        return LayerCache(index, {name: tensor[place] for name, tensor in group.tensors.items()}, self.accepted)

    @property
    def tensors(self) -> list[Tensor]:
        """All memory, [layers, ...] each."""
        return [tensor for group in self.groups for tensor in group.tensors.values()]

    @property
    def bounds(self) -> Tensor | None:
        """Per-page key bounds [layers, pages, Hkv, 2, D]; None without block selection."""
        return next((group.tensors["bounds"] for group in self.groups if "bounds" in group.tensors), None)

    def fold(self, span: Span) -> None:
        """Writes the key bounds of newly full pages, in all layers that keep bounds."""
        for group in self.groups:
            if (bounds := group.tensors.get("bounds")) is not None:
                fold_blocks(
                    group.tensors["keys"], group.tensors.get("key_scales"), bounds, span.tables, span.starts,
                    span.before, span.after, span.most // self.placement.page_size + 1,
                    **self.placement.grid, part_bounds=group.tensors.get("part_bounds"),
                )  # fmt: skip

    def admit(self, *admissions: Admission) -> None:
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        if self._replays:
            self.accepted[slot].fill_(0)
        for group in self.groups:
            for kept in group.keeps:
                tensor = group.tensors[kept.name]
                if kept.per in SNAPPED and admission.state >= 0:
                    tensor[:, slot].copy_(self._snapshot(group, kept, admission.state), non_blocking=True)
                elif kept.per == "slot":
                    tensor[:, slot].fill_(0)
                elif kept.reach is not None:
                    # A prompt may resume behind tokens that its ring lacks: zeros keep what it computes first finite.
                    pages = self.rings[kept.reach]
                    tensor[:, slot * pages : (slot + 1) * pages].fill_(0)

    def prefilled(self, chunk: Prefilled) -> None:
        for reach in self.rings.keys() - {None}:
            pages = self.rings[reach]
            moved = [
                (self._sizes.slots * pages + part.page + column - part.columns.start, part.row * pages + column % pages)
                for part in chunk.parts
                for column in part.columns[1:][-pages:]  # the first one is in the ring already
            ]
            if moved:
                sources, to = (to_device(torch.tensor(x), self.device) for x in zip(*moved, strict=True))
                for group in self.groups:
                    for kept in group.keeps:
                        if kept.reach == reach:
                            group.tensors[kept.name][:, to] = group.tensors[kept.name][:, sources]
        for prompt in chunk.prompts:
            if prompt.saves >= 0:
                self._snap(prompt.slot, prompt.saves, prompt.moves)
        self.fold(chunk.span)

    def _snap(self, slot: int, place: int, moves: int) -> None:
        """Takes a snapshot of a slot's states; the one that was in its place moves to place `moves`, if not -1."""
        for group in self.groups:
            for kept in group.keeps:
                if kept.per in SNAPPED:
                    snapshot = self._snapshot(group, kept, place)
                    if moves >= 0:
                        self._snapshot(group, kept, moves).copy_(snapshot, non_blocking=True)  # in the stream's order
                    snapshot.copy_(group.tensors[kept.name][:, slot])

    def _snapshot(self, group: Group, kept: Keeps, place: int) -> Tensor:
        """Returns what a snapshot has of one kind of data, [layers, ...]."""
        if place >= self.snapshots:
            return group.on_host[kept.name][place - self.snapshots]
        return group.tensors[kept.name][:, self._sizes.slots + place]

    def takes(self, kind: StepKind) -> bool:
        return self.bounds is not None or self._replays

    def taken(self, step: Taken) -> None:
        if self._replays:
            self.accepted[: step.kind.rows] = step.span.after - step.span.before
        self.fold(step.span)

    def close(self) -> None:
        """Frees memory outside torch's allocator; no kernel may use the cache any more. A second call does nothing."""
        if self._host_states is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._host_states.close()

    def copy(self, sources: Tensor, to: Tensor) -> None:
        for group in self.groups:
            for kept in group.keeps:
                if kept.is_paged:
                    group.tensors[kept.name][:, to] = group.tensors[kept.name][:, sources]


def without_long_rings(keeps: Sequence[tuple[Keeps, ...]]) -> list[tuple[Keeps, ...]]:
    """Returns what layers keep, with windows of more than RING_MOST tokens in pages instead of rings."""
    return [
        tuple(replace(k, reach=None) if k.reach is not None and k.reach > RING_MOST else k for k in kept)
        for kept in keeps
    ]


def with_bounds(keeps: Sequence[tuple[Keeps, ...]], dtype: str, parts: int = 1) -> list[tuple[Keeps, ...]]:
    """Adds key bounds in `dtype` of each page, and of its `parts` if several, to layers that read whole sequences."""

    def more(kept: tuple[Keeps, ...]) -> tuple[Keeps, ...]:
        if (keys := next((k for k in kept if k.name == "keys" and k.reach is None), None)) is None:
            return kept
        heads, width = keys.entry
        of_parts = [Keeps("part_bounds", (heads, parts, 2, width), dtype, "page")] if parts > 1 else []
        return (*kept, Keeps("bounds", (heads, 2, width), dtype, "page"), *of_parts)

    return [more(kept) for kept in keeps]


def ring(placement: Placement, reach: int, rows: int) -> int:
    """Counts the pages of a slot's ring for a window of `reach` tokens and steps of `rows` tokens."""
    return placement.touched(reach + rows - 1)


def entries(kept: Keeps, placement: Placement, sizes: EngineSizes) -> tuple[int, ...]:
    """Returns the shape of the entries of one kind of data."""
    slots, rows, snapshots = sizes.slots, sizes.queries, sizes.snapshots
    if kept.reach is not None:
        chunk_pages = placement.chunk_pages(sizes.chunk, slots)
        return slots * ring(placement, kept.reach, rows) + chunk_pages, placement.page_size
    return {
        "token": (sizes.pages, placement.page_size),
        "page": (sizes.pages,),
        "slot": (slots + snapshots,),
        "row": (slots, rows),
        "recent": (slots + snapshots, rows + kept.before),
    }[kept.per]


def slot_bytes(keeps: Sequence[tuple[Keeps, ...]], placement: Placement, sizes: EngineSizes) -> int:
    """Counts the bytes of all data outside pages; arguments as in `KVCache`."""
    others = (k for kept in keeps for k in kept if not k.is_paged)
    return sum(k.bytes * math.prod(entries(k, placement, sizes)) for k in others)


def snapshot_bytes(keeps: Sequence[tuple[Keeps, ...]], placement: Placement, sizes: EngineSizes) -> int:
    """Counts the bytes of a snapshot in host memory, a multiple of 16; arguments as in `KVCache`."""
    snapped = (k for kept in keeps for k in kept if k.per in SNAPPED)
    return -(-sum(k.bytes * math.prod(entries(k, placement, sizes)[1:]) for k in snapped) // 16) * 16


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes: the GPU's, or this host's divided equally among its ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets it
    raise RuntimeError("/proc/meminfo has no MemAvailable: set kv.tokens and run on Linux")
