"""Comparison of drafts that have a cost with plain decoding: the gain, and the length from which on it pays."""

from __future__ import annotations

from dataclasses import replace

from helix.planner.crossover import crossover, ttl_s
from helix.planner.plan import PlannedLayout, Question, Ranking, plan


def drafted_ttl_s(question: Question, choice: PlannedLayout, length: int) -> tuple[float, int]:
    """Predicts a token's seconds with a choice's layout and the best number of drafts, at least 1; and that number."""
    q = question
    return min((ttl_s(q, replace(choice, gamma=n), choice.batch, length, None), n) for n in q.gammas if n)


def pays_from(question: Question, choice: PlannedLayout) -> int | None:
    """Returns the least length at which drafts are no slower than plain decoding; None: none in the model's context."""
    plain = replace(choice, gamma=0)

    def gain(length: int) -> float:
        return ttl_s(question, plain, choice.batch, length, None) - drafted_ttl_s(question, choice, length)[0]

    return crossover(gain, question.spec.max_positions)


def compared(ranking: Ranking) -> str:
    """Describes in words which is faster here, and the length below which plain decoding is."""
    q, first = ranking.question, ranking.choices[0]
    over = "by the layer" if q.sparsity is None else f"over {q.sparsity:.3g} of the keys"
    if first.gamma:
        plain = plan(replace(q, acceptance=None, gamma=None, sparsity=None, layer=None)).choices[0]
        gain = first.user / plain.user if q.batch is not None else first.gpu / plain.gpu
        said = f"Drafting pays here, {gain:.2f} times: {_speed(first)} and {_drafts(first.gamma)} {over}, "
        said += f"{_speed(plain)} and none."
    else:
        seconds, gamma, name = min((*drafted_ttl_s(q, c, q.context), c.name) for c in ranking.choices)
        said = f"Drafting does not pay here: {_speed(first)} and none; the best drafts would be {gamma} {over}, "
        said += f"{1e3 * seconds:.2f} ms a token with {name}."
    if q.layer is not None:  # there is no such length: a layer costs about as much at any
        return said
    tokens = pays_from(q, first)
    below = f"{tokens:,} tokens" if tokens is not None else "every length of the model's context"
    return f"{said} With {first.name} at batch {first.batch}, plain decoding is faster below {below}."


def _drafts(count: int) -> str:
    return f"{count} draft{'s' if count > 1 else ''}"


def _speed(choice: PlannedLayout) -> str:
    return f"{1e3 * choice.ttl_s:.2f} ms a token ({choice.gpu:.1f} tokens/s/GPU) with {choice.name}"
