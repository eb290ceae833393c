"""Inputs of the attention kernels: paged keys and values, the range each query reads, and key scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedKeys:
    """One layer's keys and values on this rank, and the range of them that each query of a batch reads.

    Query head h reads KV head `h // (Hq // Hkv)`. Local key i of sequence b lies in page `table[b, i // page_size]`,
    slot `i % page_size`. Causal, window and verify bounds are all `[lo, hi)`; the union of the ranges of a sequence's
    queries has no gap. Keys and table entries outside them are never used, so they may hold anything.

    Attributes:
        k: [pages, page_size, Hkv, D], last dim contiguous. Latents: [pages, page_size, R + P], contiguous in a page.
        v: like `k`, with the same strides. Latents: the first R of the numbers in `k`.
        table: [B, max_pages] int32, rows contiguous. If each KV head reads its own pages: [B, Hkv, max_pages]; a
            negative entry is a page without keys.
        lo: [B, T] int32, first local key of each query, at least 0; in prefill [N].
        hi: like `lo`: one past the last; `lo >= hi` reads nothing.
        scale: factor on the scores, above 0.
        sinks: [Hq] fp32, contiguous, or None: each head's score of an additional key of value 0 that all queries read.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    scale: float
    sinks: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True)
class KeyScores:
    """Buffers for a batch's score of each key: the maximum of q.k over heads and queries, or the mean.

    Scores are comparable only among the keys of one sequence, layer and KV head.

    Attributes:
        planes: [planes, pages, Hkv, page_size] fp16, contiguous in a page; the score of a key is the sum of its planes.
        table: [B, max_pages] int32, rows contiguous: the page of scores for each page of a sequence's keys.
        rows: the queries that count. any: the maximum of all, over heads too; if rows need several tiles, each tile
            writes its maximum to a plane. ends: the mean of the first and the last that read any key.
    """

    planes: torch.Tensor
    table: torch.Tensor
    rows: str
