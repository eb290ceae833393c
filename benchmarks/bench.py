"""Benchmarks: time kernels, collectives and whole models, and append what was measured to benchmarks/results/.

helix bench WHAT                      one of the subjects below; `WHAT --help` says what it measures
helix bench step models=qwen2.5-7b
helix bench DIR bench=decode KEY=VALUE ...   a job of one's own, with the keys of `helix run`; with -m several
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import jobs
from benchmarks.kernels import (
    accept,
    attention,
    comm,
    delta,
    indexer,
    linear,
    mla,
    mla_prefill,
    moe,
    sparse,
    tier,
)
from benchmarks.models import (
    crowds,
    drafters,
    fronts,
    hopb,
    hosts,
    http,
    layer_drafts,
    lookup,
    modes,
    prefill,
    self_drafts,
    serve,
    sparse_costs,
    speculate,
    start,
    steps,
    tier_needles,
    tier_prefill,
    tier_steps,
)
from benchmarks.papers import verification as verify
from benchmarks.runner import Benchmark, Given, record, run
from comm.emulated import is_emulated
from helix.schema import unknown
from launch.inputs.arguments import helped, need_checkout, parse
from launch.inputs.compose import ROOT
from launch.job import spawn

BENCHMARKS = {
    "kernels": Benchmark(
        "decode attention beside torch's, and small-batch projections beside cuBLAS, on one GPU",
        f"{attention.__doc__}\n{linear.__doc__}",
        (*attention.PARTS, linear.PART),
    ),
    "attention": Benchmark("decode attention with keys and values in FP8", attention.__doc__, (attention.KV,)),
    "linear": Benchmark("projections in bf16 and in e4m3, on one GPU", linear.__doc__, (linear.FP8,)),
    "moe": moe.BENCHMARK,
    "mla": mla.BENCHMARK,
    "mla-prefill": mla_prefill.BENCHMARK,
    "indexer": indexer.BENCHMARK,
    "delta": delta.BENCHMARK,
    "verify": verify.BENCHMARK,
    "accept": accept.BENCHMARK,
    "sparse": sparse.BENCHMARK,
    "tier": tier.BENCHMARK,
    "comm": comm.BENCHMARK,
    "step": steps.STEP,
    "baselines": steps.BASELINE,
    "modes": modes.BENCHMARK,
    "fronts": fronts.BENCHMARK,
    "sparse-steps": steps.SPARSE,
    "sparse-policies": steps.SPARSE_POLICIES,
    "sparse-costs": sparse_costs.BENCHMARK,
    "tier-steps": tier_steps.BENCHMARK,
    "tier-prefill": tier_prefill.BENCHMARK,
    "tier-needles": tier_needles.BENCHMARK,
    "speculate": speculate.BENCHMARK,
    "self-drafts": self_drafts.BENCHMARK,
    "layer-drafts": layer_drafts.BENCHMARK,
    "lookup": lookup.BENCHMARK,
    "drafters": drafters.BENCHMARK,
    "prefill": prefill.BENCHMARK,
    "prefill-kernels": prefill.KERNELS_ALONE,
    "serve": serve.BENCHMARK,
    "crowds": crowds.BENCHMARK,
    "serve-http": http.BENCHMARK,
    "start": start.BENCHMARK,
    "hopb": hopb.BENCHMARK,
    "hosts": hosts.BENCHMARK,
}
KEYS: dict[str, tuple[Any, str]] = {
    "output": (Path, "a file to append JSON lines to (default: benchmarks/results/WHAT.jsonl, or .emulated-N.jsonl)"),
    "ranks": (int, "N ranks, more than there are GPUs: one or two GPUs emulate them (docs/results/emulated.md)"),
    "models": (list[str], "some of its models, A,B"),
}


def keys(benchmark: Benchmark) -> list[str]:
    """The keys that a benchmark takes."""
    return ["output", *["ranks"] * benchmark.emulated, *["models"] * bool(benchmark.models)]


def taught(what: str | None) -> str:
    """The list of subjects, or what one of them measures and takes."""
    if what is None:
        listed = "\n".join(f"  {name:<15} {benchmark.about}" for name, benchmark in BENCHMARKS.items())
        return f"{__doc__}\n{listed}\n\nWithout a GPU the smallest case runs, to show that it does."
    benchmark = BENCHMARKS[what]
    taken = "\n".join(f"  {key:<8} {KEYS[key][1]}" for key in keys(benchmark))
    models = f"\n\nmodels: {', '.join(benchmark.models)}" if benchmark.models else ""
    example = f"helix bench {what}" + (f" models={benchmark.models[0]}" if benchmark.models else "")
    return f"{benchmark.text.strip()}\n\n{taken}{models}\n\nexample: {example}"


def given(what: str, arguments: Sequence[str], gpus: int) -> tuple[Given, Path | None]:
    """What a benchmark is given, and where its rows go.

    Raises:
        ValueError: it takes no such key or has no such model, or these ranks cannot be emulated.
    """
    benchmark = BENCHMARKS[what]
    values = parse(arguments, {key: KEYS[key][0] for key in keys(benchmark)})
    models, ranks = values.get("models"), values.get("ranks")
    if ranks is not None and not is_emulated(ranks):
        raise ValueError(f"ranks={ranks}: one or two GPUs emulate more ranks than there are GPUs; there are {gpus}")
    if models is not None:
        if not gpus:
            raise ValueError("models: without a GPU the demo model runs, and no other: leave it out")
        for model in models:
            if model not in benchmark.models:
                raise ValueError(f"models: {unknown(model, benchmark.models)}")
    return Given(torch.device("cuda" if gpus else "cpu"), ranks or gpus or 2, models), values.get("output")


def main() -> None:
    """Runs a benchmark and appends a JSON line for each of its rows."""
    what, arguments = next(iter(sys.argv[1:]), "--help"), sys.argv[2:]
    if helped([what, *arguments], taught(what if what in BENCHMARKS else None)):
        return
    need_checkout("helix bench")
    gpus = torch.cuda.device_count()
    try:
        if what not in BENCHMARKS:
            raise ValueError(unknown(what, BENCHMARKS))
        settings, output = given(what, arguments, gpus)
        if not gpus and not BENCHMARKS[what].counted:
            print("no GPU: the smallest case on the CPU, to show that it runs; the figures mean nothing")
        name = f"{what}.emulated-{settings.ranks}" if settings.emulated else what
        if output is None and (gpus or BENCHMARKS[what].counted):
            output = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
        record(name, run(BENCHMARKS[what], settings), settings, output)
    except jobs.JobError as error:
        sys.exit(f"error: a job of the benchmark failed: {error}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(spawn.INTERRUPTED)


if __name__ == "__main__":
    main()
