"""KV cache of a model with indexers (DSA) whose latents lie in host memory: a step fetches what its queries select.

    host memory   latents of all tokens; new ones are appended over the link
    GPU           index keys of all tokens, which every step reads; scales of e4m3 latents; a buffer of fetched latents

Layers without an indexer read what the last one before them selected, so their latents are fetched while that one
attends. Queries select the same tokens as over a cache on the GPU, so tokens are the same.

A long prompt reads most of its sequence, layer by layer: row-sharded chunks gather its pages as they always do
(`helix.worker.row_shard`), others stage them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from helix.kv_placement import KVPlacement
from helix.worker.host_store import HostStore
from helix.worker.kv_cache import KVCache, LayerCache, entries
from helix.worker.kv_cache_spec import LATENTS, EngineSizes, KVCacheSpec
from helix.worker.step import Step
from kernels.offload.fetch_tokens import fetch_tokens
from kernels.paged_keys import PagedKeys


def with_latents_on_host(layer_specs: Sequence[tuple[KVCacheSpec, ...]], layers: int) -> list[tuple[KVCacheSpec, ...]]:
    """Moves the latents of the first `layers` layers to host memory, without their scales; draft layers come after."""
    return [
        tuple(replace(k, on_host=i < layers and k.name in LATENTS and not k.by_head) for k in specs)
        for i, specs in enumerate(layer_specs)
    ]


def host_page_bytes(layer_specs: Sequence[tuple[KVCacheSpec, ...]], page_size: int) -> int:
    """Counts the bytes of a page in host memory, over all layers."""
    return sum(k.bytes * page_size for specs in layer_specs for k in specs if k.on_host)


class FetchBuffer:
    """GPU memory for the latents that the queries of a decode step select, in layers that share a selection.

    Args:
        specs: of a token's latents.
        layers: most layers that share a selection.
        queries: most queries of a step.
        topk: tokens that a query selects.
    """

    def __init__(
        self, specs: Sequence[KVCacheSpec], layers: int, queries: int, topk: int, device: torch.device
    ) -> None:
        self.topk = topk
        self.tensors = {
            k.name: torch.empty(layers, queries * topk, *k.entry, dtype=getattr(torch, k.dtype), device=device)
            for k in specs
        }
        self.table = torch.arange(queries * topk, dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.arrivals: dict[tuple[int, int], torch.cuda.Event] = {}  # by layer of the selection, and first query

    @staticmethod
    def bytes(specs: Sequence[KVCacheSpec], layers: int, queries: int, topk: int) -> int:
        return queries * topk * (layers * sum(k.bytes for k in specs) + torch.int32.itemsize)


@dataclass(frozen=True, kw_only=True)
class OffloadedLatentsLayer(LayerCache):
    """One layer's part on this rank.

    Attributes:
        sharing: the latents of this layer and of those that share its selection, by name; the first one selects.
        position: this layer's among them.
    """

    sharing: Sequence[Mapping[str, Tensor]]
    position: int
    buffer: FetchBuffer

    over_link = True

    def selection(self, latent: int, step: Step, scale: float) -> PagedKeys:
        assert step.selected is not None
        slots, lo, hi = step.selected
        if step.cu_q is not None:
            return self._selection_of_prompts(latent, step, scale)
        buffer, first = self.buffer, step.first * step.max_q
        tokens = slice(first * buffer.topk, first * buffer.topk + slots.numel())
        if self.position == 0:
            self._fetch(0, tokens, slots, hi)
            self._fetch_ahead(first, tokens, slots, hi)
        else:
            if buffer.stream is not None:
                torch.cuda.current_stream(slots.device).wait_event(buffer.arrivals[self.position, first])
            # The step's own tokens come last in local order, and were not appended to this layer yet.
            self._fetch(self.position, tokens, slots, hi, last=min(step.max_q, slots.shape[1]))
        fetched = {name: data[self.position] for name, data in buffer.tensors.items()}
        return _in_pages_of_one(fetched, latent, buffer.table[tokens].view(slots.shape), lo, hi, scale)

    def _fetch_ahead(self, first: int, tokens: slice, slots: Tensor, counts: Tensor) -> None:
        """Fetches for the layers after this one while this one attends."""
        stream = self.buffer.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(slots.device))
        with torch.cuda.stream(stream):
            for position in range(1, len(self.sharing)):
                self._fetch(position, tokens, slots, counts)
                if stream is not None:
                    self.buffer.arrivals[position, first] = stream.record_event()

    def _fetch(self, position: int, tokens: slice, slots: Tensor, counts: Tensor, last: int | None = None) -> None:
        for name, data in self.sharing[position].items():
            target = self.buffer.tensors[name][position, tokens].view(*slots.shape, -1)
            fetch_tokens(_words(name, data), target.view(torch.int32), slots, counts, last)

    def _selection_of_prompts(self, latent: int, step: Step, scale: float) -> PagedKeys:
        # Fetches what the queries select, or all of their sequences if that is less.
        assert step.selected is not None
        slots, lo, hi = step.selected
        page, sequences = step.placement.page_size, len(step.slots) - step.padded
        columns = min(-(-step.max_k // page), step.block_tables.shape[1])
        latents = self.sharing[self.position]
        if slots.numel() <= sequences * columns * page:
            fetched = {}
            for name, data in latents.items():
                entry = data.shape[1] if name == "latent_scales" else data.shape[2]
                fetched[name] = data.new_empty(*slots.shape, entry)
                fetch_tokens(_words(name, data), fetched[name].view(torch.int32), slots, hi)
            table = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device).view(slots.shape)
            return _in_pages_of_one({k: d.flatten(0, 1) for k, d in fetched.items()}, latent, table, lo, hi, scale)
        pages = step.block_tables[:sequences, :columns].flatten().long()
        staged = {k: d.view(torch.uint8).index_select(0, pages).view(d.dtype) for k, d in latents.items()}
        place = torch.zeros(len(latents["latents"]), dtype=torch.int32, device=slots.device)
        place[pages] = torch.arange(len(pages), dtype=torch.int32, device=slots.device)
        moved = place[(slots // page).clamp(0, len(place) - 1).long()] * page + slots % page
        return LayerCache(self.index, staged, self.accepted).selected_latents(latent, moved, lo, hi, scale)


def _words(name: str, data: Tensor) -> Tensor:
    # [pages, page_size, words] int32
    return data.transpose(1, 2).view(torch.int32) if name == "latent_scales" else data.view(torch.int32)


def _in_pages_of_one(
    tensors: Mapping[str, Tensor], latent: int, table: Tensor, lo: Tensor, hi: Tensor, scale: float
) -> PagedKeys:
    # tensors [tokens, entry] by name
    tokens, scales, ropes = (tensors.get(name) for name in LATENTS)
    assert tokens is not None
    tokens = tokens.unsqueeze(1)
    return PagedKeys(
        tokens, tokens[..., :latent], table, lo, hi, scale,
        k_scale=None if scales is None else scales.unsqueeze(2), rope=None if ropes is None else ropes.unsqueeze(1),
    )  # fmt: skip


class OffloadedLatents(KVCache):
    """KV cache with latents in host memory; other arguments as in `KVCache`.

    Args:
        layer_specs: see `with_latents_on_host`.
        store: host memory, uint8, of `sizes.pages` pages of `host_page_bytes`; closed with this.
        selecting: by layer whose latents are in host memory: the layer whose indexer selects for it.
        topk: tokens that a query selects.
    """

    fetches = True
    remedy = "raise kv.offload_host_bytes and kv.offload_gpu_bytes, or layout.kvp"

    def __init__(
        self,
        layer_specs: Sequence[tuple[KVCacheSpec, ...]],
        placement: KVPlacement,
        sizes: EngineSizes,
        device: torch.device,
        store: HostStore,
        selecting: Mapping[int, int],
        topk: int,
    ) -> None:
        self.store, self._num_used_bytes = store, 0
        super().__init__(layer_specs, placement, sizes, device)
        self._selecting = selecting
        self._sharing: dict[int, list[dict[str, Tensor]]] = {}  # by selecting layer
        for index, first in selecting.items():
            tensors = super().layer(index).tensors
            self._sharing.setdefault(first, []).append({name: tensors[name] for name in tensors if name in LATENTS})
        sharing = max(map(len, self._sharing.values()))
        self.buffer = FetchBuffer(latents_of(layer_specs), sharing, sizes.slots * sizes.queries, topk, device)

    def _allocate(self, spec: KVCacheSpec, layers: int) -> Tensor:
        if not spec.on_host:
            return super()._allocate(spec, layers)
        assert self.store.tensor is not None
        shape = layers, *entries(spec, self.placement, self._sizes), *spec.entry
        begin = self._num_used_bytes
        self._num_used_bytes += prod(shape) * spec.bytes // prod(spec.entry)
        data = self.store.tensor.view(-1)[begin : self._num_used_bytes]
        return data.view(getattr(torch, spec.dtype)).view(shape)

    def layer(self, index: int, prefill: bool = False) -> LayerCache:
        layer, first = super().layer(index, prefill), self._selecting.get(index)
        if first is None:
            return layer
        return OffloadedLatentsLayer(
            index, layer.tensors, layer.accepted,
            sharing=self._sharing[first], position=index - first, buffer=self.buffer,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.store.close()


def latents_of(layer_specs: Sequence[tuple[KVCacheSpec, ...]]) -> list[KVCacheSpec]:
    """Returns the specs of a token's latents in a layer."""
    return [k for k in layer_specs[0] if k.name in LATENTS]
