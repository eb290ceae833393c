"""Recorded decode steps (`benchmarks/results/`), and the cost model's predictions of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from helix.models import DecoderSpec
from helix.planner.hardware import Hardware
from helix.planner.points import Options, Points, Sparse, Speculation
from helix.planner.step import predict
from launch.inputs.compose import ROOT
from launch.inputs.shapes import spec_of

RESULTS = ROOT / "benchmarks" / "results"
# If both have a cell, the baselines' counts: its other layouts were measured with the same code.
FILES = (RESULTS / "step.jsonl", RESULTS / "baselines.jsonl")
DRAFTED = (RESULTS / "self-drafts.jsonl", RESULTS / "self-drafts.emulated-8.jsonl")  # no constant was fitted to these
RECORDED = Options(weights="bf16", kv="bf16", messages="bf16", hopb=False)


@dataclass(frozen=True)
class Cell:
    """One recorded point.

    Attributes:
        layers: number of layers that were measured; None: all.
        layout: as helix/layout.py writes it.
        ttl_us: from one step to the next.
        sparse: what a block-sparse step read; None: everything.
        emulated_by: number of GPUs that emulated its ranks; None: each rank had its own.
        drafts: per step; None: no drafts.
    """

    model: str
    layers: int | None
    layout: str
    batch: int
    length: int
    device: str
    commit: str
    ttl_us: float
    sparse: Sparse | None = None
    emulated_by: int | None = None
    drafts: Speculation | None = None

    @property
    def workload(self) -> tuple[str, int, int]:
        return self.model, self.batch, self.length

    @property
    def is_dense(self) -> bool:
        """Whether it has no experts, latents, sparse blocks or drafts: constants are fitted on such cells."""
        return (
            self.sparse is None
            and self.drafts is None
            and self.spec.experts is None
            and self.spec.attention.latent is None
        )

    @property
    def ranks(self) -> int:
        return self._widths["kvp"] * self._widths["tpa"]

    @property
    def spec(self) -> DecoderSpec:
        return _spec(self.model, self.layers)

    @property
    def options(self) -> Options:
        """Options to predict its step with."""
        return replace(RECORDED, sparse=self.sparse, speculation=self.drafts)

    @property
    def points(self) -> Points:
        return Points.of(self.layout.split()[0], self.batch, **self._widths)

    @property
    def _widths(self) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", self.layout)}


@cache
def _spec(model: str, layers: int | None) -> DecoderSpec:
    whole = spec_of(model)
    return whole if layers in (None, len(whole.layers)) else spec_of(model, f"model.config.num_hidden_layers={layers}")


def read_cells(files: Sequence[Path] = FILES) -> list[Cell]:
    """Returns the newest line of each cell that was measured with today's kernels, in order of appearance.

    Raises:
        ValueError: a file cannot be read, or a line is not a recorded step.
    """
    found: dict[tuple[Any, ...], Cell] = {}
    for path in files:
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        for number, row in enumerate(rows, 1):
            if row.get("ttl_p50_us") is None or "superseded" in row:  # did not fit, or has replaced kernels
                continue
            try:
                cell = cell_of(row)
                found[cell.device, cell.layout, *cell.workload, cell.sparse, cell.drafts] = cell
            except KeyError as error:
                raise ValueError(f"{path}, line {number}: not a recorded step: {error} is missing") from error
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return list(found.values())


def cell_of(row: dict[str, Any]) -> Cell:
    """Makes a cell from a recorded row.

    Raises:
        KeyError: a field is missing.
        ValueError: a block-sparse step read everything, according to the device's count.
    """
    return Cell(
        row["model"], row.get("layers"), row["layout"], row["batch"], row["length"], row["device"],
        row["commit"] or "-", row["ttl_p50_us"], _sparse(row), row.get("emulated_by"), _drafts(row),
    )  # fmt: skip


def _drafts(row: dict[str, Any]) -> Speculation | None:
    """What a step verified; acceptance does not change its time."""
    return Speculation(row["gamma"], 1.0, sparsity=row.get("sparsity")) if row.get("gamma") else None


def _sparse(row: dict[str, Any]) -> Sparse | None:
    if row.get("sparse") is None:
        return None
    sparse, read = Sparse(**row["sparse"]), max(row["blocks_read_per_rank"])
    kvp = int(re.findall(r"kvp=(\d+)", row["layout"])[0])
    num_blocks = row["length"] / sparse.block / kvp
    if read > num_blocks - 1 and sparse.blocks(np.array(kvp)) < num_blocks - 1:
        counted = f"blocks_read_per_rank={read:g} of some {num_blocks:g}"
        raise ValueError(f"a block-sparse step read everything: {counted}; record it again")
    return sparse


def compare(cell: Cell, hardware: Hardware) -> dict[str, Any]:
    """Returns a cell with its prediction; `error` is predicted / measured - 1."""
    step = predict(cell.spec, hardware, cell.points, cell.length, cell.options)
    predicted = 1e6 * float(step.step_s[0])
    return {
        "model": cell.model, "layout": cell.layout, "batch": cell.batch, "length": cell.length, "commit": cell.commit,
        "measured_us": cell.ttl_us, "predicted_us": predicted, "error": predicted / cell.ttl_us - 1,
        "provenance": step.provenance(0),
    }  # fmt: skip


def halves(cells: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Splits cells by workload, ordered by model, batch and length: every other one to fit on, the rest to check on.

    All layouts of a workload are on one side, so the check has lengths and batches that were not fitted.
    """
    cells = sorted(cells, key=lambda cell: (cell.workload, cell.layout))
    works = list(dict.fromkeys(cell.workload for cell in cells))
    fitted = set(works[::2])
    return [c for c in cells if c.workload in fitted], [c for c in cells if c.workload not in fitted]
