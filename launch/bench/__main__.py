"""Benchmarks: `python -m launch.bench WHAT`, where `--help` says what there is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launch.bench import attention, comm, hopb, linear, mla, moe, prefill, speculate, steps, verify, workloads
from launch.inputs import parts as inputs_parts
from launch.inputs.compose import ROOT
from launch.job import spawn
from launch.job.report import provenance
from launch.job.spawn import JobError

EMULATED = ("comm", "step", "baselines", "speculate", "hopb", "prefill")
RANKS = f"of {', '.join(EMULATED)}: more than there are GPUs, which one or two of them emulate (comm/emulated.py)"
MODELS = "of step, baselines (default all), hopb (default qwen2.5-7b), speculate (default llama-3.1-70b demo)"


def main() -> None:
    """Runs a benchmark and appends a JSON line for each of its rows."""
    parser = argparse.ArgumentParser(
        "python -m launch.bench", description="Benchmarks; without a GPU the smallest case runs and means nothing."
    )
    what = {
        "kernels": "flash_decode beside torch's attention and small-batch projections beside cuBLAS, on one GPU",
        "moe": "a rank's routed experts beside the bytes of those that are touched, on one GPU",
        "mla": "mla_decode beside FlashInfer, on one GPU",
        "verify": "verification of drafts beside the paper's kernels and plain torch, on one GPU",
        "comm": "the collectives of a step beside torch.distributed's, over 2, 4, .. GPUs",
        "step": "decode steps of whole models beside their floor, over all GPUs",
        "baselines": "the same under plain TP, Medha's layout and Helix",
        "speculate": "decode steps of Llama-3.1-70B with drafts, and copies of files by the demo model, over all GPUs",
        "prefill": "the prefill kernel beside torch's attention, and whole prompts over all GPUs",
        "hopb": "decode steps with and without HOP-B, and the paper's example of it",
    }
    parser.add_argument("what", choices=what, help="; ".join(f"{k}: {v}" for k, v in what.items()))
    parser.add_argument("--models", nargs="*", help=MODELS)
    parser.add_argument(
        "--output", type=Path, help="JSON lines; default benchmarks/results/WHAT.jsonl, or WHAT.emulated-N.jsonl"
    )
    parser.add_argument("--ranks", type=int, help=RANKS)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    if not gpus:
        print("no GPU: the smallest case on the CPU, to show that it runs; the figures mean nothing")
    ranks = arguments.ranks if arguments.ranks is not None else gpus or 2
    models = arguments.models
    emulated = inputs_parts.is_emulated(ranks)
    if arguments.ranks is not None and (not emulated or arguments.what not in EMULATED):
        parser.error(
            f"--ranks={ranks}: one or two GPUs emulate more ranks, in {', '.join(EMULATED)}; there are {gpus} GPUs"
        )
    if models is not None:
        check_models(parser, arguments.what, models, gpus)
    parts: dict[str, list[Callable[[], Iterable[dict[str, Any]]]]] = {
        "kernels": [partial(attention.run, device), partial(linear.run, device)],
        "moe": [partial(moe.run, device)],
        "mla": [partial(mla.run, device)],
        "verify": [partial(verify.run, device)],
        "comm": [partial(comm.run, ranks)],
        "step": [partial(steps.run, ranks, baselines=False, models=models)],
        "baselines": [partial(steps.run, ranks, baselines=True, models=models)],
        "speculate": [partial(speculate.run, ranks, models)],
        "hopb": [partial(hopb.run, ranks, models)],
        "prefill": [partial(prefill.run, ranks, device)],
    }
    name = f"{arguments.what}.emulated-{ranks}" if emulated else arguments.what
    output = arguments.output or (Path(f"benchmarks/results/{name}.jsonl") if gpus else None)
    count, facts = 0, provenance(device) | ({"emulated_by": inputs_parts.emulating_processes()} if emulated else {})
    problem: str | int | None = None
    with output.open("a", encoding="utf-8") if output is not None else nullcontext() as file:
        try:
            for row in (row for part in parts[arguments.what] for row in part()):
                if file is not None:  # what is measured is kept, whatever becomes of the next row
                    file.write(json.dumps({"name": name, **facts, **row}) + "\n")
                    file.flush()
                    count += 1
        except JobError as error:
            problem = f"error: a job of the benchmark failed: {error}"
        except KeyboardInterrupt:
            problem = spawn.INTERRUPTED
    if output is not None:
        print(f"appended {count} lines to {output}")
    sys.exit(problem)


def check_models(parser: argparse.ArgumentParser, what: str, models: list[str], gpus: int) -> None:
    """Ends the program where a benchmark does not know one of these models."""
    known = {
        "step": dict.fromkeys(w.model for w in workloads.WORKLOADS),
        "baselines": dict.fromkeys(w.model for w in workloads.BASELINES),
    }
    shapes = sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml"))
    if what not in (*known, "hopb", "speculate"):
        parser.error(f"--models is {MODELS}: {what} has none to choose")
    if not gpus:
        parser.error("--models: without a GPU the demo model runs, and no other")
    if unknown := [name for name in models if name not in known.get(what, shapes)]:
        parser.error(f"--models: {what} has no {', '.join(unknown)}; it has {', '.join(known.get(what, shapes))}")


if __name__ == "__main__":
    main()
