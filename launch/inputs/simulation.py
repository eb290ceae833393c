"""One predicted decode step, as a table or a picture."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from helix.hub import local_directory
from helix.planner.hardware import PROVENANCE
from helix.planner.points import Options, Points
from helix.planner.step import StepCost, predict
from helix.setup.parts import make_spec
from launch.inputs.compose import composed
from launch.inputs.hardware import load_hardware
from launch.inputs.tables import table, terminal_width, wrapped

NUMBERS = (  # of a phase: name and unit, factor, digits
    ("time\nus", 1e6, 2),
    ("read\nMB", 1e-6, 3),
    ("work\nGFLOP", 1e-9, 3),
    ("sent\nKB", 1e-3, 2),
    ("kernels", 1, 0),
)


def print_point(given: Mapping[str, Any], picture: Path | None) -> None:
    """Prints one decode step, phase by phase.

    Raises:
        ValueError: a value is wrong; or, after printing, memory does not suffice for the batch.
    """
    dtype, layout = given["dtype"], {key[7:]: n for key, n in given.items() if key.startswith("layout.")}
    options = Options(weights=dtype, kv=dtype, messages=dtype, hopb=given["hopb"] == "on")
    points = Points.of(layout.pop("mode"), given["batch"], pp=given["pp"], **layout)
    hardware = load_hardware(given["hardware"])
    path = given.get("model.path")
    model = f"model={given['model']}" if path is None else f"model.path={local_directory(path, weights=False)}"
    step = predict(make_spec(composed([model])), hardware, points, given["context"], options)
    work = f"{given['batch']} x {given['context']:,} tokens on {points.gpus[0]} x {hardware.name}"
    title = f"{model.partition('=')[2]}, {work}, {points.describe(0)}"
    width, memory = terminal_width(), step.memory
    weights, kv = (f"{x[0] / 1e9:.2f} GB" for x in (memory.weight_bytes, memory.kv_bytes))
    speed = f"{1e3 * step.ttl_s[0]:.3f} ms, {step.user[0]:.1f} tokens/s/user, {step.gpu[0]:.2f} tokens/s/GPU"
    sizes = f"weights {weights} and KV {kv} on the fullest GPU, room for a batch of {memory.largest_batch[0]}"
    said = f"TTL {speed} ({step.provenance(0)})\n{sizes}"
    print(wrapped(title, width), _phases(step, width), wrapped(said, width), sep="\n\n")
    if picture is not None:
        import_module("launch.inputs.pictures").draw_step(step, title, picture)
    if not step.fits[0]:
        gpu = f"{hardware.name} has {hardware.memory_bytes.value / 1e9:.0f} GB"
        share = f"KV may take {options.memory_fraction:.0%} of what weights leave"
        raise ValueError(
            f"a batch of {given['batch']} does not fit: {weights} of weights and {kv} of KV; {gpu}, and {share}"
        )


def _phases(step: StepCost, width: int) -> str:
    phases = [phase for phase in step.phases if phase.seconds[0]]
    numbers = [
        [f"{float(x[0]) * by:.{digits}f}" for x, (_, by, digits) in zip(phase.arrays(), NUMBERS, strict=False)]
        for phase in phases
    ]
    columns = {"phase": [phase.name for phase in phases]}
    columns |= {name: list(cells) for (name, _, _), cells in zip(NUMBERS, zip(*numbers, strict=True), strict=True)}
    return table(columns | {"known": [PROVENANCE[phase.level[0]] for phase in phases]}, width)
