"""How checkpoints store quantized matrices: names, types and packing of their tensors, as a table. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from helix.layers.specs import MXFP4, NVFP4, MatrixFormat

NUMBERS = ("BF16", "F16", "F32", "F64")  # safetensors' names of plain floating-point types
SCALE_TYPES: dict[str, Literal["bfloat16", "float16", "float32"]] = {"BF16": "bfloat16", "F16": "float16"}
MXFP8 = MatrixFormat(MXFP4.group)
WORD = 8  # codes of an int32 word
ALIGNED = 3  # `Layout.score` of numbers and scales of as many rows

Zeros = Literal["stored", "minus_one", "unused"]


@dataclass(frozen=True)
class Plane:
    """A tensor of a matrix [..., rows, columns]: a value for each element, or for each row and group of columns.

    Attributes:
        suffix: of the tensor's name, after the module's.
        types: safetensors' names of its type.
        count: values of one stored element, four bits each, the first of them lowest.
        packed: dimension along which those lie.
        transposed: stored as [..., columns, rows].
        places: for each value, in which four bits it lies; None: in order.
        blocks: stored as [..., rows, n, 16], blocks of 32 columns.
    """

    suffix: str
    types: tuple[str, ...]
    count: int = 1
    packed: Literal["rows", "columns"] = "columns"
    transposed: bool = False
    places: tuple[int, ...] | None = None
    blocks: bool = False

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the tensor's shape for a plane [..., rows, columns]."""
        *stack, rows, columns = shape
        if self.packed == "rows":
            rows = -(-rows // self.count)
        else:
            columns = -(-columns // self.count)
        if self.blocks:
            return *stack, rows, columns // 16, 16
        return (*stack, columns, rows) if self.transposed else (*stack, rows, columns)

    def shape(self, stored: Sequence[int]) -> tuple[int, ...] | None:
        """Inverts `stored_shape`, but for what fills the last word; None: not such a tensor."""
        if len(stored) < (3 if self.blocks else 2):
            return None
        *stack, rows, columns = (*stored[:-2], stored[-2] * stored[-1]) if self.blocks else stored
        if self.transposed:
            rows, columns = columns, rows
        if self.packed == "rows":
            return *stack, rows * self.count, columns
        return *stack, rows, columns * self.count


@dataclass(frozen=True)
class Layout:
    """A way to store quantized matrices.

    Attributes:
        title: for messages.
        numbers: e4m3, or codes of e2m1 or int4.
        scales: of each row and group of columns.
        format: of the matrix; for int4 only its kind is known.
        zeros: zero points of int4.
        second: suffix of a scale of the whole matrix.
        divides: whether one divides by it.
        group_index: suffix of a tensor with the group of each column.
        weight_shape: suffix of a tensor with the numbers of rows and columns.
        module: what precedes suffixes: the tensor's name here without ".weight", or all of it.
        method: `quant_method` of its zero points; None: it has no zero points.
    """

    title: str
    numbers: Plane
    scales: Plane
    format: MatrixFormat
    zeros: Plane | None = None
    second: str | None = None
    divides: bool = False
    group_index: str | None = None
    weight_shape: str | None = None
    module: Literal["module", "name"] = "module"
    method: str | None = None

    def base(self, tensor: str) -> str:
        return tensor.removesuffix(self.numbers.suffix)

    def score(self, base: str, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Counts what agrees with this layout; 0 if the numbers' type does not."""
        if dtypes.get(base + self.numbers.suffix) not in self.numbers.types:
            return 0
        scales = base + self.scales.suffix
        typed = dtypes.get(scales) in self.scales.types
        numbers, grid = (p.shape(shapes.get(base + p.suffix, ())) for p in (self.numbers, self.scales))
        aligned = numbers is not None and grid is not None and numbers[:-1] == grid[:-1]
        if self.format == MXFP8:  # other layouts have e4m3, too
            if not typed or not aligned or numbers is None or grid is None:
                return 0
            return 3 * (grid[-1] == -(-numbers[-1] // self.format.group))
        return 1 + typed + (typed and aligned) + (self.second is not None and base + self.second in dtypes)


INT4, WORDS, BYTES = MatrixFormat(0, "int4"), ("I32",), ("U8",)
UE8M0 = ("U8", "F8_E8M0")
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Sources: compressed-tensors 0.20.1, GPTQModel, AutoAWQ, NVIDIA's Model-Optimizer, AMD's Quark, gpt-oss.
LAYOUTS = (
    Layout(
        "int4 of compressed-tensors",
        Plane(".weight_packed", WORDS, WORD),
        Plane(".weight_scale", NUMBERS),
        INT4,
        zeros=Plane(".weight_zero_point", WORDS, WORD, "rows"),
        group_index=".weight_g_idx",
        weight_shape=".weight_shape",
        method="compressed-tensors",
    ),
    Layout(
        "GPTQ",
        Plane(".qweight", WORDS, WORD, transposed=True),
        Plane(".scales", NUMBERS, transposed=True),
        INT4,
        zeros=Plane(".qzeros", WORDS, WORD, "rows", transposed=True),
        group_index=".g_idx",
        method="gptq",
    ),
    Layout(
        "AWQ",
        Plane(".qweight", WORDS, WORD, "rows", transposed=True, places=AWQ_PLACES),
        Plane(".scales", NUMBERS, transposed=True),
        INT4,
        zeros=Plane(".qzeros", WORDS, WORD, "rows", transposed=True, places=AWQ_PLACES),
        method="awq",
    ),
    Layout("MXFP4", Plane(".weight_packed", BYTES, 2), Plane(".weight_scale", UE8M0), MXFP4),
    Layout("MXFP4", Plane(".weight", BYTES, 2), Plane(".weight_scale", UE8M0), MXFP4),
    Layout(
        "NVFP4 of compressed-tensors",
        Plane(".weight_packed", BYTES, 2),
        Plane(".weight_scale", ("F8_E4M3",)),
        NVFP4,
        second=".weight_global_scale",
        divides=True,
    ),
    Layout("NVFP4", Plane(".weight", BYTES, 2), Plane(".weight_scale", ("F8_E4M3",)), NVFP4, second=".weight_scale_2"),
    Layout("MXFP4", Plane("_blocks", BYTES, 2, blocks=True), Plane("_scales", UE8M0), MXFP4, module="name"),
    Layout("MXFP8", Plane(".weight", ("F8_E4M3",)), Plane(".weight_scale", BYTES), MXFP8),
    Layout("MXFP8", Plane(".weight", ("F8_E4M3",)), Plane(".weight_scale_inv", BYTES), MXFP8),
)


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix of a checkpoint.

    Attributes:
        base: the names of its tensors without suffixes.
        group: columns that share a scale; 0: no size fits.
        format: what it may be held in; None: no group size fits.
        zeros: how zero points of int4 are stored; unused: they are 8.
        tensors: all those that it has or lacks.
    """

    layout: Layout
    base: str
    group: int
    format: MatrixFormat | None
    zeros: Zeros
    tensors: tuple[str, ...]

    def has(self, suffix: str | None) -> bool:
        return suffix is not None and self.base + suffix in self.tensors

    def expected(self, shape: Sequence[int]) -> dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
        """Returns the types and possible shapes (none: unknown) of its tensors, for a matrix of this shape."""
        layout, (*stack, rows, columns) = self.layout, shape
        grid = (*stack, rows, -(-columns // (self.group or columns)))
        found: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {}
        for plane, of in ((layout.numbers, tuple(shape)), (layout.scales, grid), (layout.zeros, grid)):
            if plane is not None and self.has(plane.suffix):
                known = self.group or plane is layout.numbers
                found[self.base + plane.suffix] = plane.types, (plane.stored_shape(of),) if known else ()
        if layout.second is not None:
            found[self.base + layout.second] = ("F32",), ((), (1,), tuple(stack), (*stack, 1))
        if self.has(layout.group_index):
            found[f"{self.base}{layout.group_index}"] = ("I32", "I64"), ((columns,),)
        if self.has(layout.weight_shape):
            found[f"{self.base}{layout.weight_shape}"] = ("I32", "I64"), ((2,),)
        return found

    def bits(self, shape: Sequence[int], stored: Sequence[int]) -> int:
        """Returns the bits of an element, from the shapes of the matrix and of its numbers."""
        return 4 * self.layout.numbers.count * math.prod(stored) // math.prod(shape)


def find_matrices(
    dtypes: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Collection[int] = (),
    zeros: Zeros = "stored",
    required: Collection[str] = (),
    lacks_zeros: Callable[[str], bool] = lambda name: False,
    method: str | None = None,
) -> dict[str, StoredMatrix]:
    """Finds the quantized matrices of a checkpoint by its tensors' names, types and shapes.

    Args:
        sizes: of groups of int4, as the config has them.
        zeros: how GPTQ's zero points are stored.
        required: attributes of `Layout` whose tensors each int4 matrix must have: zeros, group_index.
        lacks_zeros: whether a matrix has none by the config, although others must have them.
        method: `quant_method`; None: the config has none.

    Returns:
        tensor name here -> the matrix.

    Raises:
        ValueError: int4 is stored as another method does.
    """
    found: dict[str, StoredMatrix] = {}
    for tensor in dtypes:
        layouts = [layout for layout in LAYOUTS if tensor.endswith(layout.numbers.suffix)]
        scored = [(layout.score(layout.base(tensor), dtypes, shapes), layout) for layout in layouts]
        score, layout = max(scored, key=lambda each: each[0], default=(0, None))
        if layout is None or not score:
            continue
        base = layout.base(tensor)
        name = base if layout.module == "name" else f"{base}.weight"
        if None not in (method, layout.method) and method != layout.method and score == ALIGNED:
            raise ValueError(
                f"{tensor} is stored as {layout.title}, but quantization_config has quant_method={method}: "
                f"set quant_method={layout.method}, with the other keys that the checkpoint was published with"
            )
        planes = [layout.numbers.suffix, layout.scales.suffix, *filter(None, [layout.second])]
        more = {"zeros": layout.zeros.suffix if layout.zeros else None, "group_index": layout.group_index}
        if layout.format.kind == "int4":
            rule: Zeros = zeros if layout.title == "GPTQ" else "stored"
            for key, suffix in more.items():
                needed = key in required and not (key == "zeros" and lacks_zeros(name))
                needed |= key == "zeros" and layout.title == "AWQ"
                if suffix is not None and (needed or base + suffix in dtypes):
                    planes.append(suffix)
            if layout.weight_shape is not None and base + layout.weight_shape in dtypes:
                planes.append(layout.weight_shape)
            numbers, grid = (p.shape(shapes.get(base + p.suffix, ())) for p in (layout.numbers, layout.scales))
            group = 0 if numbers is None or grid is None else _group(numbers[-1], grid[-1], sizes)
            has_zeros = more["zeros"] in planes and rule != "unused"
            kept = MatrixFormat(
                group, "int4", SCALE_TYPES.get(dtypes.get(base + layout.scales.suffix, ""), "float32"), has_zeros
            )
            rule = rule if has_zeros else "unused"
        else:
            group, kept, rule = layout.format.group, layout.format, "unused"
        tensors = tuple(base + suffix for suffix in planes)
        found[name] = StoredMatrix(layout, base, group, kept if group else None, rule, tensors)
    return found


def _group(columns: int, groups: int, sizes: Collection[int]) -> int:
    # Columns that share a scale; 0 if no size fits, or several do.
    if groups == 1:
        return columns
    fitting = {size for size in sizes if size > 0 and -(-columns // size) == groups}
    if not fitting and groups and columns % groups == 0:
        fitting = {columns // groups}
    return fitting.pop() if len(fitting) == 1 else 0


def rotation_of(section: Mapping[str, Any]) -> str | None:
    """Returns the key of a `quantization_config` that rotates activations: weights alone then give another model."""
    algorithms = section.get("algo_config")  # of Quark, which rotates weights alone by its R1 and R2
    for each in algorithms if isinstance(algorithms, list) else ():
        for key in ("online_r1_rotation", "r4", "online_config"):
            if isinstance(each, Mapping) and each.get(key):
                return f"algo_config.{key}"
    # compressed-tensors, GPTQModel, AutoRound
    return next((key for key in ("transform_config", "rotation", "rotation_config") if section.get(key)), None)
