"""Selects what the ranks of a benchmark job do, by `bench.kind`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from benchmarks import schema
from benchmarks.jobs import COMMAND
from benchmarks.ranks.tuning_file import check_tuning
from benchmarks.ranks.variants import variants
from benchmarks.schema import LabConfig, bench_points, lab
from helix.config import Config
from launch.inputs.command_parser import Command
from launch.inputs.flags import MODEL_FLAGS
from launch.inputs.job_kinds import JobKind, Program, select_job_kind
from launch.inputs.prompt_files import PromptLine

# `bench.kind` -> the module whose `run` does the work. Only the selected module is imported.
MODULES = {
    "comm": "benchmarks.ranks.collectives",
    "decode": "benchmarks.ranks.steps",
    "hopb": "benchmarks.ranks.hopb",
    "multi-node": "benchmarks.ranks.multi_node",
    "prefill": "benchmarks.ranks.prefill",
    "serve": "benchmarks.ranks.serving",
    "tune": "benchmarks.ranks.tuning",
}

LOADED = (*schema.POINTED, "tune")  # with bench.points


def work(config: Config) -> JobKind:
    """Returns the work of a job.

    Raises:
        ValueError: a value of `bench` is out of range.
    """
    config = lab(config)
    schema.check(config)
    bench, base = config.bench, select_job_kind(config)
    files = {"bench.output": bench.output} if bench.output is not None else {}
    if bench.kind == "none":
        return replace(base, files=files, check=partial(_check, config))
    load = max(bench_points(bench), key=lambda point: point[0] * point[1]) if bench.kind in LOADED else base.load
    takes: Literal["taken", "none"] = "taken" if bench.kind == "tune" else "none"
    return JobKind(MODULES[bench.kind], bench.kind, None, takes, True, load, files, partial(_check, config))


def _check(config: LabConfig, prompts: Sequence[PromptLine]) -> None:
    if config.bench.kind == "tune":
        check_tuning(config, prompts)
    variants(config)


TYPED = Command(
    "helix bench",
    "Times a job of a benchmark over N ranks, or decodes in it.",
    (
        "helix bench llama-3.1-8b model.load=random bench=decode bench.points=[1x128K,8x32K]",
        "torchrun --nproc-per-node=8 -m benchmarks.entry llama-3.1-8b model.load=random bench=hopb layout.kvp=8",
        "helix bench llama-3.1-8b model.load=random bench=decode -m layout.kvp=1,2,4",
    ),
    flags=MODEL_FLAGS,
    settings=schema.SETTINGS,
    keys=(
        ("bench=KIND", "decode: steps over a cache of random data; comm: collectives; hopb: with HOP-B and not;"),
        ("", "prefill: prompts; serve: requests by the clock; tune: self-speculation; none: as a run"),
        ("bench.points=[1x128K]", "sequences and the tokens of each in the cache"),
        ("bench.gammas=[0,4]", "drafts of a step"),
    ),
)
PROGRAM = Program(COMMAND, TYPED, work)
