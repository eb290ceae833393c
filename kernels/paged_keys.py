"""What the attention kernels read: keys and values in pages, which of them each query reads, how they are scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedKeys:
    """One layer's keys on this rank, as a batch of queries reads them.

    Query head h reads KV head `h // (Hq // Hkv)`. Local key i of sequence b lies in page `table[b, i // page_size]`,
    slot `i % page_size`. Causal, window and verify bounds are all `[lo, hi)`; the ranges of one sequence's queries
    together leave no gap. Keys and table entries outside them are never used, so they may hold anything.

    Attributes:
        k: [pages, page_size, Hkv, D], last dim contiguous. Latents: [pages, page_size, R + P], contiguous in a page.
        v: like `k`, with the same strides. Latents: the first R of the numbers in `k`.
        table: [B, max_pages] int32, rows contiguous. Where each KV head reads pages of its own: [B, Hkv, max_pages]; a
            negative entry is a page without keys.
        lo: [B, T] int32, first local key of each query, at least 0; in prefill [N].
        hi: like `lo`: one past the last; `lo >= hi` reads nothing.
        scale: factor on the scores, above 0.
        sinks: [Hq] fp32, contiguous, or None: each head's score of one more key, of value 0, that all its queries read.
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
    """Where a batch of queries leaves what it makes of each key: the best q.k over heads and queries, or their mean.

    A score is in units of its own, the same for all keys of a sequence, layer and KV head.

    Attributes:
        planes: [planes, pages, Hkv, page_size] fp16, contiguous in a page; the score of a key is the sum of its planes.
        table: [B, max_pages] int32, rows contiguous: the page of scores for each page of a sequence's keys.
        rows: which queries count. any: the best of all, over heads too; where rows need several tiles, each leaves its
            best in a plane. ends: the mean of the first and the last that read any key.
    """

    planes: torch.Tensor
    table: torch.Tensor
    rows: str
