"""A rank's KV cache: the data that each layer stores, in pages, rings and slots.

Pages hold all tokens of a sequence, and sequences share them. A layer with a sliding window stores the window in a ring
of pages per slot: local page i of the sequence is page `i % ring` of the ring. Tokens of a prefill chunk beyond the
ring's size lie in pages of the chunk until it ends. Recurrent states have one entry per slot.

Rings and states are not shared, but copied: snapshots follow the slots' entries, further ones are in host memory. After
a prefix hit without a snapshot, the tokens that windows and states lack are computed again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from helix.engine.scheduler_output import NewRequest
from helix.kv_placement import KVPlacement, PromptChunk
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.host_store import HostStore, available_memory
from helix.worker.kv_cache_spec import (
    ITEMSIZE,
    MAX_RING_TOKENS,
    EngineSizes,
    KVCacheSpec,
    page_bytes,
    recomputed_tokens,
    token_bytes,
)
from helix.worker.sequence_observer import PrefillCommitted, SequenceObserver, Span, StepCommitted
from helix.worker.step import Step
from helix.worker.transfers import to_device
from kernels.paged_keys import PagedKeys
from kernels.sparse.block_bounds import fold_blocks


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the KV cache on this rank.

    Attributes:
        tensors: by name: per token [pages, page_size, *entry], per page [pages, *entry], per slot [slots, *entry], per
            row or recent token [slots, rows, *entry].
        accepted: [slots] int64, accepted rows of a sequence's last step; empty if no layer stores rows.
        over_link: latents lie in host memory: only selections are read.
    """

    over_link: ClassVar[bool] = False

    index: int
    tensors: Mapping[str, Tensor]
    accepted: Tensor

    @property
    def keys(self) -> Tensor:
        """Keys [pages, page_size, Hkv, D]."""
        return self.tensors["keys"]

    @property
    def values(self) -> Tensor:
        """Values [pages, page_size, Hkv, D]."""
        return self.tensors["values"]

    @property
    def bounds(self) -> Tensor:
        """Bounds [pages, Hkv, 2, D] of the keys in each page that is full of committed tokens."""
        return self.tensors["bounds"]

    @property
    def part_bounds(self) -> Tensor:
        """Bounds [pages, Hkv, parts, 2, D] of the keys in each part of such a page."""
        return self.tensors["part_bounds"]

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Scales [pages, Hkv, page_size] of keys and of values; None where they have none."""
        return self.tensors.get("key_scales"), self.tensors.get("value_scales")

    def paged(self, table: Tensor, lo: Tensor, hi: Tensor, scale: float, sinks: Tensor | None) -> PagedKeys:
        """Returns the keys and values for attention; arguments as in `kernels.paged_keys.PagedKeys`."""
        return PagedKeys(self.keys, self.values, table, lo, hi, scale, sinks, *self.scales)

    def paged_latents(self, latent: int, table: Tensor, lo: Tensor, hi: Tensor, scale: float) -> PagedKeys:
        """Returns the latents, of width `latent`, for attention; other arguments as in `paged`."""
        latents, scales, rope = self.tensors["latents"], self.tensors.get("latent_scales"), self.tensors.get("ropes")
        return PagedKeys(latents, latents[..., :latent], table, lo, hi, scale, k_scale=scales, rope=rope)

    def selection(self, latent: int, step: Step, scale: float) -> PagedKeys:
        """Returns the latents that an indexer selected for the queries of a step, see `Step.selected`."""
        assert step.selected is not None
        slots, lo, hi = step.selected
        return self.selected_latents(latent, slots, lo, hi, scale)

    def selected_latents(self, latent: int, slots: Tensor, lo: Tensor, hi: Tensor, scale: float) -> PagedKeys:
        """Returns the latents in columns [lo, hi) of cache slots [N, width], as pages of one token."""
        latents, scales, rope = self.tensors["latents"], self.tensors.get("latent_scales"), self.tensors.get("ropes")
        tokens = latents.flatten(0, 1).unsqueeze(1)  # [slots, 1, R + P]
        ropes = None if rope is None else rope.flatten(0, 1).unsqueeze(1)
        return PagedKeys(tokens, tokens[..., :latent], slots, lo, hi, scale, k_scale=scales, rope=ropes)


@dataclass(frozen=True)
class Group:
    """Layers with the same specs, and their memory.

    Attributes:
        tensors: by name [layers, ...], each layer's part as in `LayerCache`.
        on_host: data of snapshots in host memory, by name [snapshots, layers, ...].
    """

    layers: tuple[int, ...]
    kv_cache_specs: tuple[KVCacheSpec, ...]
    tensors: dict[str, Tensor]
    on_host: dict[str, Tensor] = field(default_factory=dict)


class KVCache(SequenceObserver):
    """KV cache of this rank: data of its tokens, and of the sequences in its slots, for every layer.

    Rank 0 assigns pages to sequences (`helix.engine.block_tables`). Memory is uninitialized: all reads are masked by
    length.

    Args:
        layer_specs: data that each layer stores.
        host_states: host memory of further snapshots, [n, `snapshot_bytes`] uint8.

    Attributes:
        rings: pages of a slot's ring, by window; under None for layers without one, with KV offload.
        recomputed_tokens: tokens before the end of a prefix hit that are computed again.
        snapshots: number of snapshots on the GPU.
        host_snapshots: number of snapshots in host memory, numbered from `snapshots` on.
        remedy: advice for errors: how to make room for more.
        fetches: each prefill chunk fetches the keys before it from host memory.
    """

    fetches = False
    remedy = "raise kv.tokens, kv.memory_fraction or layout.kvp"

    def __init__(
        self,
        layer_specs: Sequence[tuple[KVCacheSpec, ...]],
        placement: KVPlacement,
        sizes: EngineSizes,
        device: torch.device,
        host_states: HostStore | None = None,
    ) -> None:
        self.pages = sizes.pages
        self.placement = placement
        self.device = device
        self.bytes_per_token = sum(token_bytes(specs) for specs in layer_specs)
        self.recomputed_tokens = recomputed_tokens(layer_specs)
        self.rings: dict[int | None, int] = {
            k.window: ring(placement, k.window, sizes.queries)
            for specs in layer_specs
            for k in specs
            if k.window is not None
        }
        self._sizes = sizes
        by_specs: dict[tuple[KVCacheSpec, ...], list[int]] = {}
        for index, specs in enumerate(layer_specs):
            by_specs.setdefault(specs, []).append(index)
        self.groups = [
            Group(tuple(layers), specs, {k.name: self._allocate(k, len(layers)) for k in specs})
            for specs, layers in by_specs.items()
        ]
        self._layer_positions = {index: (group, i) for group in self.groups for i, index in enumerate(group.layers)}
        self.has_states = any(k.per == "slot" for specs in layer_specs for k in specs)
        self.snapshots = sizes.snapshots if self.has_states or self.rings else 0
        self._host_states, self.host_snapshots = host_states, 0
        if host_states is not None:
            assert host_states.tensor is not None
            self.host_snapshots = len(host_states.tensor)
            self._view_host_snapshots(host_states.tensor)
        self._replays = any(k.per in ("row", "recent") for specs in layer_specs for k in specs)
        self.accepted = torch.zeros(sizes.slots if self._replays else 0, dtype=torch.int64, device=device)

    def _allocate(self, spec: KVCacheSpec, layers: int) -> Tensor:
        count = entries(spec, self.placement, self._sizes)
        shape = (count[0], *spec.entry, count[1]) if spec.by_head else (*count, *spec.entry)
        make = torch.zeros if spec.dtype == "int32" else torch.empty  # steps may read indices before any is written
        return make(layers, *shape, dtype=getattr(torch, spec.dtype), device=self.device)

    def _view_host_snapshots(self, numbers: Tensor) -> None:
        """Views host memory as snapshots, widest dtypes first so that all are aligned."""
        parts, begin = [(group, k) for group in self.groups for k in group.kv_cache_specs if k.in_snapshots], 0
        for group, spec in sorted(parts, key=lambda part: -ITEMSIZE[part[1].dtype]):
            shape = len(group.layers), *slot_entries(spec, self.placement, self._sizes), *spec.entry
            end = begin + math.prod(shape) * ITEMSIZE[spec.dtype]
            group.on_host[spec.name] = numbers[:, begin:end].view(getattr(torch, spec.dtype)).view(len(numbers), *shape)
            begin = end

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of a page in the layer that stores the most; 0 if all layers have rings or states."""
        return max((page_bytes(g.kv_cache_specs, self.placement.page_size) for g in self.groups), default=0)

    @property
    def is_fp8(self) -> bool:
        """Whether any keys, values or latents are stored in e4m3."""
        return any(spec.dtype == "float8_e4m3fn" for g in self.groups for spec in g.kv_cache_specs)

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        group, position = self._layer_positions[index]
        return LayerCache(index, {name: tensor[position] for name, tensor in group.tensors.items()}, self.accepted)

    @property
    def tensors(self) -> list[Tensor]:
        """All memory, [layers, ...] each."""
        return [tensor for group in self.groups for tensor in group.tensors.values()]

    @property
    def paged_tensors(self) -> list[Tensor]:
        """All memory in pages that sequences can share, [layers, pages, ...] each."""
        return [group.tensors[spec.name] for group in self.groups for spec in group.kv_cache_specs if spec.is_paged]

    @property
    def bounds(self) -> Tensor | None:
        """Per-page key bounds [layers, pages, Hkv, 2, D]; None without block selection."""
        return next((group.tensors["bounds"] for group in self.groups if "bounds" in group.tensors), None)

    def fold(self, span: Span) -> None:
        """Writes the key bounds of newly full pages, in all layers that store bounds."""
        for group in self.groups:
            if (bounds := group.tensors.get("bounds")) is not None:
                fold_blocks(
                    group.tensors["keys"], group.tensors.get("key_scales"), bounds, span.tables, span.starts,
                    span.before, span.after, span.max_tokens // self.placement.page_size + 1,
                    **self.placement.grid, part_bounds=group.tensors.get("part_bounds"),
                )  # fmt: skip

    def admit(self, *admissions: NewRequest) -> None:
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: NewRequest) -> None:
        slot = admission.slot
        if self._replays:
            self.accepted[slot].fill_(0)
        for group in self.groups:
            for spec in group.kv_cache_specs:
                tensor = group.tensors[spec.name]
                if spec.in_snapshots and admission.snapshot_index >= 0:
                    snapshot = self._snapshot(group, spec, admission.snapshot_index)
                    self._of_slot(tensor, spec, slot).copy_(snapshot, non_blocking=True)
                elif spec.per == "slot" or spec.window is not None:
                    # A prompt may resume after tokens that its ring lacks: zeros keep the first results finite.
                    self._of_slot(tensor, spec, slot).fill_(0)

    def move_slots(self, sources: Sequence[int], to: Sequence[int]) -> None:
        if self._replays:
            for source, slot in zip(sources, to, strict=True):
                self.accepted[slot] = self.accepted[source]
        for group in self.groups:
            for spec in group.kv_cache_specs:
                if not spec.is_paged:
                    for source, slot in zip(sources, to, strict=True):
                        tensor = group.tensors[spec.name]
                        self._of_slot(tensor, spec, slot).copy_(self._of_slot(tensor, spec, source))

    def on_prefill(self, chunk: PrefillCommitted) -> None:
        for window in self.rings.keys() - {None}:
            pages = self.rings[window]
            page, size = self.placement.page_size, pages * self.placement.page_size  # in tokens
            moved = []
            for part in chunk.parts:
                begin = part.columns[1:][-pages:].start * page  # the first column is in the ring already
                # Without the rest of the last page: a prompt that skips tokens would leave it in the ring unwritten.
                local = np.arange(begin, max(begin, part.end))
                first = (self._sizes.slots * pages + part.page - part.columns.start) * page
                moved.append(np.stack((first + local, part.row * size + local % size)))
            if (both := np.concatenate(moved, 1)).size:
                sources, to = to_device(torch.from_numpy(both), self.device)
                for group in self.groups:
                    for spec in group.kv_cache_specs:
                        if spec.window == window:
                            stored = group.tensors[spec.name]
                            tokens = stored.view(len(stored), -1, *stored.shape[3:])
                            tokens[:, to] = tokens[:, sources]
        self.fold(chunk.span)

    def save_snapshots(self, prompts: Sequence[PromptChunk]) -> None:
        """Saves the snapshots that end with a prefill chunk; call it after `on_prefill` of all observers."""
        for prompt in prompts:
            if prompt.snapshot_index >= 0:
                self._snap(prompt.slot, prompt.snapshot_index, prompt.evict_to)

    def _snap(self, slot: int, position: int, evict_to: int) -> None:
        """Takes a snapshot of a slot's states and windows; moves the one that was there to `evict_to`, if not -1."""
        for group in self.groups:
            for spec in group.kv_cache_specs:
                if spec.in_snapshots:
                    snapshot = self._snapshot(group, spec, position)
                    if evict_to >= 0:
                        # In stream order, so before the next line overwrites it.
                        self._snapshot(group, spec, evict_to).copy_(snapshot, non_blocking=True)
                    snapshot.copy_(self._of_slot(group.tensors[spec.name], spec, slot))

    def snapshot_memory(self, position: int) -> list[Tensor]:
        """Returns a snapshot's memory, contiguous uint8 tensors."""
        specs = ((group, spec) for group in self.groups for spec in group.kv_cache_specs if spec.in_snapshots)
        layers = (layer for group, spec in specs for layer in self._snapshot(group, spec, position))
        return [layer.reshape(-1).view(torch.uint8) for layer in layers if layer.numel()]

    def _snapshot(self, group: Group, spec: KVCacheSpec, position: int) -> Tensor:
        if position >= self.snapshots:
            return group.on_host[spec.name][position - self.snapshots]
        return self._of_slot(group.tensors[spec.name], spec, position - self.snapshots)

    def _of_slot(self, tensor: Tensor, spec: KVCacheSpec, slot: int) -> Tensor:
        """Returns a slot's entries in all layers of a group; the last ones, from -1 back, are snapshots."""
        if spec.window is None:
            return tensor[:, slot]
        pages = self.rings[spec.window]
        return tensor.narrow(1, slot * pages % tensor.shape[1], pages)

    def observes_step(self, kind: DecodeGraphKey) -> bool:
        return self.bounds is not None or self._replays

    def on_step(self, step: StepCommitted) -> None:
        if self._replays:
            self.accepted[: step.kind.rows] = step.span.after - step.span.before
        self.fold(step.span)

    def on_draft(self, live: Tensor) -> None:
        """Notes that a draft step has added the accepted rows to the states of the first rows, where `live` [rows]."""
        if self._replays:
            self.accepted[: len(live)].masked_fill_(live, 0)

    def close(self) -> None:
        """Frees host memory; no kernel may use the cache any more. A second call does nothing."""
        if self._host_states is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._host_states.close()

    def copy_pages(self, sources: Tensor, to: Tensor) -> None:
        for group in self.groups:
            for spec in group.kv_cache_specs:
                if spec.is_paged:
                    group.tensors[spec.name][:, to] = group.tensors[spec.name][:, sources]


def without_long_rings(layer_specs: Sequence[tuple[KVCacheSpec, ...]]) -> list[tuple[KVCacheSpec, ...]]:
    """Returns the specs, with windows of more than MAX_RING_TOKENS tokens in pages instead of rings."""
    return [
        tuple(replace(k, window=None) if k.window is not None and k.window > MAX_RING_TOKENS else k for k in specs)
        for specs in layer_specs
    ]


def with_bounds(
    layer_specs: Sequence[tuple[KVCacheSpec, ...]], dtype: str, parts: int = 1
) -> list[tuple[KVCacheSpec, ...]]:
    """Adds key bounds in `dtype` of each page, and of its `parts` if several, to layers without a window."""

    def more(specs: tuple[KVCacheSpec, ...]) -> tuple[KVCacheSpec, ...]:
        if (keys := next((k for k in specs if k.name == "keys" and k.window is None), None)) is None:
            return specs
        heads, width = keys.entry
        part_specs = [KVCacheSpec("part_bounds", (heads, parts, 2, width), dtype, "page")] if parts > 1 else []
        return (*specs, KVCacheSpec("bounds", (heads, 2, width), dtype, "page"), *part_specs)

    return [more(specs) for specs in layer_specs]


def ring(placement: KVPlacement, window: int, rows: int) -> int:
    """Counts the pages of a slot's ring for a window of `window` tokens and steps of `rows` tokens."""
    return placement.max_pages_touched(window + rows - 1)


def entries(spec: KVCacheSpec, placement: KVPlacement, sizes: EngineSizes) -> tuple[int, ...]:
    """Returns the shape of one layer's entries of a spec."""
    slots, rows, snapshots = sizes.slots, sizes.queries, sizes.snapshots
    if spec.window is not None:
        chunk_pages = placement.chunk_pages(sizes.chunk, slots)
        return (slots + snapshots) * ring(placement, spec.window, rows) + chunk_pages, placement.page_size
    return {
        "token": (sizes.pages, placement.page_size),
        "page": (sizes.pages,),
        "slot": (slots + snapshots,),
        "prompt": (slots + snapshots,),
        "row": (slots, rows),
        "recent": (slots + snapshots, rows + spec.before),
    }[spec.per]


def slot_entries(spec: KVCacheSpec, placement: KVPlacement, sizes: EngineSizes) -> tuple[int, ...]:
    """Returns the shape of one layer's entries of a slot, for specs of which snapshots have a copy."""
    if spec.window is not None:
        return ring(placement, spec.window, sizes.queries), placement.page_size
    return entries(spec, placement, sizes)[1:]


def slot_bytes(layer_specs: Sequence[tuple[KVCacheSpec, ...]], placement: KVPlacement, sizes: EngineSizes) -> int:
    """Counts the bytes of all data outside pages."""
    others = (k for specs in layer_specs for k in specs if not k.is_paged)
    return sum(k.bytes * math.prod(entries(k, placement, sizes)) for k in others)


def snapshot_bytes(layer_specs: Sequence[tuple[KVCacheSpec, ...]], placement: KVPlacement, sizes: EngineSizes) -> int:
    """Counts the bytes of a snapshot in host memory, a multiple of 16."""
    snapshot_specs = (k for specs in layer_specs for k in specs if k.in_snapshots)
    return -(-sum(k.bytes * math.prod(slot_entries(k, placement, sizes)) for k in snapshot_specs) // 16) * 16


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes: the GPU's, or this host's divided equally among its ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun sets it
