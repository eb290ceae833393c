"""The simulator on the command line (docs/simulator.md explains its model):

python -m launch.simulate figures      the paper's figures and tables, from conf/hardware/gb200.yaml
python -m launch.simulate point ...    one decode step, phase by phase
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from helix.simulate.hardware import BYTES, PROVENANCE
from helix.simulate.points import MODES, Options, Points
from helix.simulate.step import predict
from launch.inputs.compose import ROOT, load_spec
from launch.inputs.hardware import load_hardware
from launch.records.paper import PAGE, write_figures

WIDTHS = {
    "pp": "stages of a pipeline, each with its share of the layers",
    "dp": "groups of kvp x tpa GPUs in a stage, each with sequences of its own in attention (mode dp, or helix)",
    "kvp": "GPUs over which the KV cache of a sequence is split",
    "tpa": "GPUs over which attention heads are split; divides the KV heads, in modes tp and dp or they it",
    "tpf": "GPUs over which the columns of the FFN are split; unset: what ep leaves",
    "ep": "groups of GPUs over which experts are split",
}
POINT = """\
Predicts one decode step of a model over pp x dp x kvp x tpa GPUs, phase by phase: microseconds, bytes read, arithmetic
and bytes sent on the GPU with the most of it, and kernels launched; then time per token (TTL), tokens/s and memory."""
POINT_EXAMPLE = """\
example: Llama-3.1-70B on eight GPUs, two sequences of 1M tokens each

  python -m launch.simulate point --hardware h200 --model llama-3.1-70b --kvp 2 --tpa 4 --batch 2 --length 1000000

Exit code 1: a value is wrong, or there is no memory for the batch. `python -m launch.plan` finds the best layout.
"""


def print_point(given: argparse.Namespace) -> None:
    """One decode step, phase by phase.

    Raises:
        ValueError: a value is wrong or, once all is printed, there is no memory for the batch.
    """
    options = Options(weights=given.dtype, kv=given.dtype, messages=given.dtype, hopb=not given.no_hopb)
    widths = {key: getattr(given, key) for key in WIDTHS}
    points = Points.of(given.mode, given.batch, **widths)
    hardware = load_hardware(given.hardware)
    step = predict(load_spec(given.model), hardware, points, given.length, options)
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
            f"a batch of {given.batch} does not fit: {weights} of weights and {kv} of KV; {gpu}, and {share}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the commands; a wrong value ends with what is known."""
    parser = argparse.ArgumentParser("python -m launch.simulate", description="Predicts decode steps.")
    commands = parser.add_subparsers(required=True)
    figures = commands.add_parser("figures", help="the paper's figures and tables")
    figures.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "simulate")
    figures.add_argument("--figures", type=Path, default=ROOT / "benchmarks" / "figures")
    figures.add_argument("--no-page", action="store_true", help=f"leave {PAGE.name} as it is")
    run: Callable[[argparse.Namespace], None] = lambda a: write_figures(  # noqa: E731
        a.results, a.figures, None if a.no_page else PAGE
    )
    figures.set_defaults(run=run)
    point = commands.add_parser(
        "point",
        help="one decode step, phase by phase",
        description=POINT,
        epilog=POINT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    point.add_argument("--hardware", required=True, metavar="NAME", help="a GPU: of conf/hardware/NAME.yaml, or a file")
    point.add_argument("--model", required=True, metavar="NAME", help="a shape: of conf/model/NAME.yaml")
    modes = "how attention is divided: helix and medha over kvp x tpa, tp and dp over tpa; default %(default)s"
    point.add_argument("--mode", default="helix", choices=MODES, help=modes)
    for name, meaning in WIDTHS.items():
        default = None if name == "tpf" else 1
        shown = f"{meaning}; default %(default)s" if default else meaning
        point.add_argument(f"--{name}", type=int, metavar="N", default=default, help=shown)
    point.add_argument("--batch", type=int, metavar="N", default=1, help="sequences in a stage; default %(default)s")
    length = "tokens of each sequence in the cache; default %(default)s"
    point.add_argument("--length", type=int, metavar="TOKENS", default=1 << 20, help=length)
    dtype = "of weights, KV and messages: 4, 8 or 16 bits a number; default %(default)s"
    point.add_argument("--dtype", default="bf16", choices=tuple(BYTES), help=dtype)
    no_hopb = "wait for each exchange, not overlap it with attention of other sequences as HOP-B does"
    point.add_argument("--no-hopb", action="store_true", help=no_hopb)
    point.set_defaults(run=print_point)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
