"""The planner: the best layout of a model on some GPUs, and a prediction for it (docs/planner.md)."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from launch.inputs import front
from launch.inputs.files import check_picture, check_writable, write_atomically
from launch.inputs.front import Command, Flag
from launch.inputs.renamed import refuse_renamed

PLAN = Command(
    "helix plan",
    "Ranks every layout of a model on so many GPUs by its predicted time, and says why the first is first, what else "
    "fits,\nand how to serve it. layout=auto of a run takes the first.",
    (
        "helix plan llama-3.1-8b gpus=8 context=1M batch=8",
        "helix plan DIR gpus=8 context=1M ttl_ms=20 --quantization fp8",
        "helix plan qwen2.5-7b gpus=8 context=1M speculation=sparse acceptance=0.9",
        "helix plan qwen2.5-7b gpus=1 context=1M attention=block_sparse kv.tier=host hits=0.8",
    ),
    flags=(
        Flag(("--json",), "FILE", "", "all of this as JSON; - for the terminal"),
        Flag(("--plot",), "FILE.png", "", "times of the layouts; with ttl_ms and no batch, fronts"),
        *(flag for flag in front.MODEL_FLAGS if not flag.key.startswith("decode.")),
    ),
    keys=(
        ("gpus=N context=TOKENS", "GPUs of one NVLink domain; tokens of each sequence in the cache"),
        ("batch=N", "sequences (default 1); with ttl_ms and no batch: those with the most tokens/s/GPU within it"),
        ("ttl_ms=MS", "the most from one token of a sequence to its next; slower layouts come last"),
        ("hardware=NAME", "one of conf/hardware/, or path/mine.yaml (default: this machine's GPU, else h200)"),
        ("model.weights=fp8 kv.dtype=fp8", "weights, and keys and values, in FP8: as in a run"),
        ("layout.tpa=N modes=A,B", "only layouts with this width; of these modes, such as tp,helix,dp"),
        ("speculation=NAME acceptance=P", "drafts, each accepted with this probability; speculation.gamma of them, or"),
        ("", "as many as are best: ngram, suffix (free), sparse, mtp, eagle3 (priced)"),
        ("attention=parts", "steps read few keys; says where dense attention is faster (block_sparse: blocks)"),
        ("kv.tier=host hits=P", "with attention: keys and values in host memory, this share of them on the GPU"),
        ("kv.ahead=true guessed=P", "of the others, the share that comes ahead, by guesses"),
        ("comm.backend=nccl", "with NCCL's collectives, where they were measured"),
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Answers one question; ends with an error in words if a value is wrong or nothing fits."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        line = front.read(arguments, PLAN)
        if "--help" in line.options:
            print(front.help_text(PLAN), end="")
            return
        refuse_renamed("helix plan", line.overrides)
        if (path := line.own.get("--json", "-")) != "-":
            check_writable("--json", Path(path))
        if (picture := line.own.get("--plot")) is not None:
            check_picture(Path(picture))
        answer(line)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def answer(line: front.Line) -> None:
    """Prints the answer to a question, and writes its files.

    Raises:
        ValueError: a value is wrong, or nothing fits.
    """
    compose, planner = import_module("launch.inputs.compose"), import_module("helix.planner.plan")
    planning, rankings, tables = (import_module(f"launch.inputs.{n}") for n in ("planning", "rankings", "tables"))
    settings = planning.SETTINGS.of(line)
    if (text := compose.told(line, PLAN, settings)) is not None:
        print(text, end="")
        return
    if "--multirun" in line.options:
        raise ValueError("-m: a plan compares layouts by itself; ask about one workload at a time")
    checked = planning.check_question(line.overrides, settings)
    width, file = tables.terminal_width(), line.own.get("--json")
    try:
        ranking = planner.plan(checked.question)
    except planner.NothingFits as error:
        raise ValueError(rankings.nothing_fits(error, checked, width)) from error
    if (picture := line.own.get("--plot")) is not None:
        import_module("launch.inputs.pictures").draw_ranking(ranking, checked.model, Path(picture))
    if file is not None:
        text = json.dumps(rankings.as_json(ranking, checked), indent=1)
        if file == "-":
            print(text)
            return
        write_atomically(Path(file), text + "\n")
    print(rankings.as_text(ranking, checked, width))


if __name__ == "__main__":
    gc.disable()  # an answer takes a second, of which looking for cycles would be a quarter
    main()
    gc.freeze()  # nor is there anything to look for at the end
