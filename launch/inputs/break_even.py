"""Compares a planned layout with dense attention, or with no drafts: which is faster, and from which length on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from helix.planner.plan import PlannedLayout, PlanQuery, Ranking, plan
from helix.planner.points import Sparse
from helix.planner.step import predict

BATCHES = (1, 2, 4, 8)  # batch sizes to compare sparse attention at, besides the query's


def crossover(gain: Callable[[int], float], max_length: int) -> int | None:
    """Returns the smallest length at which the increasing `gain` is not negative; None if there is none."""
    if gain(max_length) < 0:
        return None
    return 1 + bisect_left(range(1, max_length), True, key=lambda length: gain(length) >= 0)


def ttl_s(q: PlanQuery, choice: PlannedLayout, length: int, sparse: Sparse | None = None) -> float:
    """Predicts the seconds per token with a choice's layout and settings, at any length and with any attention."""
    options = q.settings(q.options, choice.chunks, choice.gamma, choice.append_block)
    options = replace(options, sparse=sparse, offload=None if sparse is None else options.offload)
    return float(predict(q.spec, q.hardware, choice.points, length, options).ttl_s[0])


def sparse_pays_from(q: PlanQuery, choice: PlannedLayout) -> int | None:
    """Returns the smallest length at which sparse attention is no slower than dense; None: none within the context."""
    assert q.options.sparse is not None
    always = replace(q.options.sparse, from_tokens=0)
    return crossover(lambda n: ttl_s(q, choice, n) - ttl_s(q, choice, n, always), q.spec.max_positions)


def compare_sparse(ranking: Ranking) -> str:
    """Describes whether sparse or dense attention is faster for the query, and below which length dense is."""
    q, first = ranking.query, ranking.choices[0]
    assert q.options.sparse is not None
    times, name = min((ttl_s(q, c, q.context), c.name) for c in ranking.choices if c.batch == first.batch)
    ours = f"{ms(first.ttl_s)} a token with {first.name} and {q.options.sparse.description}"
    dense = f"{ms(times)} with {name} and dense attention"
    if times < first.ttl_s:
        verdict = f"Dense attention is faster here: {ours}, {dense}."
    else:
        verdict = f"Block-sparse attention pays here: {ours}, {dense}, {times / first.ttl_s:.2f} times as long."
    lengths = {batch: sparse_pays_from(q, replace(first, batch=batch)) for batch in sorted({*BATCHES, first.batch})}
    named = ", ".join(f"{_below(tokens)} at batch {batch}" for batch, tokens in lengths.items())
    return f"{verdict} With {first.name}, dense attention is faster below {named}."


def best_drafts(q: PlanQuery, choice: PlannedLayout, length: int) -> tuple[float, int]:
    """Predicts the seconds per token with the best number of drafts, at least 1; returns both."""
    return min((ttl_s(q, replace(choice, gamma=n), length), n) for n in q.gammas if n)


def drafts_pay_from(q: PlanQuery, choice: PlannedLayout) -> int | None:
    """Returns the smallest length at which drafts are no slower than none; None: none within the context."""
    plain = replace(choice, gamma=0)
    return crossover(lambda n: ttl_s(q, plain, n) - best_drafts(q, choice, n)[0], q.spec.max_positions)


def compare_drafts(ranking: Ranking) -> str:
    """Describes whether drafting is faster for the query, and below which length plain decoding is."""
    q, first = ranking.query, ranking.choices[0]
    over = "by the layer" if q.sparsity is None else f"over {q.sparsity:.3g} of the keys"
    if q.sparsity is not None and q.spec.indexers:
        over = "over selected tokens"
    if first.gamma:
        plain = plan(replace(q, acceptance=None, gamma=None, sparsity=None, layer=None)).choices[0]
        gain = (
            first.tokens_per_s_user / plain.tokens_per_s_user
            if q.batch is not None
            else first.tokens_per_s_gpu / plain.tokens_per_s_gpu
        )
        drafts = f"{first.gamma} draft{'s' if first.gamma > 1 else ''}"
        verdict = (
            f"Drafting pays here, {gain:.2f} times: {_speed(first)} and {drafts} {over}, {_speed(plain)} and none."
        )
    else:
        seconds, gamma, name = min((*best_drafts(q, c, q.context), c.name) for c in ranking.choices)
        verdict = f"Drafting does not pay here: {_speed(first)} and none; the best drafts would be {gamma} {over}, "
        verdict += f"{ms(seconds)} a token with {name}."
    if q.layer is not None:  # there is no such length: a drafting layer costs about the same at any length
        return verdict
    below = _below(drafts_pay_from(q, first))
    return f"{verdict} With {first.name} at batch {first.batch}, plain decoding is faster below {below}."


def _below(tokens: int | None) -> str:
    return f"{tokens:,} tokens" if tokens else "every length of the model's context"


def _speed(choice: PlannedLayout) -> str:
    return f"{ms(choice.ttl_s)} a token ({choice.tokens_per_s_gpu:.1f} tokens/s/GPU) with {choice.name}"


def ms(seconds: float) -> str:
    """Formats seconds as milliseconds."""
    return f"{1e3 * seconds:.2f} ms"
