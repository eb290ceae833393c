"""Loads this rank's slices of a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comm.loopback import LoopbackWorld
from helix.layers.specs import NVFP4, Formats, unquantized
from helix.layers.weights import Slice, Weights
from helix.layout import HelixLayout
from helix.models.checkpoint import BLOCK, KV_SCALES, TOWERS, UNUSED, CheckpointFiles, summarize
from helix.models.decoder import Decoder
from helix.models.quantized_tensors import NUMBERS, Plane, StoredMatrix
from helix.models.spec import DecoderSpec
from kernels.scaled import E4M3_MAX, ScaledMatrix, decode, from_ue8m0, matrix_rows, pack, quantize_fp8, to_ue5m3

IGNORED = ("rotary_emb.inv_freq",)  # a computed buffer that some checkpoints contain
SCALES = (*NUMBERS, "F8_E8M0")
LAYER = re.compile(r"model\.layers\.\d+\.")
CHUNK = 1 << 22  # elements that are decoded at a time
MAX_UE8M0 = 127 + 65  # of packed weights: beyond it bf16 overflows, see `kernels.packed_sm90`


class Checkpoint(CheckpointFiles):
    """`CheckpointFiles` that can load weights; arguments and errors as there."""

    def whole(self, name: str) -> torch.Tensor:
        with self.open(self.files[name], "pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(self.stored[name])
            return tensor

    def check(self, slices: list[Slice], unused: tuple[str, ...] = ()) -> None:
        """Checks the checkpoint's tensors against those that a model needs.

        Args:
            unused: prefixes of further tensors that the checkpoint may have.

        Raises:
            ValueError: lists every tensor that is missing, unexpected, misshaped or of an unsupported type.
        """
        wanted = {s.name: s.shape for s in slices}
        quantized = {name: self.quantized[name] for name in wanted if name in self.quantized}
        scales = {name: self.scales[name] for name in wanted if name in self.scales}
        plain = {name: shape for name, shape in wanted.items() if name not in quantized}
        tensors = {t: each for name, of in quantized.items() for t, each in of.expected(wanted[name]).items()}
        types = (
            dict.fromkeys(plain, NUMBERS)
            | dict.fromkeys(scales, ("F8_E4M3",))
            | dict.fromkeys(scales.values(), SCALES)
            | {tensor: types for tensor, (types, _) in tensors.items()}
        )
        missing = sorted(set(types) - set(self.shapes))
        ignored = IGNORED + KV_SCALES + (UNUSED if self.scales or self.quantized else ())
        unused = tuple(prefix for prefix in unused if not LAYER.fullmatch(prefix) or self._is_nextn(prefix))
        unexpected = sorted(
            n for n in set(self.shapes) - set(types) if not n.endswith(ignored) and not n.startswith(unused + TOWERS)
        )
        misshaped = [
            f"{name} {list(self.shapes[name])}, expected {list(shape)}"
            for name, shape in sorted(plain.items())
            if name in self.shapes and self.shapes[name] != shape
        ] + [
            f"{scale} {list(self.shapes[scale])} for {list(wanted[name])} in {self.scale_granularity(name)}"
            for name, scale in sorted(scales.items())
            if scale in self.shapes and self.block(name) is None
        ]
        for name, matrix in sorted(quantized.items()):
            misshaped += self._misshaped(matrix, wanted[name])
        mistyped = [
            f"{name} {self.dtypes[name]}, expected {' or '.join(types[name])}"
            for name in sorted(set(types) & set(self.dtypes))
            if self.dtypes[name] not in types[name]
        ]
        kinds = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped, "of another type": mistyped}
        problems = [f"{len(names)} {kind}: {summarize(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise ValueError(f"the weights in {self.path} do not match config.json; {'; '.join(problems)}")

    def _is_nextn(self, layer: str) -> bool:
        # Whether a layer after the last one is for MTP. Else it is one of the model's, and config.json counts too few.
        own = f"{layer}eh_proj.", f"{layer}enorm.", f"{layer}hnorm."
        return any(name.startswith(own) for name in self.shapes)

    def _misshaped(self, matrix: StoredMatrix, shape: Sequence[int]) -> list[str]:
        numbers = matrix.base + matrix.layout.numbers.suffix
        expected = {name: shapes for name, (_, shapes) in matrix.expected(shape).items()}
        bits = matrix.bits(shape, self.shapes[numbers])
        # Fewer than eight columns fill a word as more bits would.
        fits = self.shapes[numbers] in expected[numbers]
        if matrix.layout.format.kind == "int4" and bits in (2, 3, 8) and not fits:
            return [f"{numbers} {list(self.shapes[numbers])} has {bits} bits for each of {list(shape)}, supported: 4"]
        found = [
            f"{name} {list(self.shapes[name])}, expected {list(shapes[0])}"
            for name, shapes in sorted(expected.items())
            if name in self.shapes and shapes and self.shapes[name] not in shapes
        ]
        scales = matrix.base + matrix.layout.scales.suffix
        if matrix.format is None and scales in self.shapes and not found:
            sizes = " or ".join(map(str, sorted(self.format.sizes))) if self.format else "no known size"
            found.append(f"{scales} {list(self.shapes[scales])} for {list(shape)} in groups of {sizes}")
        return found

    def load(self, weights: Weights, progress: Callable[[int], None] = lambda done: None) -> None:
        """Fills the parameters one slice at a time, directly from the file, without a second copy of the weights.

        Args:
            progress: called with the number of slices done.
        """
        with ExitStack() as stack:
            shards: dict[str, Any] = {}

            def stored(name: str) -> Any:
                file = self.files[name]
                if file not in shards:
                    shards[file] = stack.enter_context(self.open(file, "pt"))
                return shards[file].get_slice(self.stored[name])

            # Sorted by file, for sequential reads.
            for done, s in enumerate(sorted(weights.slices, key=lambda s: self._file(s.name)), 1):
                if 0 not in s.target.shape:
                    self._fill(s, stored)
                progress(done)

    def _file(self, name: str) -> str:
        return self.files[self.quantized[name].tensors[0] if name in self.quantized else name]

    def _fill(self, s: Slice, stored: Callable[[str], Any]) -> None:
        if (matrix := self.quantized.get(s.name)) is not None:
            _check_columns(s, matrix, stored)
            *stack, rows, _ = s.ranges
            size = max(1, CHUNK // s.shape[-1])
            for first in range(0, len(rows), size):
                end = min(first + size, len(rows))
                ranges = *stack, rows[first:end], s.ranges[-1]
                _fill_quantized(replace(s, ranges=ranges, target=matrix_rows(s.target, first, end)), matrix, stored)
        elif s.name in self.scales:
            block = self.block(s.name)
            assert block is not None, f"check refuses {s.name}"
            _fill_fp8(s, stored(s.name), stored(self.scales[s.name]), block)
        elif isinstance(s.target, ScaledMatrix):
            _fill_rounded(s, s.target, stored(s.name))
        else:
            s.target.copy_(read_part(stored(s.name), s.ranges))
            if s.offset:
                s.target.add_(s.offset)


def read_part(stored: Any, ranges: Sequence[range]) -> Tensor:
    """Reads non-empty ranges of a tensor in a file; reads and drops the elements between the steps of a range."""
    between = stored[tuple(slice(r.start, r[-1] + 1) for r in ranges)]
    return between[tuple(slice(None, None, r.step) for r in ranges)]


def _fill_fp8(s: Slice, stored: Any, scales: Any, block: tuple[int, int]) -> None:
    # The slice may begin and end inside blocks; of a stack of matrices, it is of one.
    numbers, grid, columns = read_part(stored, s.ranges).flatten(0, -2), _scales(scales, s, block), s.ranges[-1]
    if isinstance(s.target, ScaledMatrix):  # as it is stored
        s.target.data.copy_(numbers)
        s.target.scales.copy_(grid.mT)
    else:
        places = torch.arange(columns.start, columns.stop, columns.step, device=grid.device) // block[1]
        grid = grid.index_select(1, places - columns.start // block[1])
        s.target.copy_(grid.mul_(numbers.to(grid.device).float()))


def _fill_rounded(s: Slice, target: ScaledMatrix, stored: Any) -> None:
    # Rounds an unquantized matrix, or one of a stack, to e4m3, in the whole matrix's blocks of `BLOCK`.
    *stack, _, _ = s.ranges
    whole = [
        range(r.start // size * size, min(-(-(r[-1] + 1) // size) * size, total))
        for r, size, total in zip(s.ranges[-2:], BLOCK, s.shape[-2:], strict=True)
    ]
    numbers, begins = read_part(stored, (*stack, *whole)).flatten(0, -2), [r.start for r in whole]
    made = quantize_fp8(numbers.to(target.device), BLOCK)
    rows, columns = (slice(r.start - n, r[-1] + 1 - n, r.step) for r, n in zip(s.ranges[-2:], begins, strict=True))
    target.data.copy_(made.data[rows, columns])
    target.scales.copy_(made.scales[:, rows])


def _check_columns(s: Slice, matrix: StoredMatrix, stored: Callable[[str], Any]) -> None:
    # What tensors say of a matrix as a whole.
    layout, (rows, columns) = matrix.layout, s.shape[-2:]
    if matrix.has(layout.weight_shape):
        told = stored(f"{matrix.base}{layout.weight_shape}")[:].tolist()
        if told != [rows, columns]:
            raise ValueError(f"{matrix.base}{layout.weight_shape} is {told}, but config.json needs {[rows, columns]}")
    if matrix.has(layout.group_index):
        name = f"{matrix.base}{layout.group_index}"
        if not torch.equal(stored(name)[:].long(), torch.arange(columns) // matrix.group):
            raise ValueError(
                f"{name} assigns columns to groups out of order (desc_act or actorder), which is not supported: "
                f"quantize with desc_act=false, or actorder=static"
            )


def _fill_quantized(s: Slice, matrix: StoredMatrix, stored: Callable[[str], Any]) -> None:
    # The slice may begin and end inside words and groups.
    layout, group, target, columns = matrix.layout, matrix.group, s.target, s.ranges[-1]
    assert matrix.format is not None, f"check refuses {s.name}"
    groups = range(columns.start // group, columns[-1] // group + 1)
    begin = columns.start - groups.start * group

    def read(plane: Plane, of: range) -> Tensor:
        return _read_plane(stored(matrix.base + plane.suffix), plane, (*s.ranges[:-1], of), target.device)

    numbers, scales, zeros, row_scales = read(layout.numbers, columns), read(layout.scales, groups), None, None
    if matrix.zeros != "unused":
        assert layout.zeros is not None
        zeros = read(layout.zeros, groups)
        zeros = zeros + 1 & 15 if matrix.zeros == "minus_one" else zeros
    damaged = scales == 255 if scales.dtype == torch.uint8 else ~scales.float().isfinite()
    if layout.second is not None:
        second = stored(matrix.base + layout.second)[...].reshape(-1)
        second = second if len(second) == 1 else second[s.ranges[0].start : s.ranges[0].stop]
        second = (1 / second if layout.divides else second).to(target.device)
        row_scales = second[:, None].expand(numbers.shape[:-1]) if numbers.dim() == 3 else second.expand(len(numbers))
        damaged = damaged.any() | ~second.isfinite().all()
    if damaged.any():
        raise ValueError(f"{s.name} has scales that are NaN or infinite: its file is damaged")
    if not isinstance(target, ScaledMatrix):
        scales = from_ue8m0(scales) if scales.dtype == torch.uint8 else scales
        values = decode(numbers, scales, matrix.format.kind, group, begin, zeros, row_scales)
        if target.dtype == torch.float16 and values.numel() and values.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"{s.name} has values beyond float16: set model.dtype=bfloat16")
        target.copy_(values)
        return
    if matrix.format == NVFP4:  # UE5M3 has neither signs nor zero
        of = (begin + torch.arange(len(columns), device=numbers.device)) // group
        numbers = numbers ^ (scales.float() < 0).to(torch.uint8)[..., of] * 8
        numbers = numbers * (scales.float() != 0)[..., of]
        scales = to_ue5m3(torch.where(scales.float() == 0, 1.0, scales.float().abs()))
    elif not target.packed:
        scales = from_ue8m0(scales)
    elif target.kind == "e2m1" and scales.max() > MAX_UE8M0:
        raise ValueError(f"{s.name} has a scale above 2^65, which kernels for packed weights cannot hold")
    target.data.copy_(pack(numbers, target.kind) if target.packed else numbers)
    target.scales.copy_(scales.mT)
    if target.zeros is not None:
        assert zeros is not None
        target.zeros.copy_(zeros.mT)
    if target.row_scales is not None:
        assert row_scales is not None
        target.row_scales.copy_(row_scales)


def _read_plane(stored: Any, plane: Plane, ranges: Sequence[range], device: torch.device) -> Tensor:
    # A part [..., R, C] of a plane: numbers as stored, or 4-bit codes as uint8.
    *stack, rows, cols = ranges
    along = rows if plane.packed == "rows" else cols
    words = range(along.start // plane.count, along[-1] // plane.count + 1) if plane.count > 1 else along
    picked = (words, cols) if plane.packed == "rows" else (rows, words)
    if plane.blocks:  # [..., rows, n, 16]
        blocks = range(words.start // 16, words[-1] // 16 + 1)
        part = read_part(stored, (*stack, rows, blocks, range(16))).to(device).flatten(-2)
        part = part[..., words.start - 16 * blocks.start :][..., : len(words)]
    else:
        part = read_part(stored, (*stack, *(picked[::-1] if plane.transposed else picked))).to(device)
        part = part.mT if plane.transposed else part
    if part.dtype == torch.float8_e8m0fnu:
        return part.view(torch.uint8)
    if plane.count == 1:
        return part
    places = plane.places or range(plane.count)
    dim = -2 if plane.packed == "rows" else -1
    codes = torch.stack([(part >> 4 * place & 15).to(torch.uint8) for place in places], dim).flatten(dim - 1, dim)
    indices = torch.arange(along.start, along.stop, along.step, device=device) - words.start * plane.count
    return codes.index_select(dim, indices)


def _scales(scales: Any, s: Slice, block: tuple[int, int]) -> Tensor:
    # Per row of the slice: fp32 [rows, groups].
    *stack, rows, columns = s.ranges
    assert not stack or [len(r) for r in stack] == [1], "experts are bound one at a time"
    covering = [range(r.start // size, r[-1] // size + 1) for r, size in zip((rows, columns), block, strict=True)]
    one, dims = range(1), len(scales.get_shape())
    # ModelOpt stores the scales of blocks as [rows, 1, columns, 1].
    of_dims = [covering[0], one, covering[1], one] if dims == 4 else [*stack, *covering][:dims]
    grid = read_part(scales, of_dims).float().to(s.target.device)
    if not grid.isfinite().all():
        raise ValueError(f"{s.name} has scales that are NaN or infinite: its file is damaged")
    places = torch.arange(rows.start, rows.stop, rows.step, device=grid.device) // block[0] - covering[0].start
    return grid.reshape([len(r) for r in covering]).index_select(0, places)


def weights_of(
    spec: DecoderSpec, layout: HelixLayout, rank: int, dtype: torch.dtype, formats: Formats = unquantized
) -> Weights:
    """Returns a rank's weight declarations, on the meta device."""
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))  # only for its rank
    return Decoder(spec, layout, comm, dtype, torch.device("meta"), formats).weights


def is_untrained(weights: Weights) -> bool:
    """Returns whether all norm weights are 1, as before training: then the weights are random."""
    norms = [s.target for s in weights.slices if s.name.endswith("norm.weight") and isinstance(s.target, torch.Tensor)]
    return bool(norms) and all(bool(norm.eq(1).all()) for norm in norms)


def randomize(weights: Weights, seed: int) -> None:
    """Fills weights with random values; replicated slices are equal on all ranks, as from a checkpoint."""
    for s in weights.slices:
        if 0 in s.target.shape:
            continue
        generator = torch.Generator(device=s.target.device)
        generator.manual_seed(zlib.crc32(f"{seed} {s.name} {s.ranges}".encode()))
        if isinstance(s.target, ScaledMatrix):
            _randomize_scaled(s.target, generator)
        elif s.name.endswith("norm.weight"):
            s.target.fill_(1.0)
        else:
            s.target.normal_(0.0, 0.02, generator=generator)


def _randomize_scaled(target: ScaledMatrix, generator: torch.Generator) -> None:
    # Values of about 0.02: random codes, or normally distributed e4m3.
    size = 0.02
    if target.packed:
        target.data.random_(-(1 << 31), 1 << 31, generator=generator)
        size /= 4  # of codes
    else:
        numbers = torch.empty(target.data.shape, dtype=torch.bfloat16, device=target.device)
        target.data.copy_(numbers.normal_(0.0, 64.0, generator=generator).clamp_(-E4M3_MAX, E4M3_MAX))
        size /= 64
    if target.zeros is not None:
        target.zeros.random_(7, 10, generator=generator)
    if target.row_scales is not None:
        target.scales.fill_(9 << 3)  # 1, as UE5M3
        target.row_scales.fill_(size)
    else:
        target.scales.fill_(127 + round(math.log2(size)) if target.scales.dtype == torch.uint8 else size)
