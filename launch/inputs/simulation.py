"""One predicted decode step, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from helix.planner.hardware import PROVENANCE
from helix.planner.points import Options, Points
from helix.planner.step import predict
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

WIDTHS = ("pp", "dp", "kvp", "tpa", "tpf", "ep")


def print_point(given: Mapping[str, Any]) -> None:
    """Prints one decode step, phase by phase.

    Raises:
        ValueError: a value is wrong; or, after printing, memory does not suffice for the batch.
    """
    dtype = given["dtype"]
    options = Options(weights=dtype, kv=dtype, messages=dtype, hopb=given["hopb"])
    points = Points.of(given["mode"], given["batch"], **{width: given[width] for width in WIDTHS})
    hardware = load_hardware(given["hardware"])
    step = predict(load_spec(given["model"]), hardware, points, given["context"], options)
    table = Table("phase", "us", "MB read", "GFLOP", "KB sent", "launches", "provenance", title=points.describe(0))
    for phase in (phase for phase in step.phases if phase.launches[0]):
        us, read, flop, sent, launches = (
            float(x[0]) * by for x, by in zip(phase.arrays(), (1e6, 1e-6, 1e-9, 1e-3, 1), strict=False)
        )
        cells = f"{us:.2f}", f"{read:.3f}", f"{flop:.3f}", f"{sent:.2f}", f"{launches:g}"
        table.add_row(phase.name, *cells, PROVENANCE[phase.level[0]])
    Console(width=110).print(table)
    memory = step.memory
    weights, kv = (f"{x[0] / 1e9:.2f} GB" for x in (memory.weight_bytes, memory.kv_bytes))
    print(
        f"TTL {1e3 * step.ttl_s[0]:.3f} ms, {step.user[0]:.1f} tokens/s/user, {step.gpu[0]:.2f} tokens/s/GPU "
        f"({step.provenance(0)})\nweights {weights} and KV {kv} on the fullest GPU, room for "
        f"a batch of {memory.largest_batch[0]}"
    )
    if not step.fits[0]:
        gpu = f"{hardware.name} has {hardware.memory_bytes.value / 1e9:.0f} GB"
        share = f"KV may take {options.memory_fraction:.0%} of what weights leave"
        raise ValueError(
            f"a batch of {given['batch']} does not fit: {weights} of weights and {kv} of KV; {gpu}, and {share}"
        )
