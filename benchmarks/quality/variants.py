"""Two ways to choose blocks for less that the product does not have, to learn what they would lose.

What stands for a block in 8 bits, rounded so that a bound stays one, halves what choosing reads; one choice for several
layers saves the choosing of all but the first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.placement import BlockBudget, Placement
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step

STORED = ("int8", "fp8")
FP8_MOST, FP8_LEAST_EXPONENT, FP8_BITS = 448.0, -6, 3  # e4m3: the largest number, the least exponent, the mantissa


def rounded(bounds: Tensor, stored: str) -> Tensor:
    """Bounds [..., 2, D] fp32 as 8 bits and a scale for each page and head keep them: maxima up, minima down."""
    most = bounds.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    most = most * (1 + 2**-20)  # the largest must not become one more than the largest whole number by a division
    if stored == "int8":
        step = most / 127
    else:
        scale = most / FP8_MOST
        exponent = (bounds / scale).abs().log2().floor().clamp(min=FP8_LEAST_EXPONENT)
        step = torch.exp2(exponent - FP8_BITS) * scale
    largest, smallest = (bounds / step).unbind(-2)
    whole = torch.stack((largest.ceil(), smallest.floor()), -2)
    return whole * step


class RoundedBounds(BlockSparseAttention):
    """Chooses by bounds as 8 bits keep them, `int8` or `fp8`."""

    def __init__(
        self,
        stored: str,
        budget: BlockBudget,
        placement: Placement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        assert stored in STORED
        super().__init__(budget, placement, max_length, device, comm)
        self.stored = stored

    def choose(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        # In fp32, where 8 bits and a scale are exact.
        return super().choose(
            q.float(),
            replace(cache, kept={**cache.kept, "bounds": rounded(cache.bounds.float(), self.stored)}),
            step,
            sms,
        )


class SharedChoice(BlockSparseAttention):
    """The first of every `layers` layers chooses for them all; the model has no layer with a window."""

    def __init__(
        self,
        layers: int,
        budget: BlockBudget,
        placement: Placement,
        max_length: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(budget, placement, max_length, device, comm)
        self.layers = layers
        self._layer = 0
        self._table: Tensor | None = None

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        super().prepare(step, windows)
        self._layer = 0

    def choose(self, q: Tensor, cache: LayerCache, step: Step, sms: int) -> Tensor:
        if self._layer % self.layers == 0 or self._table is None:
            self._table = super().choose(q, cache, step, sms)
        self._layer += 1
        return self._table
