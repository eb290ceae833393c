"""Prints or plots one predicted decode step."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from helix.hub import local_directory
from helix.planner.hardware import PROVENANCE
from helix.planner.points import Options, Points
from helix.planner.step import StepCost, predict
from helix.setup.parts import make_spec
from launch.inputs.hardware import load_hardware
from launch.inputs.planner_commands import PointConfig
from launch.inputs.tables import table, terminal_width, wrapped

NUMBERS = (  # columns per phase: name and unit, factor, digits
    ("time\nus", 1e6, 2),
    ("read\nMB", 1e-6, 3),
    ("work\nGFLOP", 1e-9, 3),
    ("sent\nKB", 1e-3, 2),
    ("kernels", 1, 0),
)


def print_point(config: PointConfig, model: str, picture: Path | None) -> None:
    """Prints one decode step, phase by phase.

    Raises:
        ValueError: a value is wrong; or, after printing, the batch does not fit into memory.
    """
    layout, dtype, batch, context = config.layout, config.dtype, config.batch, config.context
    if layout.mode == "auto":
        raise ValueError("layout=auto: `helix plan` finds a layout; set one here, such as layout.kvp=2 layout.tpa=4")
    hopb = config.hopb.chunks
    chunks = hopb if isinstance(hopb, int) else None
    options = Options(weights=dtype, kv=dtype, messages=dtype, hopb=hopb != "none", chunks=chunks)
    widths = {key: getattr(layout, key) for key in ("dp", "kvp", "tpa", "tpf", "ep")}
    points = Points.of(layout.mode, batch, pp=config.pp, **widths)
    hardware = load_hardware(str(config.hardware))
    if config.model.path is not None:
        config.model.path = str(local_directory(config.model.path, weights=False))
    step = predict(make_spec(config), hardware, points, context, options)
    work = f"{batch} x {context:,} tokens on {points.gpus[0]} x {hardware.name}"
    title = f"{model}, {work}, {points.describe(0)}"
    width, memory = terminal_width(), step.memory
    weights, kv = (f"{x[0] / 1e9:.2f} GB" for x in (memory.weight_bytes, memory.kv_bytes))
    speed = (
        f"{1e3 * step.ttl_s[0]:.3f} ms, "
        f"{step.tokens_per_s_user[0]:.1f} tokens/s/user, {step.tokens_per_s_gpu[0]:.2f} tokens/s/GPU"
    )
    sizes = f"weights {weights} and KV {kv} on the fullest GPU, room for a batch of {memory.largest_batch[0]}"
    summary = f"TTL {speed} ({step.provenance(0)})\n{sizes}"
    print(wrapped(title, width), _phases(step, width), wrapped(summary, width), sep="\n\n")
    if picture is not None:
        import_module("launch.inputs.plots").draw_step(step, title, picture)
    if not step.fits[0]:
        gpu = f"{hardware.name} has {hardware.memory_bytes.value / 1e9:.0f} GB"
        share = f"KV may take {options.memory_fraction:.0%} of what the weights leave"
        raise ValueError(f"a batch of {batch} does not fit: {weights} of weights and {kv} of KV; {gpu}, and {share}")


def _phases(step: StepCost, width: int) -> str:
    phases = [phase for phase in step.phases if phase.seconds[0]]
    numbers = [
        [f"{float(x[0]) * by:.{digits}f}" for x, (_, by, digits) in zip(phase.arrays(), NUMBERS, strict=False)]
        for phase in phases
    ]
    columns = {"phase": [phase.name for phase in phases]}
    columns |= {name: list(cells) for (name, _, _), cells in zip(NUMBERS, zip(*numbers, strict=True), strict=True)}
    return table(columns | {"known": [PROVENANCE[phase.level[0]] for phase in phases]}, width)
