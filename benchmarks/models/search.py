"""Searches all layouts, GPU counts and batches for the best tokens/s per user and per GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from helix.models import DecoderSpec
from helix.planner.hardware import Array, Hardware
from helix.planner.points import MODES, Options, Points, layouts
from helix.planner.step import StepCost, memory_of, predict

T = TypeVar("T")
PIECE = 4096  # points at a time, so that arrays fit the CPU cache
MANTISSA = 2.0**40  # compare times to 12 digits: the last bits depend on a point's index in an array


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
            f"{need / 1e9:.1f} GB per GPU are needed, but each has {hardware.memory_bytes.value / 1e9:.0f} GB"
        )
    points = points[fits]
    pieces = [points[np.arange(at, min(at + PIECE, len(points)))] for at in range(0, len(points), PIECE)]
    return joined([predict(spec, hardware, piece, length, options) for piece in pieces])


def joined(parts: Sequence[T]) -> T:
    """Concatenates predictions with the same phases, or points."""
    return _over_arrays(np.concatenate, parts)


def select_points(step: StepCost, indices: Array) -> StepCost:
    """Selects points of a prediction, by a mask or by indices."""
    return _over_arrays(lambda arrays: arrays[0][indices], [step])


def _over_arrays(function: Callable[[Sequence[Array]], Array], parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, np.ndarray):
        return function(parts)
    if isinstance(first, list):
        return [_over_arrays(function, same) for same in zip(*parts, strict=True)]
    if isinstance(first, str):
        return first
    return type(first)(*(_over_arrays(function, [getattr(part, f.name) for part in parts]) for f in fields(first)))


def ordered(step: StepCost, *speeds: Array, among: Array | slice = slice(None)) -> Array:
    """Sorts points: returns indices from the best to the worst by the first of `speeds`, then by the next ones.

    Ties are broken by fewest GPUs, layout and batch, so that the order of points does not matter.

    Args:
        among: indices of the points to sort; all by default.
    """
    keys = [getattr(step.points, field.name) for field in reversed(fields(Points))]
    keys += [step.points.gpus, *(-_rounded(speed) for speed in reversed(speeds))]
    return np.arange(len(step.points))[among][np.lexsort([key[among] for key in keys])]


def frontier(step: StepCost) -> Array:
    """Returns the indices of Pareto-optimal points, by increasing tokens/s per user."""
    order = ordered(step, step.tokens_per_s_user, step.tokens_per_s_gpu)
    gpu = _rounded(step.tokens_per_s_gpu)[order]
    better = np.concatenate([[True], gpu[1:] > np.maximum.accumulate(gpu)[:-1]])
    return order[better][::-1]


def best_at(step: StepCost, user: float) -> tuple[int | None, int | None]:
    """Returns the indices of the highest throughput and of the most users, among points at least as fast as `user`."""
    fast = np.flatnonzero(_rounded(step.tokens_per_s_user) >= _rounded(np.array([user])))
    if not len(fast):
        return None, None
    gpu, users = _rounded(step.tokens_per_s_gpu), step.points.users

    def best(among: Array) -> int:  # sorts only those that are as fast as the fastest
        return int(ordered(step, among=among[gpu[among] == gpu[among].max()])[0])

    return best(fast), best(fast[users[fast] == users[fast].max()])


def _rounded(values: Array) -> Array:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * MANTISSA) / MANTISSA, exponent)
