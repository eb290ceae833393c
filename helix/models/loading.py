"""Loads this rank's slices of a Hugging Face checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from comm.loopback import LoopbackWorld
from helix.layers.specs import MXFP4_BLOCK, Formats, unquantized
from helix.layers.weights import Slice, Weights
from helix.layout import HelixLayout
from helix.models.checkpoint import BLOCK, KV_SCALES, TOWERS, UNUSED, CheckpointFiles, summarize
from helix.models.decoder import Decoder
from helix.models.spec import DecoderSpec
from kernels.scaled import E2M1, E4M3_MAX, ScaledMatrix, quantize_fp8

IGNORED = ("rotary_emb.inv_freq",)  # a computed buffer that some checkpoints contain
NUMBERS = ("BF16", "F16", "F32", "F64")  # safetensors' names of plain floating-point types
PACKED = ("U8",)  # safetensors' name of mxfp4's type
SCALES = (*NUMBERS, "F8_E8M0")


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
        wanted = {name: shape for s in slices for name, shape in s.stored.items()}
        scales = {name: self.scales[name] for name in wanted if name in self.scales}
        types = (
            dict.fromkeys(wanted, NUMBERS)
            | {name: PACKED for s in slices if s.mxfp4 for name in s.stored}
            | dict.fromkeys(scales, ("F8_E4M3",))
            | dict.fromkeys(scales.values(), SCALES)
        )
        missing = sorted(set(types) - set(self.shapes))
        ignored = IGNORED + KV_SCALES + (UNUSED if self.scales else ())
        unexpected = sorted(
            n for n in set(self.shapes) - set(types) if not n.endswith(ignored) and not n.startswith(unused + TOWERS)
        )
        misshaped = [
            f"{name} {list(self.shapes[name])}, expected {list(shape)}"
            for name, shape in sorted(wanted.items())
            if name in self.shapes and self.shapes[name] != shape
        ] + [
            f"{scale} {list(self.shapes[scale])} for {list(wanted[name])} in {self.scale_granularity(name)}"
            for name, scale in sorted(scales.items())
            if scale in self.shapes and self.block(name) is None
        ]
        mistyped = [
            f"{name} {self.dtypes[name]}, expected {' or '.join(types[name])}"
            for name in sorted(set(types) & set(self.dtypes))
            if self.dtypes[name] not in types[name]
        ]
        kinds = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped, "of another type": mistyped}
        problems = [f"{len(names)} {kind}: {summarize(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise ValueError(f"the weights in {self.path} do not match config.json; {'; '.join(problems)}")

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
            for done, s in enumerate(sorted(weights.slices, key=lambda s: self.files[next(iter(s.stored))]), 1):
                if 0 not in s.target.shape:
                    self._fill(s, stored)
                progress(done)

    def _fill(self, s: Slice, stored: Callable[[str], Any]) -> None:
        if s.mxfp4:
            _fill_mxfp4(s, *map(stored, s.stored))
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


def _fill_mxfp4(s: Slice, blocks: Any, scales: Any) -> None:
    # The slice's columns may begin inside a block.
    *rows, columns = s.ranges
    covering = range(columns.start // MXFP4_BLOCK, columns[-1] // MXFP4_BLOCK + 1)
    begin = columns.start - covering.start * MXFP4_BLOCK
    packed, block_scales = (
        read_part(blocks, (*rows, covering, range(MXFP4_BLOCK // 2))),
        read_part(scales, (*rows, covering)),
    )
    if isinstance(s.target, ScaledMatrix):  # as it is stored: columns begin and end between bytes
        s.target.data.copy_(packed.flatten(-2)[..., begin // 2 : (begin + len(columns)) // 2])
        s.target.scales.copy_(block_scales.mT)
    else:
        values = from_mxfp4(packed.to(s.target.device), block_scales.to(s.target.device))
        s.target.copy_(values[..., begin : begin + len(columns)])


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


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decodes blocks [..., n, 16] uint8, low nibble first, with scales [..., n] uint8 -> [..., 32 n] fp32.

    Source:
        OCP Microscaling Formats (MX) v1.0, section 5: E2M1 values, a power of two with bias 127 for each 32 of them.
    """
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)  # [..., n, 16, 2]
    values = torch.tensor(E2M1, device=blocks.device)[pairs.int()]
    return torch.ldexp(values, scales[..., None, None].int() - 127).flatten(-3)


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
    # Values of about 0.02: random bits as e2m1, or normally distributed e4m3.
    if target.packed:
        target.data.random_(generator=generator)
        target.scales.fill_(127 - 7)
    else:
        numbers = torch.empty(target.data.shape, dtype=torch.bfloat16, device=target.device)
        target.data.copy_(numbers.normal_(0.0, 64.0, generator=generator).clamp_(-E4M3_MAX, E4M3_MAX))
        target.scales.fill_(0.02 / 64)
