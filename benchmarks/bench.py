"""Benchmarks: time kernels, collectives and whole models, and append what was measured to benchmarks/results/.

helix bench WHAT                      one of the benchmarks below; see `WHAT --help`
helix bench step models=qwen2.5-7b
helix bench DIR bench=decode KEY=VALUE ...   a custom job, with the keys of `helix run`; -m sweeps
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import jobs
from benchmarks.cases import cases
from benchmarks.runner import BenchContext, Benchmark, Part, record, run
from comm.emulated import is_emulated
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout, parse
from launch.inputs.compose import ROOT
from launch.job import spawn

DECLARED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text("utf-8"))


def _resolve(name: str, module: str) -> Any:
    where, _, what = name.rpartition(":")
    return getattr(import_module(f"benchmarks.{where or module}"), what)


class Benchmarks(Mapping[str, Benchmark]):
    """The declared benchmarks by name, each imported on first access."""

    def __iter__(self) -> Iterator[str]:
        return iter(DECLARED)

    def __len__(self) -> int:
        return len(DECLARED)

    def __getitem__(self, name: str) -> Benchmark:
        entry = DECLARED[name]
        if "benchmark" in entry:
            found: Benchmark = _resolve(entry["benchmark"], "")
            return found
        module = entry["module"]
        parts = [self._part(part, module) for part in entry["parts"]]
        docstrings = (import_module(f"benchmarks.{name}").__doc__ or "" for name in entry.get("text", module).split())
        return Benchmark(
            entry["about"],
            "\n".join(docstrings),
            (*parts, *(_resolve(entry["more"], module) if "more" in entry else ())),
            models=tuple(_resolve(entry["models"], module)) if "models" in entry else (),
            emulated=entry.get("emulated", False),
            counted=entry.get("counted", False),
            summary=_resolve(entry["summary"], module) if "summary" in entry else None,
        )

    @staticmethod
    def _part(part: dict[str, str], module: str) -> Part:
        if "cases" in part:
            made = _resolve(part["cases"], module)
        elif "listed" in part:
            made = partial(_listed_cases, part["listed"])
        else:
            made = _single_case
        return Part(made, _resolve(part["measure"], module), part["columns"], part.get("title"))


def _listed_cases(name: str, ctx: BenchContext) -> list[tuple[Any, ...]]:
    return cases(name, ctx.gpu)


def _single_case(ctx: BenchContext) -> list[tuple[Any, ...]]:
    return [()]


BENCHMARKS = Benchmarks()
KEYS: dict[str, tuple[Any, str]] = {
    "output": (Path, "a file to append JSON lines to (default: benchmarks/results/WHAT.jsonl, or .emulated-N.jsonl)"),
    "ranks": (int, "N ranks, more than there are GPUs: one or two GPUs emulate them (docs/results/emulated.md)"),
    "models": (list[str], "run only these of its models, A,B"),
}


def keys(benchmark: Benchmark) -> list[str]:
    """Returns the command-line keys that a benchmark accepts."""
    return ["output", *["ranks"] * benchmark.emulated, *["models"] * bool(benchmark.models)]


def help_text(what: str | None) -> str:
    """Returns the list of benchmarks, or the help text of one."""
    if what is None:
        listed = "\n".join(
            f"  {name:<15} {entry.get('about') or BENCHMARKS[name].about}" for name, entry in DECLARED.items()
        )
        return f"{__doc__}\n{listed}\n\nWithout a GPU the smallest case runs as a smoke test."
    benchmark = BENCHMARKS[what]
    options = "\n".join(f"  {key:<8} {KEYS[key][1]}" for key in keys(benchmark))
    models = f"\n\nmodels: {', '.join(benchmark.models)}" if benchmark.models else ""
    example = f"helix bench {what}" + (f" models={benchmark.models[0]}" if benchmark.models else "")
    return f"{benchmark.text.strip()}\n\n{options}{models}\n\nexample: {example}"


def parse_context(what: str, arguments: Sequence[str], gpus: int) -> tuple[BenchContext, Path | None]:
    """Parses a benchmark's command line into its context and output file.

    Raises:
        ValueError: unknown key or model, or a number of ranks that cannot be emulated.
    """
    benchmark = BENCHMARKS[what]
    values = parse(arguments, {key: KEYS[key][0] for key in keys(benchmark)})
    models, ranks = values.get("models"), values.get("ranks")
    if ranks is not None and not is_emulated(ranks):
        raise ValueError(
            f"ranks={ranks} must exceed the {gpus} GPUs here: one or two GPUs emulate more ranks than there are"
        )
    if models is not None:
        if not gpus:
            raise ValueError(f"models={','.join(models)}: without a GPU only the demo model runs: leave it out")
        for model in models:
            if model not in benchmark.models:
                raise ValueError(f"models: {unknown_message(model, benchmark.models)}")
    return BenchContext(torch.device("cuda" if gpus else "cpu"), ranks or gpus or 2, models), values.get("output")


def main() -> None:
    """Runs a benchmark and appends one JSON line per row."""
    what, arguments = next(iter(sys.argv[1:]), "--help"), sys.argv[2:]
    if handle_help([what, *arguments], help_text(what if what in BENCHMARKS else None)):
        return
    need_checkout("helix bench")
    gpus = torch.cuda.device_count()
    try:
        if what not in BENCHMARKS:
            raise ValueError(unknown_message(what, BENCHMARKS))
        settings, output = parse_context(what, arguments, gpus)
        if not gpus and not BENCHMARKS[what].counted:
            print("no GPU: running the smallest case on the CPU as a smoke test; the figures mean nothing")
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
