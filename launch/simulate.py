"""The simulator: one decode step of a model, phase by phase (docs/simulator.md: its model).

  helix simulate point llama-3.1-70b hardware=h200 kvp=2 tpa=4 batch=2 context=1M

`point` prints, for a model over pp x dp x kvp x tpa GPUs, each phase's microseconds, bytes read, arithmetic and bytes
sent on the GPU with the most of it, and kernels launched; then time per token (TTL), tokens/s and memory.

  hardware  a GPU: one of conf/hardware/, or a file of your own, path/mine.yaml
  model     a shape: one of conf/model/; needs no key
  mode      how attention is divided: helix (default) and medha over kvp x tpa, tp and dp over tpa
  pp        stages of a pipeline, each with its share of the layers (default 1, as of all widths but tpf)
  dp        groups of kvp x tpa GPUs in a stage, each with sequences of its own in attention (mode dp, or helix)
  kvp       GPUs over which the KV cache of a sequence is split
  tpa       GPUs over which attention heads are split; divides the KV heads (in modes tp and dp: or a multiple of them)
  tpf       GPUs over which the columns of the FFN are split (default: what ep leaves)
  ep        groups of GPUs over which experts are split
  batch     sequences in a stage (default 1)
  context   tokens of each sequence in the cache (default 1M)
  dtype     of weights, KV and messages: fp4, fp8 or bf16 (default)
  hopb      true (default): an exchange overlaps with attention of other sequences; false: attention waits for it

Exit code 1: a value is wrong, or there is no memory for the batch. `helix plan` finds the best layout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

from helix.schema import Range, unknown
from launch.inputs.arguments import helped, parse

WIDTHS = {"pp": 1, "dp": 1, "kvp": 1, "tpa": 1, "tpf": None, "ep": 1}
DEFAULTS: dict[str, Any] = {"mode": "helix", **WIDTHS, "batch": 1, "context": 1 << 20, "dtype": "bf16", "hopb": True}
KEYS: dict[str, Any] = {
    "hardware": str, "model": str, "mode": Literal["tp", "dp", "medha", "helix"],
    **dict.fromkeys((*WIDTHS, "batch"), Annotated[int, Range(1)]),
    "context": int, "dtype": Literal["fp4", "fp8", "bf16"], "hopb": bool,
}  # fmt: skip


def print_point(arguments: Sequence[str]) -> None:
    """Prints one decode step, phase by phase.

    Raises:
        ValueError: a value is wrong; or, after printing, memory does not suffice for the batch.
    """
    given = DEFAULTS | parse(arguments, KEYS, needed=("hardware", "model"), words=("model",))
    if given["context"] < 1:
        raise ValueError("context=0 must be at least 1")
    import_module("launch.inputs.simulation").print_point(given)


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
