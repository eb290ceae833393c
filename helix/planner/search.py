"""Search over all layouts of a number of GPUs with all batches, for the best ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from helix.models import DecoderSpec
from helix.planner.hardware import Array, Hardware
from helix.planner.layer import Phase
from helix.planner.points import DP, HELIX, MEDHA, MODES, TP, Options, Points, problems
from helix.planner.step import Memory, StepCost, memory_of, predict

PIECE = 4096  # points at a time, whose arrays fit the processor's cache
MANTISSA = 2.0**40  # times are compared to 12 digits: the last bits depend on a point's index in an array


def layouts(
    spec: DecoderSpec, gpus: Sequence[int], modes: Sequence[str] = MODES, pp: bool = True
) -> list[tuple[int, ...]]:
    """Lists all layouts (mode, pp, dp, kvp, tpa, tpf, ep) of exactly one of `gpus` GPUs, each once.

    A grid without KV or data parallelism appears only as `tp`; pipeline stages are searched only for baselines.

    Raises:
        ValueError: a mode is unknown.
    """
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"unknown modes {', '.join(unknown)}; choose from {', '.join(MODES)}")
    experts = 1 if spec.experts is None else spec.experts.experts
    candidates: list[tuple[int, ...]] = []
    for total in sorted(set(gpus)):
        for stages in _divisors(total) if pp else [1]:
            ranks = total // stages
            for tpa in _divisors(ranks):
                for kvp in _divisors(ranks // tpa):
                    dp = ranks // tpa // kvp
                    for mode in (MODES.index(name) for name in modes):
                        fits = {
                            TP: dp == kvp == 1,
                            DP: kvp == 1 and dp > 1,
                            MEDHA: dp == 1 and kvp > 1,
                            HELIX: dp * kvp > 1 and stages == 1,
                        }[mode]
                        ffn = tpa if mode == MEDHA else ranks
                        eps = [ep for ep in _divisors(ffn) if ep <= experts] if fits else []
                        candidates += [(mode, stages, dp, kvp, tpa, ffn // ep, ep) for ep in eps]
    points = Points.crossed(candidates, np.array([1 << 40]))  # a batch large enough for any number of groups
    broken = np.any([wrong for _, wrong in problems(spec, points)], axis=0) if candidates else np.array([], dtype=bool)
    return [layout for layout, wrong in zip(candidates, broken, strict=True) if not wrong]


def search(
    spec: DecoderSpec,
    hardware: Hardware,
    length: int,
    options: Options,
    *,
    gpus: Sequence[int],
    batches: Array,
    modes: Sequence[str] = MODES,
) -> StepCost:
    """Predicts every layout with every batch that fits.

    Raises:
        ValueError: nothing fits, or `predict` refuses.
    """
    points = Points.crossed(layouts(spec, gpus, modes), batches)
    points = points[points.dp <= points.batch]
    memory = memory_of(spec, hardware, points, length, options)
    fits = points.batch <= memory.largest_batch
    if not fits.any():
        need = (memory.weight_bytes + memory.kv_bytes / options.memory_fraction).min()
        raise ValueError(
            f"{hardware.name}: no layout of {max(gpus)} GPUs has memory for one sequence of {length} tokens: at least "
            f"{need / 1e9:.1f} GB a GPU are needed, {hardware.memory_bytes.value / 1e9:.0f} GB are there"
        )
    points = points[fits]
    pieces = [
        predict(spec, hardware, points[np.arange(at, min(at + PIECE, len(points)))], length, options)
        for at in range(0, len(points), PIECE)
    ]
    return joined(pieces)


def joined(steps: Sequence[StepCost]) -> StepCost:
    """Concatenates the points of several predictions, which have the same phases."""

    def one(parts: Sequence[Any], kind: type) -> Any:
        return kind(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(kind)))

    phases = [
        Phase(same[0].name, *map(np.concatenate, zip(*(phase.arrays() for phase in same), strict=True)))
        for same in zip(*(step.phases for step in steps), strict=True)
    ]
    arrays = (np.concatenate([getattr(step, name) for step in steps]) for name in ("step_s", "ttl_s", "level"))
    points, memory = one([step.points for step in steps], Points), one([step.memory for step in steps], Memory)
    return StepCost(points, memory, phases, *arrays)


def ordered(step: StepCost, *speeds: Array) -> Array:
    """Sorts points: returns indices from the best to the worst by the first of `speeds`, then by the next ones.

    Ties are broken by fewest GPUs, layout and batch, so that the result does not depend on the order of points.
    """
    ties = [getattr(step.points, field.name) for field in reversed(fields(Points))]
    return np.lexsort((*ties, step.points.gpus, *(-_rounded(speed) for speed in reversed(speeds))))


def frontier(step: StepCost) -> Array:
    """Finds the points that no other beats in both speeds; returns indices by increasing speed for a user."""
    order = ordered(step, step.user, step.gpu)
    gpu = _rounded(step.gpu)[order]
    better = np.concatenate([[True], gpu[1:] > np.maximum.accumulate(gpu)[:-1]])
    return order[better][::-1]


def best_at(step: StepCost, user: float) -> tuple[int | None, int | None]:
    """Finds the indices of the highest throughput and of the most users, among points at least as fast as `user`."""
    fast = np.flatnonzero(_rounded(step.user) >= _rounded(np.array([user])))
    if not len(fast):
        return None, None
    kept = step[fast]
    return (
        int(fast[ordered(kept, kept.gpu)[0]]),
        int(fast[ordered(kept, kept.points.users.astype(float), kept.gpu)[0]]),
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _rounded(values: Array) -> Array:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * MANTISSA) / MANTISSA, exponent)
