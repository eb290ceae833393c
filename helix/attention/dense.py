"""Exact attention: all keys that the causal mask, the layer's window and its indexer allow."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy, LayerAttention
from helix.config import MAX_QUERIES
from helix.worker.kv_cache import LayerCache
from helix.worker.prefix_keys import PrefixKeys, tiled
from helix.worker.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.merge_prefixes import merge_prefixes
from kernels.attention.split_kv import PartialAttention
from kernels.mla.decode import decode_parts as mla_decode_parts
from kernels.mla.prefill import mla_prefill
from kernels.paged_keys import PagedKeys

# Query rows per KV head that read a shared prefix at once: the most that kernels take, and over e4m3, by H200 timings.
PREFIX_ROWS, FP8_PREFIX_ROWS = 128, 64


class DenseAttention(AttentionPolicy):
    """Reads all keys that the causal mask, the layer's window and its indexer allow."""

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        for window in windows:
            step.bounds(window)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        lo, hi = step.bounds(layer.window)
        if layer.latent is not None and layer.topk is not None and step.selected is not None:
            keys = cache.selection(layer.latent, step, layer.scale)
            return attend_selected(q, keys, prefill=step.cu_q is not None, sms=layer.sms(q.device), lane=layer.chunk)
        tables, latent = step.pages(layer.window), layer.latent

        if step.cu_q is not None:
            keys = _paged(cache, layer, tables, lo, hi, layer.sinks)
            prefill = flash_prefill if latent is None else mla_prefill
            max_k = step.max_k if layer.window is None else min(step.max_k, layer.window + step.max_q)
            return PartialAttention(*prefill(q, keys, step.cu_q, step.max_q, max_k))
        batch_shape = (len(step.slots), -1)
        lo, hi, rows = lo.view(batch_shape), hi.view(batch_shape), q.unflatten(0, batch_shape)
        if step.prefixes is None or layer.window is not None:
            return _decode(rows, _paged(cache, layer, tables, lo, hi, layer.sinks), layer, ready=layer.chunk > 0)
        first = step.first * rows.shape[1]
        at = slice(first, first + len(q))
        own = _paged(cache, layer, tables, step.prefixes.start[at].view(batch_shape), hi, layer.sinks)
        shared = attend_prefixes(q, cache, step.prefixes, at, layer)
        return merge_prefixes(_decode(rows, own, layer), shared, len(step.prefixes.tables))


def _paged(
    cache: LayerCache, layer: LayerAttention, tables: Tensor, lo: Tensor, hi: Tensor, sinks: Tensor | None
) -> PagedKeys:
    if layer.latent is None:
        return cache.paged(tables, lo, hi, layer.scale, sinks)
    return cache.paged_latents(layer.latent, tables, lo, hi, layer.scale)


def _decode(q: Tensor, keys: PagedKeys, layer: LayerAttention, ready: bool = False) -> PartialAttention:
    sms, lane = layer.sms(q.device), layer.chunk
    if layer.latent is None:
        return decode_parts(q, keys, sms=sms, early=True, lane=lane, ready=ready)
    return mla_decode_parts(q, keys, sms=sms, early=True, lane=lane)


def attend_prefixes(
    q: Tensor, cache: LayerCache, prefixes: PrefixKeys, rows: slice, layer: LayerAttention
) -> PartialAttention:
    """Attends queries [N, Hq, D] of a decode step's `rows` to G shared prefixes, each of which is read once.

    Every query counts as one of each prefix's. Those whose sequences do not share it read none of its keys, as on an
    empty shard, so that rows need no order, and shapes depend on the number of prefixes only.

    Returns:
        Partial outputs [G * tiles, n, Hq, D or R], for each prefix the N queries and padding.
    """
    count, (N, heads, _) = len(prefixes.tables), q.shape
    group = heads // (cache.keys.shape[2] if layer.latent is None else 1)
    is_fp8 = layer.latent is None and torch.float8_e4m3fn in (cache.keys.dtype, cache.values.dtype)
    most = FP8_PREFIX_ROWS if is_fp8 else PREFIX_ROWS
    tiles = -(-N // min(max(1, most // group), MAX_QUERIES))  # each of them is attended as a sequence
    tiles = next((n for n in range(tiles, 2 * tiles) if N % n == 0), tiles)  # padding would copy the queries
    keys = _paged(cache, layer, *prefixes.tiles(rows, tiles), None)
    # Bounds are made before the queries: the kernel may read them while the queries are copied.
    queries = tiled(q.expand(count, -1, -1, -1), tiles)
    return _decode(queries, keys, replace(layer, chunk=-1))  # another workspace than that of a sequence's own keys


def attend_selected(q: Tensor, keys: PagedKeys, *, prefill: bool, sms: int, lane: int) -> PartialAttention:
    """Attends each query of q [N, Hq, R + P] to its own latents: row n of the keys' table [N, width]."""
    if prefill:
        each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return PartialAttention(*mla_prefill(q, keys, each, 1, keys.table.shape[1]))
    row_keys = replace(keys, lo=keys.lo[:, None], hi=keys.hi[:, None])
    return mla_decode_parts(q[:, None], row_keys, sms=sms, early=True, lane=lane)
