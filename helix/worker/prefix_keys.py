"""Keys of shared prefixes, which a decode step reads once for all sequences that share them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PrefixKeys:
    """Local keys that the N tokens of a decode step read in G shared prefixes, in layers without a window.

    Attributes:
        tables: pages [G, P] int32 of the prefixes.
        lo, hi: the keys `[lo, hi)` that each token reads there [G, N] int32; none unless its sequence shares it.
        start: the first key that each token reads in its sequence's own pages [N] int32.
        made: results of `tiles`.
    """

    tables: Tensor
    lo: Tensor
    hi: Tensor
    start: Tensor
    made: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def tiles(self, rows: slice, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pages [G * tiles, P] and bounds [G * tiles, n] of tokens `rows`; made once for all layers."""
        key = rows.start, rows.stop, tiles
        if key not in self.made:
            pages = self.tables[:, None].expand(-1, tiles, -1).flatten(0, 1)
            lo, hi = (tiled(x[:, rows], tiles) for x in (self.lo, self.hi))
            self.made[key] = pages, lo, hi
        return self.made[key]


def tiled(x: Tensor, tiles: int) -> Tensor:
    """Cuts x [G, N, ...] into [G * tiles, ceil(N / tiles), ...], padded with zeros."""
    each = -(-x.shape[1] // tiles)
    more = each * tiles - x.shape[1]
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, more)) if more else x
    return x.reshape(-1, each, *x.shape[2:])
