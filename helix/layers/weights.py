"""A rank's parameters, and the slices of checkpoint tensors that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comm.base import Communicator
from comm.hopb import Pipeline
from helix.layers.specs import MXFP4_BLOCK, Formats, MatrixFormat, unquantized
from helix.layout import HelixLayout
from kernels.scaled import Matrix, ScaledMatrix, groups

NO_STREAMS = Pipeline(None)


@dataclass(frozen=True)
class Slice:
    """A slice of a checkpoint tensor, and the parameter that holds it.

    Attributes:
        shape: of the whole tensor in the checkpoint.
        ranges: this rank's part, a range per dimension; steps are for interleaved rows.
        target: a view into a parameter, of that part's shape.
        mxfp4: whether the tensor is stored as `{name}_blocks`, two 4-bit values per byte, and `{name}_scales`.
        offset: added to the tensor's values.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]
    target: Matrix
    mxfp4: bool = False
    offset: float = 0.0

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        if not self.mxfp4:
            return {self.name: self.shape}
        scales = (*self.shape[:-1], self.shape[-1] // MXFP4_BLOCK)
        return {f"{self.name}_blocks": (*scales, MXFP4_BLOCK // 2), f"{self.name}_scales": scales}


class Weights:
    """Registry of a model's parameters: layers declare them, the loader fills them.

    Args:
        weight_offset: added to norm weights, rounded to `dtype`.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, formats: Formats = unquantized, weight_offset: float = 0.0
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.formats = formats
        self.weight_offset = weight_offset
        self.slices: list[Slice] = []
        self.max_matrix_size = 0  # elements of the largest quantized matrix [R, K]: prefill unpacks one at a time
        self.parameters: list[Tensor] = []

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        parameter = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.parameters.append(parameter)
        return parameter

    def matrix_format(self, names: Sequence[str], columns: range, total: int) -> MatrixFormat | None:
        """Returns the quantized format of a matrix with these columns of the tensors; None: in the model's dtype."""
        found = {self.formats(name) for name in names}
        matrix_format = found.pop() if len(found) == 1 else None
        return matrix_format if matrix_format is not None and matrix_format.supports(columns, total) else None

    def matrix(self, *shape: int, names: Sequence[str], columns: range | None = None, total: int = 0) -> Matrix:
        """Allocates a matrix [..., R, K], quantized if all its tensors are, else in the model's dtype.

        Args:
            names: of its tensors in the checkpoint.
            columns: this rank's columns of the tensors, of `total`; None: all.
        """
        columns, total = (range(shape[-1]), shape[-1]) if columns is None else (columns, total)
        matrix_format = self.matrix_format(names, columns, total)
        if matrix_format is None or 0 in shape:
            return self.parameter(*shape)
        begin, group = columns.start % matrix_format.group, matrix_format.group
        if begin + len(columns) <= group and not matrix_format.packed:  # one group
            begin, group = 0, len(columns)
        *several, rows, width = shape
        if not several:
            self.max_matrix_size = max(self.max_matrix_size, rows * width)
        number, scale = (torch.uint8, torch.uint8) if matrix_format.packed else (torch.float8_e4m3fn, torch.float32)
        return ScaledMatrix(
            self.parameter(*several, rows, width // 2 if matrix_format.packed else width, dtype=number),
            self.parameter(*several, groups(begin, width, group), rows, dtype=scale),
            group,
            begin,
        )

    def norm_weight(self, name: str, total: int, parts: Sequence[range] | None = None) -> Tensor:
        """Allocates and binds a norm weight: the concatenated `parts` of a tensor [total]; None: all of it."""
        parts = [range(total)] if parts is None else parts
        norm_weight = self.parameter(sum(map(len, parts)))
        for target, part in zip(norm_weight.split([len(r) for r in parts]), parts, strict=True):
            self.bind(target, name, (total,), part, offset=self.weight_offset)
        return norm_weight

    def bind(
        self,
        target: Matrix | None,
        name: str,
        shape: Sequence[int],
        *ranges: range,
        mxfp4: bool = False,
        offset: float = 0.0,
    ) -> None:
        """Declares that `target` holds `ranges` of checkpoint tensor `name`; omitted dimensions are whole.

        target=None: this rank holds no part of it, but checks that the tensor exists.
        """
        if target is None:
            target, ranges = torch.empty(0, *shape[1:], device=self.device), (range(0),)
        whole = tuple(range(size) for size in shape[len(ranges) :])
        self.slices.append(Slice(name, tuple(shape), (*ranges, *whole), target, mxfp4, offset))
        assert tuple(target.shape) == tuple(len(r) for r in self.slices[-1].ranges), (name, target.shape, ranges)

    @property
    def bytes_by_dtype(self) -> dict[torch.dtype, int]:
        found = {self.dtype: 0}
        for p in self.parameters:
            found[p.dtype] = found.get(p.dtype, 0) + p.numel() * p.element_size()
        return found

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


@dataclass(frozen=True)
class ModelShard:
    """What layers need to build a rank's shard of a model.

    Attributes:
        comm: the ranks that share a layer: all of them; in mode dp, for attention and norms, only this one.
        pipeline: runs the HOP-B chunks of attention.
    """

    weights: Weights
    comm: Communicator
    layout: HelixLayout
    pipeline: Pipeline = NO_STREAMS
