"""Times decode steps of one model in one layout, and appends rows to a record: `python -m benchmarks.layout_steps`.

  python -m benchmarks.layout_steps step model=qwen2.5-7b layout.kvp=2 layout.tpa=4 points=1x128K,1x1M
  python -m benchmarks.layout_steps fp8-steps model=deepseek-r1 layout=tp layout.tpa=8 points=1x128K keep=weights:fp8

The first word names the record, `$ROWS/NAME.jsonl` or benchmarks/results/NAME.jsonl. Other keys are those of a run;
one or two GPUs emulate a layout of more ranks.

  points    SEQUENCESxTOKENS, comma-separated
  keep      further fields of each row, KEY:VALUE, comma-separated
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import jobs
from benchmarks.models.steps import measure, measure_sparse
from benchmarks.models.workloads import WORKLOADS, Workload
from benchmarks.runner import BenchContext, record
from benchmarks.schema import BenchConfig, bench_points, compose_config
from helix.setup.parts import make_layout
from launch.inputs.arguments import handle_help
from launch.inputs.auto_layout import budget
from launch.inputs.compose import ROOT
from launch.inputs.shapes import spec_of

OPTIONS = ("points", "keep", "model")
KNOWN = {(work.model, work.batch, work.length): work for work in WORKLOADS}
LAYOUT = ("layout=", "layout.")


def main() -> None:
    """Runs a job and appends one JSON line per point."""
    arguments = sys.argv[1:]
    if handle_help(arguments or ["--help"], __doc__ or ""):
        return
    name, *rest = arguments
    options = {key: text for key, _, text in (word.partition("=") for word in rest) if key in OPTIONS}
    overrides = [word for word in rest if word.partition("=")[0] not in OPTIONS]
    try:
        gpus = torch.cuda.device_count()
        config = compose_config([f"model={options['model']}", *overrides])
        layout = make_layout(config.layout)
        ctx = BenchContext(torch.device("cuda" if gpus else "cpu"), layout.world_size, [options["model"]])
        points = bench_points(replace(BenchConfig(), points=options["points"].split(",")))
        works = [KNOWN.get((options["model"], *point), Workload(options["model"], *point)) for point in points]
        overrides = [word for word in overrides if not word.startswith(LAYOUT)]
        spec = spec_of(options["model"], *(word for word in overrides if word.startswith("model.")))
        rows = (measure if budget(config) is None else measure_sparse)(ctx, works, spec, layout, overrides)
        extra_columns = dict(word.split(":") for word in options.get("keep", "").split(",") if word)
        to = Path(os.environ.get("ROWS", ROOT / "benchmarks" / "results")) / f"{name}.jsonl"
        record(name, (row | extra_columns for row in rows), ctx, to)
    except KeyError as error:
        sys.exit(f"error: {error.args[0]} missing: add {error.args[0]}=VALUE")
    except (ValueError, jobs.JobError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
