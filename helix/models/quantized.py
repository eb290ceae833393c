"""Formats of quantised checkpoints: which scales a tensor has, and what its values are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helix.layers.weights import MXFP4_BLOCK, Kept, Slice
from kernels.scaled import E2M1, ScaledMatrix, quantised

# Methods whose tensors are e4m3 with scales: the key that tells their formats apart, and its values that are read.
FP8: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "fp8": ("fmt", (None, "e4m3", "float8_e4m3fn")),
    "fbgemm_fp8": ("fmt", (None,)),
    "modelopt": ("quant_algo", ("FP8",)),
    "compressed-tensors": ("format", ("float-quantized",)),
}
SUFFIXES = ("_scale_inv", "_scale")  # of a tensor's scales; its values are multiplied by either
# Scales of activations and caches, which stay unscaled.
UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale")
SUPPORTED = f"FP8 of {', '.join(FP8)} in matrices (e4m3, with scales), and mxfp4 of gpt-oss"
BLOCK = (128, 128)  # rows and columns that share a scale where weights are rounded to e4m3 here
# Routers and choices of tokens, which rounding would change, and gates of states, whose errors add up over all tokens.
IN_FULL = (
    ".gate.weight", ".router.weight", ".weights_proj.weight", ".in_proj_a.weight", ".in_proj_b.weight",
    ".in_proj_ba.weight",
)  # fmt: skip


@dataclass(frozen=True)
class WeightFormat:
    """Storage of a checkpoint's quantised weights, as its config states it.

    Attributes:
        method: its `quant_method`.
        block: rows and columns that share a scale; None: a scale for each matrix, or for each of its rows.
    """

    method: str
    block: tuple[int, int] | None = None

    @classmethod
    def from_config(cls, section: Any) -> WeightFormat | None:
        """Reads a `quantization_config`; None if there is none.

        Raises:
            ValueError: the format is not supported; the message names it.
        """
        if not section:
            return None
        if not isinstance(section, Mapping):
            raise refused(f"{section!r:.100}")
        method = str(section.get("quant_method", "unknown"))
        if method == "mxfp4":
            return cls(method)
        if method not in FP8:
            raise refused(f"{method:.100}")
        key, known = FP8[method]
        if section.get(key) not in known:
            raise refused(f"{method} with {key}={section.get(key)!r:.100}")
        block = section.get("weight_block_size")
        if method == "compressed-tensors":
            block = _block_of_groups(section.get("config_groups"))
        if block is None:
            return cls(method)
        if not isinstance(block, list | tuple) or [type(n) is int and n > 0 for n in block] != [True, True]:
            raise ValueError(f"quantization_config: blocks of {block!r:.100} must be two positive integers")
        return cls(method, (block[0], block[1]))

    def kept(self, name: str) -> Kept | None:
        """Returns how random weights of this format are kept; see `helix.layers.weights.Formats`."""
        if self.method != "mxfp4":
            return rounded(name)
        return Kept(MXFP4_BLOCK, packed=True) if ".experts." in name and not name.endswith(".weight") else None

    def scales_of(self, dtypes: Mapping[str, str]) -> dict[str, str]:
        """Returns the names of the scales of each e4m3 tensor among these; its stored type decides, not a list."""
        found = {}
        for name in (name for name, dtype in dtypes.items() if dtype == "F8_E4M3" and self.method in FP8):
            candidates = [f"{name}{suffix}" for suffix in SUFFIXES]
            found[name] = next((candidate for candidate in candidates if candidate in dtypes), candidates[0])
        return found

    def block_of(self, shape: Sequence[int], grid: Sequence[int]) -> tuple[int, int] | None:
        """Returns the rows and columns that share one of a grid of scales; None if the grid does not fit."""
        if len(shape) != 2:
            return None
        (rows, columns), grid = shape, tuple(grid)
        if self.block is not None:
            return self.block if grid == tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True)) else None
        if grid in ((), (1,), (1, 1)):
            return rows, columns
        return (1, columns) if grid in ((rows,), (rows, 1)) else None


def _block_of_groups(groups: Any) -> Any:
    """Returns the block size that all `config_groups` share; None: theirs are whole matrices or rows."""
    blocks = []
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
        if (bits, kind) != (8, "float") or strategy not in ("tensor", "channel", "block"):
            raise refused(f"compressed-tensors {name}: num_bits={bits!r}, type={kind!r}, strategy={strategy!r}")
        blocks.append(weights.get("block_structure") if strategy == "block" else None)
    if any(block != blocks[0] for block in blocks):
        raise refused(f"compressed-tensors with groups of different blocks {blocks}")
    return blocks[0] if blocks else None


def rounded(name: str) -> Kept | None:
    """Returns how a matrix is kept whose numbers are rounded to e4m3 here; see `helix.layers.weights.Formats`."""
    return None if name.endswith(IN_FULL) else Kept(BLOCK[1])


def refused(what: str) -> ValueError:
    """Returns the error for a format that is not read."""
    return ValueError(
        f"the checkpoint is quantised ({what}, in quantization_config), which is not supported here; "
        f"supported: {SUPPORTED}, and unquantised weights"
    )


def read_part(stored: Any, ranges: Sequence[range]) -> Tensor:
    """Reads ranges, none empty, of a tensor in a file; elements between the steps of a range are read and dropped."""
    between = stored[tuple(slice(r.start, r[-1] + 1) for r in ranges)]
    return between[tuple(slice(None, None, r.step) for r in ranges)]


def fp8_part(stored: Any, scales: Any, s: Slice, block: tuple[int, int]) -> Tensor:
    """Reads a slice of an e4m3 matrix as fp32, on the target's device; it may begin and end inside blocks.

    Raises:
        ValueError: a scale is not finite.
    """
    grid, columns = _scales(scales, s, block), s.ranges[1]
    places = torch.arange(columns.start, columns.stop, columns.step, device=grid.device) // block[1]
    grid = grid.index_select(1, places - columns.start // block[1])
    return grid.mul_(read_part(stored, s.ranges).to(grid.device).float())


def keep_fp8(stored: Any, scales: Any, s: Slice, block: tuple[int, int]) -> None:
    """Fills a slice's target from an e4m3 matrix, as it is stored.

    Raises:
        ValueError: a scale is not finite.
    """
    assert isinstance(s.target, ScaledMatrix)
    s.target.data.copy_(read_part(stored, s.ranges))
    s.target.scales.copy_(_scales(scales, s, block).mT)


def keep_rounded(stored: Any, s: Slice) -> None:
    """Fills a slice's target from an unquantised matrix, rounded to e4m3 in the whole matrix's blocks of `BLOCK`."""
    assert isinstance(s.target, ScaledMatrix)
    whole = [
        range(r.start // size * size, min(-(-(r[-1] + 1) // size) * size, total))
        for r, size, total in zip(s.ranges, BLOCK, s.shape, strict=True)
    ]
    made, begins = quantised(read_part(stored, whole).to(s.target.device), BLOCK), [r.start for r in whole]
    rows, columns = (slice(r.start - n, r[-1] + 1 - n, r.step) for r, n in zip(s.ranges, begins, strict=True))
    s.target.data.copy_(made.data[rows, columns])
    s.target.scales.copy_(made.scales[:, rows])


def keep_mxfp4(blocks: Any, scales: Any, s: Slice) -> None:
    """Fills a slice's target from an MXFP4 tensor, as it is stored; its columns begin and end between bytes."""
    assert isinstance(s.target, ScaledMatrix)
    *rows, columns = s.ranges
    covering = range(columns.start // MXFP4_BLOCK, columns[-1] // MXFP4_BLOCK + 1)
    packed = read_part(blocks, (*rows, covering, range(MXFP4_BLOCK // 2))).flatten(-2)
    begin = (columns.start - covering.start * MXFP4_BLOCK) // 2
    s.target.data.copy_(packed[..., begin : begin + len(columns) // 2])
    s.target.scales.copy_(read_part(scales, (*rows, covering)).mT)


def _scales(scales: Any, s: Slice, block: tuple[int, int]) -> Tensor:
    """Reads the scales of each of a slice's rows, fp32 [rows, groups], on the target's device.

    Raises:
        ValueError: a scale is not finite.
    """
    covering = [range(r.start // size, r[-1] // size + 1) for r, size in zip(s.ranges, block, strict=True)]
    grid = read_part(scales, covering[: len(scales.get_shape())]).float().to(s.target.device)
    if not grid.isfinite().all():
        raise ValueError(f"{s.name} has scales that are not finite (NaN or infinite): its file is damaged")
    rows = s.ranges[0]
    places = torch.arange(rows.start, rows.stop, rows.step, device=grid.device) // block[0] - covering[0].start
    return grid.reshape([len(r) for r in covering]).index_select(0, places)


def mxfp4_part(blocks: Any, scales: Any, s: Slice) -> Tensor:
    """Reads a slice of an MXFP4 tensor as fp32, on the target's device; its columns may begin inside a block."""
    *rows, columns = s.ranges
    covering = range(columns.start // MXFP4_BLOCK, columns[-1] // MXFP4_BLOCK + 1)
    packed = read_part(blocks, (*rows, covering, range(MXFP4_BLOCK // 2))).to(s.target.device)
    values = from_mxfp4(packed, read_part(scales, (*rows, covering)).to(s.target.device))
    begin = columns.start - covering.start * MXFP4_BLOCK
    return values[..., begin : begin + len(columns)]


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decodes blocks [..., n, 16] uint8, low nibble first, with scales [..., n] uint8 -> [..., 32 n] fp32.

    Source:
        OCP Microscaling Formats (MX) v1.0, section 5: E2M1 values, a power of two with bias 127 for each 32 of them.
    """
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)  # [..., n, 16, 2]
    values = torch.tensor(E2M1, device=blocks.device)[pairs.int()]
    return torch.ldexp(values, scales[..., None, None].int() - 127).flatten(-3)
