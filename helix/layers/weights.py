"""A rank's parameters, and which slice of which checkpoint tensor each one holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """One slice of one checkpoint tensor, and where it lands.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: the whole tensor's shape there.
        ranges: the part this rank holds, a range for each dimension.
        target: a view into a parameter, of that part's shape.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]
    target: Tensor


class Weights:
    """Collects a model's parameters as its layers are built; reading them in is the loader's work."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.slices: list[Slice] = []
        self.parameters: list[Tensor] = []

    def parameter(self, *shape: int) -> Tensor:
        parameter = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.parameters.append(parameter)
        return parameter

    def read(self, target: Tensor, name: str, shape: Sequence[int], *ranges: range) -> None:
        """Declares that `target` holds `ranges` of checkpoint tensor `name` (dimensions left out are whole)."""
        whole = tuple(range(size) for size in shape[len(ranges) :])
        self.slices.append(Slice(name, tuple(shape), (*ranges, *whole), target))
        assert target.shape == tuple(len(r) for r in self.slices[-1].ranges), (name, target.shape, ranges)

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)
