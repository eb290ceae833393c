"""The simulator: one decode step of a model, phase by phase (docs/simulator.md: its model).

  helix simulate point llama-3.1-70b hardware=h200 layout.kvp=2 layout.tpa=4 batch=2 context=1M

`point` prints, for a model over pp x dp x kvp x tpa GPUs, each phase's microseconds, bytes read, arithmetic and bytes
sent on the GPU with the most of it, and kernels launched; then time per token (TTL), tokens/s and memory.
--plot FILE.png draws where the time goes.

  MODEL        a shape of conf/model/, a checkpoint's directory, or ORG/NAME of the Hugging Face Hub
  hardware     a GPU: one of conf/hardware/, or a file of your own, path/mine.yaml
  layout       how attention is divided: helix (default) and medha over kvp x tpa, tp and dp over tpa
  layout.dp    groups of kvp x tpa GPUs in a stage, each with sequences of its own in attention (mode dp, or helix)
  layout.kvp   GPUs over which the KV cache of a sequence is split (default 1, as of all widths but tpf)
  layout.tpa   GPUs over which attention heads are split; divides the KV heads (in modes tp and dp: or a multiple)
  layout.tpf   GPUs over which the columns of the FFN are split (default: what ep leaves)
  layout.ep    groups of GPUs over which experts are split
  pp           stages of a pipeline, each with its share of the layers
  batch        sequences in a stage (default 1)
  context      tokens of each sequence in the cache (default 1M)
  dtype        of weights, KV and messages: fp4, fp8 or bf16 (default)
  hopb         on (default): an exchange overlaps with attention of other sequences; off: attention waits for it

Exit code 1: a value is wrong, or there is no memory for the batch. `helix plan` finds the best layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from launch.inputs import front
from launch.inputs.arguments import helped, one_of, parse, positive, tokens, unknown
from launch.inputs.files import check_picture
from launch.inputs.front import Command, Flag
from launch.inputs.renamed import refuse_renamed

WIDTHS = ("pp", "layout.dp", "layout.kvp", "layout.tpa", "layout.ep")
DEFAULTS: dict[str, Any] = {
    "layout.mode": "helix", **dict.fromkeys(WIDTHS, 1), "layout.tpf": None, "batch": 1, "context": 1 << 20,
    "dtype": "bf16", "hopb": "on",
}  # fmt: skip
KEYS: dict[str, Callable[[str], Any]] = {
    "hardware": str, "model": str, "model.path": str, "layout.mode": one_of("tp", "dp", "medha", "helix"),
    **dict.fromkeys((*WIDTHS, "layout.tpf", "batch"), positive),
    "context": tokens, "dtype": one_of("fp4", "fp8", "bf16"), "hopb": one_of("on", "off"),
}  # fmt: skip
POINT = Command("helix simulate point", "", (), flags=(Flag(("--plot",), "FILE.png", ""),))


def print_point(arguments: Sequence[str]) -> None:
    """Prints one decode step, phase by phase.

    Raises:
        ValueError: a value is wrong; or, after printing, memory does not suffice for the batch.
    """
    line = front.read(arguments, POINT)
    if line.options:
        raise ValueError(f"{next(iter(line.options))} is not an option of {POINT.name} (see --help)")
    refuse_renamed("helix simulate", line.overrides)
    overrides = [text.replace("layout=", "layout.mode=", 1) for text in line.overrides]
    model = "model.path" if any(text.startswith("model.path=") for text in overrides) else "model"
    given = DEFAULTS | parse(overrides, KEYS, needed=("hardware", model))
    if given["context"] < 1:
        raise ValueError("context=0 must be at least 1")
    picture = None if (path := line.own.get("--plot")) is None else Path(path)
    if picture is not None:
        check_picture(picture)
    import_module("launch.inputs.simulation").print_point(given, picture)


COMMANDS = {"point": print_point}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the commands; ends with the known values if a value is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments or ["--help"], __doc__):
        return
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise ValueError(unknown(name, COMMANDS))
        COMMANDS[name](rest)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
