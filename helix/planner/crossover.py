"""Comparison of block-sparse with dense attention: the length from which on it is no slower."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from helix.planner.plan import PlannedLayout, Question, Ranking
from helix.planner.points import Options, Points, Sparse
from helix.planner.step import predict

BATCHES = (1, 2, 4, 8)  # reported besides the question's


def crossover(gain: Callable[[int], float], most: int) -> int | None:
    """Finds the least length at which the increasing `gain` is not negative; None: it is negative at `most`."""
    if gain(most) < 0:
        return None
    return 1 + bisect_left(range(1, most), True, key=lambda length: gain(length) >= 0)


def ttl_s(question: Question, choice: PlannedLayout, batch: int, length: int, sparse: Sparse | None) -> float:
    """Predicts the seconds of a token with a choice's layout, chunks and drafts, at any batch, length and attention."""
    q, row = question, choice.layout
    points = Points.of(row.mode, batch, kvp=row.kvp, tpa=row.tpa, tpf=row.tpf, ep=row.ep)
    options: Options = replace(
        q.options, append_block=choice.append_block, hopb=choice.chunks > 1, chunks=choice.chunks,
        speculation=q.speculation(choice.gamma), sparse=sparse, tier=None if sparse is None else q.options.tier,
    )  # fmt: skip
    return float(predict(q.spec, q.hardware, points, length, options).ttl_s[0])


def dense_ttl_s(question: Question, choice: PlannedLayout) -> float:
    """Predicts the seconds of a token with dense attention and the rest as chosen."""
    return ttl_s(question, choice, choice.batch, question.context, None)


def pays_from(question: Question, choice: PlannedLayout, batch: int | None = None) -> int | None:
    """Returns the least length at which sparse attention is no slower than dense; None: none in the model's context.

    Args:
        batch: batch to use instead of the choice's.
    """
    sparse = question.options.sparse
    assert sparse is not None
    always = replace(sparse, from_tokens=0)

    def gain(length: int) -> float:
        of = (ttl_s(question, choice, batch or choice.batch, length, kind) for kind in (None, always))
        return next(of) - next(of)

    return crossover(gain, question.spec.max_positions)


def compared(ranking: Ranking) -> str:
    """Describes in words whether sparse or dense attention is faster here, and the length below which dense is."""
    q, first = ranking.question, ranking.choices[0]
    sparse = q.options.sparse
    assert sparse is not None
    times, name = min((dense_ttl_s(q, c), c.name) for c in ranking.choices if c.batch == first.batch)
    ours = f"{_ms(first.ttl_s)} a token with {first.name} and {sparse.chosen}"
    dense = f"{_ms(times)} with {name} and dense attention"
    if times < first.ttl_s:
        said = f"Dense attention is faster here: {ours}, {dense}."
    else:
        said = f"Block-sparse attention pays here: {ours}, {dense}, {times / first.ttl_s:.2f} times as long."
    lengths = {batch: pays_from(q, first, batch) for batch in sorted({*BATCHES, first.batch})}
    below = (f"{at:,} tokens" if at else "every length of the model's context" for at in lengths.values())
    named = ", ".join(f"{at} at batch {batch}" for at, batch in zip(below, lengths, strict=True))
    return f"{said} With {first.name}, dense attention is faster below {named}."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
