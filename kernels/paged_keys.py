"""Inputs of the attention kernels: paged keys and values, the range each query reads, and key scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.scaled_keys import scale_strides


@dataclass(frozen=True)
class PagedKeys:
    """One layer's keys and values on this rank, and the range of them that each query of a batch reads.

    Query head h reads KV head `h // (Hq // Hkv)`. Local key i of sequence b is in page `table[b, i // page_size]`, slot
    `i % page_size`. Causal, window and verify bounds are all `[lo, hi)`; the union of the ranges of a sequence's
    queries has no gap. Keys and table entries outside them are never used, and may be anything.

    Attributes:
        k: [pages, page_size, Hkv, D], last dim contiguous. Latents: [pages, page_size, R + P], contiguous in a page.
        v: like `k`, with the same strides, except that page and head strides double for values of half the size that
            share blocks with keys. Latents: the first R elements of `k`.
        table: [B, max_pages] int32, rows contiguous, or [B, Hkv, max_pages] if each KV head reads its own pages;
            negative: no page.
        lo: [B, T] int32, first local key of each query, at least 0; in prefill [N].
        hi: like `lo`, one past the last; `lo >= hi` reads nothing.
        scale: factor on the scores, above 0.
        sinks: [Hq] fp32, contiguous, or None: each head's score of an extra key of value 0 that all queries read.
        k_scale, v_scale: [pages, Hkv, page_size] fp32, same strides, last dim contiguous, for e4m3 keys and values, or
            None. Their pages may be longer than those of keys: slot i, counted across pages, is in page `i //
            page_size`. For e4m3 latents [pages, page_size, R]: k_scale [pages, ceil(R / 128), page_size], one per 128
            elements.
        rope: [pages, page_size, P], contiguous in a page: rope values of e4m3 latents; None otherwise.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    scale: float
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    rope: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def scale_page(self) -> int:
        """Tokens per page of scales; 1 without scales."""
        return 1 if self.v_scale is None else self.v_scale.shape[2]

    @property
    def latent_scale_page(self) -> int:
        """Tokens per page of latent scales; the page size without scales."""
        return self.page_size if self.k_scale is None else self.k_scale.shape[2]

    @property
    def page_strides(self) -> tuple[int, int]:
        """Page strides of latents and of their rope values; 0 where the latter are not a separate plane."""
        return self.k.stride(0), 0 if self.rope is None else self.rope.stride(0)

    @property
    def shape(self) -> dict[str, int]:
        """Compile-time arguments of the kernels: the strides of scales, and of values relative to keys."""
        strides = scale_strides(self.k_scale, self.v_scale)
        return dict(V_APART=self.v.stride(0) // self.k.stride(0), SCALE_PAGE=self.scale_page, **strides)

    def check_cache(self, dtype: torch.dtype) -> None:
        """Checks strides, and that keys and values are `dtype`, or e4m3 with scales; keys only if values are."""
        (page, *within), apart = self.k.stride(), self.shape["V_APART"]
        assert self.v.stride() == (page * apart, within[0], within[1] * apart, 1) and within[2] == 1
        for cache, scales in ((self.k, self.k_scale), (self.v, self.v_scale)):
            assert cache.dtype == (dtype if scales is None else torch.float8_e4m3fn)

    def check_latents(self, dtype: torch.dtype, width: int) -> None:
        """Checks that entries are `width` elements of `dtype`, or e4m3 latents with scales and rope values."""
        if self.k_scale is None:
            assert self.k.dtype == dtype and self.k.shape[2] == width
        else:
            assert self.rope is not None and self.rope.dtype == dtype and self.k.dtype == torch.float8_e4m3fn
            P = self.rope.shape[2]
            assert self.k.shape[2] + P == width and self.rope.stride()[1:] == (P, 1) and self.k_scale.is_contiguous()
        assert self.k.stride()[1:] == (self.k.shape[2], 1), f"a page must be contiguous, got strides {self.k.stride()}"

    def in_parts(self, parts: int) -> PagedKeys:
        """Returns pages cut into subblocks: subblock j of page i is page `i * part_stride + j`."""
        if parts == 1:
            return self
        return replace(self, k=_in_parts(self.k, parts), v=_in_parts(self.v, parts))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> PagedKeys:
        """Returns the same keys and values, with e4m3 as `dtype`: exact in bf16 and fp32."""
        k = _dequantize(self.k, self.k_scale, dtype)
        return replace(self, k=k, v=_dequantize(self.v, self.v_scale, dtype), k_scale=None, v_scale=None)


def part_stride(cache: torch.Tensor, parts: int) -> int:
    """Returns the page stride in subblocks, of which a page [page_size, heads, D] has `parts`."""
    apart, rest = divmod(cache.stride(0), cache.shape[1] // parts * cache.stride(1))
    assert rest == 0 and apart >= parts, "a page's stride must be a whole number of subblocks, at least a page of them"
    return apart


def _in_parts(cache: torch.Tensor, parts: int) -> torch.Tensor:
    pages, size, heads, width = cache.shape
    _, slot, head, _ = cache.stride()
    apart, each = part_stride(cache, parts), size // parts
    return cache.as_strided(((pages - 1) * apart + parts, each, heads, width), (each * slot, slot, head, 1))


def _dequantize(cache: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if scales is None:
        return cache
    return cache.to(dtype) * scales.transpose(1, 2).reshape(*cache.shape[:3], 1).to(dtype)


@dataclass(frozen=True)
class KeyScores:
    """Buffers for a batch's score of each key: the maximum of q.k over heads and queries, or the mean.

    Scores are comparable only among the keys of one sequence, layer and KV head.

    Attributes:
        planes: [planes, pages, Hkv, page_size] fp16, contiguous in a page; a key's score is the sum over planes.
        table: [B, max_pages] int32, rows contiguous: the page of scores for each page of a sequence's keys.
        rows: queries that count. any: the maximum over all, and over heads; if rows need several tiles, each tile
            writes its maximum to a plane. ends: the mean of the first and the last that read any key.
    """

    planes: torch.Tensor
    table: torch.Tensor
    rows: str
