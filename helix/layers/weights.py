"""A rank's parameters, and the slices of checkpoint tensors that they hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comm.base import Communicator
from comm.hopb import Pipeline
from helix.layers.specs import PACKED_BLOCK, Formats, MatrixFormat, unquantized
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
        offset: added to the tensor's values.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]
    target: Matrix
    offset: float = 0.0


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
        self.unpacked: dict[str, str] = {}  # names of quantized matrices that are not held so, without numbers -> why

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        parameter = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.parameters.append(parameter)
        return parameter

    def column_block(self, name: str) -> int:
        """Returns how many columns of a matrix must stay on one rank, lest it be unpacked."""
        matrix_format = self.formats(name)
        return PACKED_BLOCK if matrix_format is not None and matrix_format.packed else 1

    def matrix_format(self, names: Sequence[str], columns: range, total: int) -> MatrixFormat | None:
        """Returns the quantized format of a matrix with these columns of the tensors; None: in the model's dtype."""
        found = {self.formats(name) for name in names}
        if found <= {None}:
            return None
        matrix_format, why = next(iter(found)), ""
        if len(found) > 1 or matrix_format is None:
            why = "its parts are stored in several formats"
        elif matrix_format.kind == "e2m1" and self.dtype == torch.float16:
            why = "e2m1 is multiplied in bfloat16, not in float16"
        elif not matrix_format.supports(columns, total):
            why = "its columns on a rank are no whole blocks"
        if why:
            kinds = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight")) for name in names)
            self.unpacked[", ".join(kinds)] = why
            return None
        return matrix_format

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
        if begin + len(columns) <= group and matrix_format.scales != "uint8":  # one group
            begin, group = 0, len(columns)
        *several, rows, width = shape
        if not several:
            self.max_matrix_size = max(self.max_matrix_size, rows * width)
        kind, packed = matrix_format.kind, matrix_format.packed
        number, grid = torch.int32 if packed else torch.float8_e4m3fn, (*several, groups(begin, width, group), rows)
        return ScaledMatrix(
            self.parameter(*several, rows, width // 8 if packed else width, dtype=number),
            self.parameter(*grid, dtype=getattr(torch, matrix_format.scales)),
            group,
            begin,
            kind,
            self.parameter(*grid, dtype=torch.uint8) if matrix_format.zeros else None,
            self.parameter(*several, rows, dtype=torch.float32) if matrix_format.row_scales else None,
            matrix_format.fp8_rows,
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
        offset: float = 0.0,
    ) -> None:
        """Declares that `target` holds `ranges` of checkpoint tensor `name`; omitted dimensions are whole.

        target=None: this rank holds no part of it, but checks that the tensor exists.
        """
        if target is None:
            target, ranges = torch.empty(0, *shape[1:], device=self.device), (range(0),)
        whole = tuple(range(size) for size in shape[len(ranges) :])
        self.slices.append(Slice(name, tuple(shape), (*ranges, *whole), target, offset))
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
