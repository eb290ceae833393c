"""Exact attention: all keys that the causal mask, the layer's window and its indexer allow."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy, LayerAttention
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.flash_decode import decode_parts
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.split_kv import PartialAttention
from kernels.mla.decode import decode_parts as mla_decode_parts
from kernels.mla.prefill import mla_prefill
from kernels.paged_keys import PagedKeys


class DenseAttention(AttentionPolicy):
    """Reads all keys that the causal mask, the layer's window and its indexer allow."""

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        for window in windows:
            step.bounds(window)

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        lo, hi = step.bounds(layer.window)
        if layer.latent is not None and layer.topk is not None and (selected := step.selected) is not None:
            slots, *bounds = selected
            keys = cache.selected_latents(layer.latent, slots, bounds[0], bounds[1], layer.scale)
            return attend_selected(q, keys, prefill=step.cu_q is not None, sms=layer.sms(q.device), lane=layer.chunk)
        tables = step.pages(layer.window)
        latents = layer.latent is not None

        def paged(lo: Tensor, hi: Tensor) -> PagedKeys:
            if layer.latent is None:
                return cache.paged(tables, lo, hi, layer.scale, layer.sinks)
            return cache.paged_latents(layer.latent, tables, lo, hi, layer.scale)

        if step.cu_q is not None:
            prefill = mla_prefill if latents else flash_prefill
            max_k = step.max_k if layer.window is None else min(step.max_k, layer.window + step.max_q)
            return PartialAttention(*prefill(q, paged(lo, hi), step.cu_q, step.max_q, max_k))
        batch_shape = (len(step.slots), -1)
        keys = paged(lo.view(batch_shape), hi.view(batch_shape))
        q, sms, chunk = q.unflatten(0, batch_shape), layer.sms(q.device), layer.chunk
        if latents:
            return mla_decode_parts(q, keys, sms=sms, early=True, lane=chunk)
        return decode_parts(q, keys, sms=sms, early=True, lane=chunk, ready=chunk > 0)


def attend_selected(q: Tensor, keys: PagedKeys, *, prefill: bool, sms: int, lane: int) -> PartialAttention:
    """Attends each query of q [N, Hq, R + P] to its own latents: row n of the keys' table [N, width]."""
    if prefill:
        each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return PartialAttention(*mla_prefill(q, keys, each, 1, keys.table.shape[1]))
    row_keys = replace(keys, lo=keys.lo[:, None], hi=keys.hi[:, None])
    return mla_decode_parts(q[:, None], row_keys, sms=sms, early=True, lane=lane)
