"""Parameters of a rank, and the slices of checkpoint tensors that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MXFP4_BLOCK = 32  # values of the last dimension that share one scale


@dataclass(frozen=True)
class Slice:
    """One slice of one checkpoint tensor, and the parameter that holds it.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: the whole tensor's shape in the checkpoint.
        ranges: this rank's part, a range per dimension; steps are for interleaved rows.
        target: a view into a parameter, of that part's shape.
        mxfp4: whether the tensor is stored as `{name}_blocks`, two 4-bit values per byte, and `{name}_scales`.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]
    target: Tensor
    mxfp4: bool = False

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the file from which it is read, and their shapes."""
        if not self.mxfp4:
            return {self.name: self.shape}
        scales = (*self.shape[:-1], self.shape[-1] // MXFP4_BLOCK)
        return {f"{self.name}_blocks": (*scales, MXFP4_BLOCK // 2), f"{self.name}_scales": scales}


class Weights:
    """Registry of a model's parameters, filled as its layers are built; the loader reads their values."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.slices: list[Slice] = []
        self.parameters: list[Tensor] = []

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocates an uninitialised parameter, by default of the model's dtype."""
        parameter = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.parameters.append(parameter)
        return parameter

    def bind(self, target: Tensor, name: str, shape: Sequence[int], *ranges: range, mxfp4: bool = False) -> None:
        """Declares that `target` holds `ranges` of checkpoint tensor `name`; omitted dimensions are whole."""
        whole = tuple(range(size) for size in shape[len(ranges) :])
        self.slices.append(Slice(name, tuple(shape), (*ranges, *whole), target, mxfp4))
        assert target.shape == tuple(len(r) for r in self.slices[-1].ranges), (name, target.shape, ranges)

    def bind_elsewhere(self, name: str, shape: Sequence[int]) -> None:
        """Declares a checkpoint tensor of which this rank holds nothing: every rank checks that all tensors exist."""
        self.bind(torch.empty(0, *shape[1:], device=self.device), name, shape, range(0))

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)
