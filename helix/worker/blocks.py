"""Byte layout of a block, the unit of transfer between host and GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from helix.worker.kv_cache_spec import ITEMSIZE, KVCacheSpec

WORD = 4  # bytes
ALIGNED = 16  # bytes: alignment of each part of a block, for 16-byte loads


@dataclass(frozen=True)
class BlockLayout:
    """A page of one KV head in one layer: its keys, its values, then the scales if these are e4m3.

    Attributes:
        parts: in the order of their bytes.
    """

    page_size: int
    parts: tuple[KVCacheSpec, ...]

    @classmethod
    def of(cls, layer_specs: Iterable[Iterable[KVCacheSpec]], page_size: int) -> BlockLayout:
        """Creates the layout for specs that are the same in all layers without a window."""
        (parts,) = {tuple(k for k in specs if k.is_paged and k.per == "token") for specs in layer_specs} - {()}
        return cls(page_size, tuple(sorted(parts, key=lambda k: k.by_head)))

    @property
    def heads(self) -> int:
        return self.parts[0].entry[0]

    @property
    def words(self) -> int:
        """Number of 32-bit words of a block."""
        return sum(map(self._words, self.parts))

    @property
    def bytes(self) -> int:
        return self.words * WORD

    def pages(self, blocks: Tensor) -> dict[str, Tensor]:
        """Views blocks [..., n * heads, words] int32 as pages.

        Returns:
            By name, keys and values [..., n, page_size, heads, D], and scales [..., n, heads, page_size].
        """
        return self._views(blocks, self.heads, 1)

    def shared_by_heads(self, blocks: Tensor) -> dict[str, Tensor]:
        """Views blocks [..., n, words] as pages like `pages`, in which all heads share a block."""
        return self._views(blocks, 1, 0)

    def _views(self, blocks: Tensor, page: int, head: int) -> dict[str, Tensor]:
        found, begin = {}, 0
        for part in self.parts:
            end, width = begin + self._words(part), self._width(part)
            numbers = blocks[..., begin:end].view(getattr(torch, part.dtype))
            *outer, block, _ = numbers.stride()
            # Kernels compute with the strides, and torch would choose others for a single head.
            shape, strides = [self.page_size, self.heads, width], [width, head * block, 1]
            if part.by_head:
                shape, strides = [self.heads, self.page_size], [head * block, 1]
            count = numbers.shape[-2] // page
            strides = [*outer, page * block, *strides]
            found[part.name] = numbers.as_strided((*numbers.shape[:-2], count, *shape), strides)
            begin = end
        return found

    def _width(self, part: KVCacheSpec) -> int:
        return 1 if part.by_head else part.entry[1]

    def _words(self, part: KVCacheSpec) -> int:
        size = self.page_size * self._width(part) * ITEMSIZE[part.dtype]
        return -(-size // ALIGNED) * ALIGNED // WORD
