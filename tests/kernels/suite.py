"""Framework of kernel tests: ops, rows of cases, and faults that must show.

`tests/kernels/test_suite.py` runs the tables in `tests/kernels/cases_*.py`, which derive the tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from tests.pairwise import covering

FLOATS = torch.float32, torch.float16, torch.bfloat16
FEW_BITS = torch.float16, torch.bfloat16
BOTH = "kernel", "reference"
KERNEL = ("kernel",)


class Case(Protocol):
    """Arguments of an op, and its expected results; memory that must not be read is NaN, or out of range."""

    def run(self, function: Any, **options: Any) -> Sequence[Tensor]:
        """Calls the op, and returns all that it wrote; repeatable."""

    def check(self, *found: Tensor) -> None:
        """Compares with the expected results, which are computed in float64 at the first call and cached.

        Raises:
            AssertionError: they differ, or something else was written.
        """


@dataclass
class Call:
    """A case of tensors that are compared elementwise.

    Attributes:
        given: arguments by name. Each call gets copies of the tensors; nothing else in their memory may be written.
        wanted: expected values and maximum error of written arguments, and of results ("0", "1").
        dtype: of results.
        call: calls the op with these arguments; None: by name.
    """

    given: dict[str, Any]
    wanted: dict[str, tuple[Tensor, float | Tensor]]
    dtype: torch.dtype | None = None
    call: Callable[..., Any] | None = None

    def run(self, function: Any, **options: Any) -> tuple[Tensor, ...]:
        copies, memory = copied(self.given)
        result = function(**copies, **options) if self.call is None else self.call(function, **copies, **options)
        returned = result if isinstance(result, tuple) else (result,)
        found = {str(i): x for i, x in enumerate(returned)} | copies
        written = tuple(found[name].clone() for name in self.wanted)
        for name in self.wanted.keys() & copies.keys():
            copies[name].copy_(self.given[name])
        for before, after in memory:
            assert torch.equal(before, after), "something else is written"
        return written

    def check(self, *found: Tensor) -> None:
        for (name, (wanted, max_error)), x in zip(self.wanted.items(), found, strict=True):
            assert x.shape == wanted.shape and (self.dtype in (None, x.dtype) or name in self.given)
            x, wanted = x.double(), wanted.to(x.device, torch.float64)
            if isinstance(max_error, Tensor):
                max_error = max_error.to(x.device)
            off = (x - wanted).abs()
            wrong = ~((x == wanted) | (x.isnan() & wanted.isnan()) | (off <= max_error))
            assert not wrong.any(), f"{name}: {int(wrong.sum())} of {x.numel()} wrong, up to {off[wrong].max()}"


def copied(given: dict[str, Any], device: torch.device | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Copies tensors with all memory that they view, once per storage; also returns the memory."""
    memory: dict[int, tuple[Tensor, Tensor]] = {}

    def bytes_of(x: Tensor) -> Tensor:
        found: Tensor = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())  # type: ignore
        return found

    def copy(x: Tensor) -> Tensor:
        if (key := x.untyped_storage().data_ptr()) not in memory:
            memory[key] = bytes_of(x), bytes_of(x).to(device or x.device, copy=True)
        storage, layout = memory[key][1].untyped_storage(), (x.storage_offset(), x.shape, x.stride())
        view: Tensor = torch.empty(0, dtype=x.dtype, device=device or x.device).set_(storage, *layout)  # type: ignore
        return view

    copies = {name: copy(x) if isinstance(x, Tensor) else x for name, x in given.items()}
    return copies, [*memory.values()]


def check_in_a_graph(layers: Callable[[Callable[[], None]], None], ys: Tensor) -> None:
    """Checks that layers, each of which reads the one before in one workspace, give the same bits however they overlap.

    Args:
        layers: launches all of them, which write `ys`, and calls its argument between them.
    """
    layers(torch.cuda.synchronize)
    wanted = ys.clone()
    assert not wanted.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(lambda: None)
    for _ in range(50):
        ys.fill_(torch.nan)
        graph.replay()
        assert torch.equal(ys, wanted)


@dataclass(frozen=True)
class Mode:
    """How a kernel is run.

    Attributes:
        options: further arguments.
        settings: values to patch, by dotted name.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


PLAIN = {"": Mode()}


def shapes_of(*shapes: tuple[Any, ...], names: str) -> dict[str, dict[str, Any]]:
    """Returns arguments by name for each shape."""
    return {
        "-".join(str(value).replace(" ", "") for value in shape): dict(zip(names.split(), shape, strict=True))
        for shape in shapes
    }


def sms(*counts: int) -> dict[str, Mode]:
    """Returns a mode for each number of SMs."""
    return {f"sms={count}": Mode({"sms": count}) for count in counts}


@dataclass(frozen=True)
class Row:
    """A case, and how it is run; see `Op.rows`."""

    op: Op
    name: str
    shape: Mapping[str, Any]
    which: str
    mode: Mode
    hopper: Callable[[Any], bool] | None
    repeats: int

    def make(self, device: torch.device) -> Any:
        return self.op.make(**self.shape, device=device)

    def run(self, case: Case) -> Sequence[Tensor]:
        return case.run(self.op.function, **(self.mode.options if self.which == "kernel" else {}))


@dataclass(frozen=True)
class Op:
    """An op with its tables.

    Attributes:
        function: launches the kernel on a GPU, and calls the reference on a CPU.
        make: makes a case of a row's shape, on `device`.
        mistakes: by name, a shape and a fault to plant in the case after its results are computed: the check must fail.
        nan: by name, a shape, and what puts NaN into the inputs: it must propagate.
        replays: changes a case's tensors and results in place, repeatedly.
        gpu: whether faults and NaN are only tested on a GPU.
        needs_hopper: whether the function is an SM90 kernel without fallback.
    """

    name: str
    make: Callable[..., Any]
    function: Any
    mistakes: Mapping[str, tuple[Mapping[str, Any], Callable[[Any], None]]] = field(default_factory=dict)
    nan: Mapping[str, tuple[Mapping[str, Any], Callable[[Any], None]]] = field(default_factory=dict)
    replays: Callable[[Any], Iterator[None]] | None = None
    gpu: bool = False
    needs_hopper: bool = False

    def rows(
        self,
        shapes: Mapping[str, Mapping[str, Any]],
        *,
        which: Sequence[str] = BOTH,
        modes: Mapping[str, Mode] = PLAIN,
        pairs: bool = False,
        gpu: bool = False,
        gb: float | Callable[[Mapping[str, Any]], float] = 2.0,
        hopper: Callable[[Any], bool] | None = None,
        repeats: int = 1,
        **axes: Sequence[Any],
    ) -> list[Any]:
        """Makes parameters of a test, each a `Row`: every shape in every mode, with every value of the axes.

        Args:
            which: the kernel, or its reference, which the op calls on a CPU.
            modes: of the kernel; the reference is run once.
            pairs: mark rows as slow except a pairwise covering; separately for kernel and reference, with bf16 and
                without.
            gpu: GPU only. So are kernels in bf16, which the interpreter multiplies as bit patterns.
            gb: GB that a GPU-only row needs, or a function of its shape.
            hopper: whether the SM90 kernel takes a case, which must be true on such a GPU.
            repeats: runs on a GPU, which must give the same bits.
            axes: further arguments of `make`.
        """
        reference_mode = next(iter(modes))
        cases = [
            case
            for case in product(shapes, which, modes, *axes.values())
            if case[1] == "kernel" or case[2] == reference_mode
        ]
        made: list[Any] = []
        if pairs:
            groups: dict[Any, list[Any]] = {}
            for case in cases:
                groups.setdefault((case[1], torch.bfloat16 in case), []).append(case)
            selected = {case for group in groups.values() for case in covering(group)}
        else:
            selected = set(cases)
        for case in cases:
            shape, op, mode, *values = case
            given = {**shapes[shape], **dict(zip(axes, values, strict=True))}
            only_gpu = gpu or (op == "kernel" and given.get("dtype") == torch.bfloat16)
            held = gb(given) if callable(gb) else gb
            marks = [pytest.mark.gpu(gb=held)] * only_gpu + [pytest.mark.slow] * (case not in selected)
            name = "-".join(filter(None, (self.name, shape, mode, *map(_label, axes, values), op)))
            row = Row(self, name, given, op, modes[mode], hopper, repeats)
            made.append(pytest.param(row, id=name, marks=marks))
        return made


def _label(axis: str, value: Any) -> str:
    if isinstance(value, bool) or value == "":
        return axis if value else ""
    return f"{axis}={str(value).removeprefix('torch.').replace(' ', '')}"
