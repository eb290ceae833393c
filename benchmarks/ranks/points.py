"""The points of a benchmark (`bench.points`): an engine for each, and the error of those that do not fit."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks.synthetic import apply_synthetic
from benchmarks.schema import LabConfig, bench_points, lab
from comm.base import Communicator
from helix.config import Config, HopBChunks
from helix.engine.core import Engine
from helix.errors import ConfigError
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.setup.engine import build_engine
from helix.speculation import DraftModel
from launch.inputs.preflight import CheckedRun


def gammas(config: LabConfig) -> list[int]:
    """Returns the numbers of drafts with which each point is timed."""
    return config.bench.gammas or [0 if config.speculation.drafter == "none" else config.speculation.gamma]


def limit(config: Config, device: torch.device) -> None:
    """Caps this rank's GPU memory at `bench.gpu_bytes`; call it before the model is loaded."""
    limit_bytes = lab(config).bench.gpu_bytes
    if limit_bytes is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / torch.cuda.mem_get_info(device)[1]), device)


def used(device: torch.device) -> int | None:
    """Returns the GPU's bytes in use by all processes, from the driver; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def at_each(
    plan: CheckedRun, comm: Communicator, measure: Callable[[int, int], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Returns the rows of `measure(batch, length)` at each point, or one with the reason why the point `failed`.

    Rank 0 appends a point's rows to `bench.output` as it ends, so a later failure loses nothing.

    Raises:
        ConfigError: the only point does not fit.
    """
    bench, found = lab(plan.config).bench, list[dict[str, Any]]()
    todo = bench_points(bench)
    for batch, length in todo:
        try:
            rows = measure(batch, length)
        except ConfigError as error:  # with several points, go on with the others
            if len(todo) == 1:
                raise
            rows = [{"batch": batch, "length": length, "failed": str(error)}]
        found += rows
        if bench.output is not None and comm.rank == 0:
            with Path(bench.output).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        if comm.device.type == "cuda":
            gc.collect()  # an engine and its graphs refer to each other
            torch.cuda.empty_cache()
    return found


def engine_at(
    plan: CheckedRun,
    comm: Communicator,
    model: Decoder,
    batch: int,
    length: int,
    steps: int,
    draft: DraftModel | DraftLayer | None = None,
    hopb: HopBChunks | None = None,
) -> tuple[Engine, int]:
    """Makes an engine for `batch` sequences of `length` tokens and `steps` more steps; also returns the tokens of each.

    Args:
        hopb: overrides hopb.chunks.

    Raises:
        ConfigError: they exceed the model's context, or memory.
    """
    config = lab(plan.config)
    reserved = length + steps * (1 + max(gammas(config)))
    if reserved > model.spec.max_positions:
        raise ConfigError(
            f"{length} tokens and {reserved - length} steps exceed the model's {model.spec.context}: raise "
            "model.config.max_position_embeddings, or set bench.points with fewer tokens"
        )
    ranks = plan.layout.dp
    tokens = -(-batch // ranks) * ranks * reserved  # over all ranks; in mode dp all hold the same number
    sized = replace(
        config,
        kv=replace(config.kv, tokens=tokens, prefix_cache=False),  # no prefix hits: compute what is timed
        hopb=replace(config.hopb, chunks=hopb or config.hopb.chunks),
    )
    engine = build_engine(plan.layout, model, sized, batch, tokens, draft=draft)
    apply_synthetic(engine.runner, config)
    return engine, reserved
