"""Searches for the best sparsity and gamma of self-speculation (Vegas, arXiv:2602.07223, section 3.4).

A generator yields what to measure next and is sent the measurement, whatever its origin. So a run can resume another,
and the same measurements give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev
from typing import Any, Literal

from helix.config import SpeculationConfig

MIN_GAIN = 0.02  # minimum relative gain that counts: in accepted tokens, and in speed over plain decoding
DEVIATIONS = 1.96  # of a mean: a 95% interval
PATIENCE = 2  # a series ends after this many values in a row that are no better


@dataclass(frozen=True)
class DraftSource:
    """How a step gets its drafts.

    Attributes:
        drafter: none, ngram (lookup in the sequence itself) or sparse.
        gamma: drafts per step.
        sparsity: share of the keys; sparse only.
    """

    drafter: Literal["none", "ngram", "sparse"]
    gamma: int = 0
    sparsity: float | None = None

    def over(self, config: SpeculationConfig) -> SpeculationConfig:
        """Returns settings with this drafter and an unchanged gamma."""
        if self.drafter == "ngram":
            return replace(config, drafter="suffix", suffix_pool_tokens=0)
        return replace(config, drafter=self.drafter, sparsity=self.sparsity or config.sparsity)

    def __str__(self) -> str:
        if not self.gamma:
            return "plain decoding"
        drafts = f"{self.gamma} draft{'s' if self.gamma > 1 else ''}"
        return f"ngram, {drafts}" if self.sparsity is None else f"{drafts} over {100 * self.sparsity:.3g}% of the keys"


@dataclass(frozen=True)
class Measurement:
    """The result of one draft source.

    Attributes:
        tokens: per iteration, the mean of each prompt.
        seconds: per iteration.
    """

    source: DraftSource
    tokens: tuple[float, ...]
    seconds: float

    @property
    def mean(self) -> float:
        return fmean(self.tokens)

    @property
    def rate(self) -> float:
        """Tokens per second of one sequence."""
        return self.mean / self.seconds

    @property
    def interval(self) -> float:
        """Half-width of the mean's 95% interval over prompts; 0 for one prompt."""
        return half_interval(self.tokens)

    def row(self) -> dict[str, Any]:
        source = {"drafter": self.source.drafter, "gamma": self.source.gamma, "sparsity": self.source.sparsity}
        return source | {"tokens_by_prompt": list(self.tokens), "step_us": 1e6 * self.seconds}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Measurement:
        """Parses a row.

        Raises:
            KeyError, TypeError, ValueError: it is not a measurement.
        """
        source = DraftSource(row["drafter"], row["gamma"], row["sparsity"])
        return cls(source, tuple(map(float, row["tokens_by_prompt"])), row["step_us"] / 1e6)


Search = Generator[DraftSource, Measurement, Measurement]


@dataclass(frozen=True)
class TuningGrid:
    """The search space.

    Attributes:
        sparsities, gammas: ascending.
        max_gamma: drafts per step during the search for the sparsity.
        forced: use this sparsity, because a fixed acceptance rate would always favor fewer keys. None: search.
        grid: measure all pairs in the end, for the map.
    """

    sparsities: tuple[float, ...]
    gammas: tuple[int, ...]
    max_gamma: int
    forced: float | None = None
    grid: bool = False


@dataclass(frozen=True)
class TuningResult:
    """The result of the search.

    Attributes:
        plateau: the sparsity at which accepted tokens level off.
        reached_plateau: a larger one was tried, and was no better.
        sparse, ngram: the fastest of each; ngram is not tried with forced sparsity.
    """

    plain: Measurement
    plateau: float | None
    reached_plateau: bool
    sparse: Measurement
    ngram: Measurement | None

    @property
    def fastest(self) -> Measurement:
        """The fastest; plain decoding unless another is faster by MIN_GAIN."""
        best = max((m for m in (self.sparse, self.ngram) if m is not None), key=lambda m: m.rate)
        return best if best.rate > (1 + MIN_GAIN) * self.plain.rate else self.plain


def search(candidates: TuningGrid) -> Generator[DraftSource, Measurement, TuningResult]:
    """Yields draft sources to measure, is sent their measurements, and returns the result."""
    c = candidates
    plain = yield DraftSource("none")
    plateau, reached_plateau = c.forced, True
    if plateau is None:
        curve: list[Measurement] = []
        for sparsity in c.sparsities:
            curve.append((yield DraftSource("sparse", c.max_gamma, sparsity)))
            if len(curve) - plateau_index(curve) > PATIENCE:
                break
        plateau, reached_plateau = curve[plateau_index(curve)].source.sparsity, plateau_index(curve) < len(curve) - 1
        assert plateau is not None
    best = yield from _fastest(DraftSource("sparse", gamma, plateau) for gamma in c.gammas)
    ngram = None
    if c.forced is None:
        best = yield from _nearby_sparsities(best, c.sparsities)
        ngram = yield from _fastest(DraftSource("ngram", gamma) for gamma in c.gammas)
    for sparsity, gamma in product(c.sparsities, c.gammas) if c.grid else ():
        yield DraftSource("sparse", gamma, sparsity)
    return TuningResult(plain, plateau if c.forced is None else None, reached_plateau, best, ngram)


def run(candidates: TuningGrid, measure: Callable[[DraftSource], Measurement]) -> TuningResult:
    """Runs the search with `measure`; calls it once per draft source."""
    measurements: dict[DraftSource, Measurement] = {}
    steps = search(candidates)
    source = next(steps)
    while True:
        if source not in measurements:
            measurements[source] = measure(source)
        try:
            source = steps.send(measurements[source])
        except StopIteration as end:
            found: TuningResult = end.value
            return found


def plateau_index(curve: Sequence[Measurement]) -> int:
    """Returns the first index of an ascending curve after which no value is better.

    Better means more tokens per iteration, by 2% and by more than the paired 95% interval over the prompts.
    """
    return next(i for i, here in enumerate(curve) if not any(_better(here, more) for more in curve[i + 1 :]))


def _better(fewer: Measurement, more: Measurement) -> bool:
    gains = [b - a for a, b in zip(fewer.tokens, more.tokens, strict=True)]
    return fmean(gains) > max(MIN_GAIN * fewer.mean, half_interval(gains))


def half_interval(values: Sequence[float]) -> float:
    """Returns the half-width of the mean's 95% interval; 0 for one value."""
    return DEVIATIONS * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _fastest(sources: Iterable[DraftSource]) -> Search:
    best, num_worse = None, 0
    for source in sources:
        found = yield source
        best, num_worse = (found, 0) if best is None or found.rate > best.rate else (best, num_worse + 1)
        if num_worse == PATIENCE:
            break
    assert best is not None
    return best


def _nearby_sparsities(best: Measurement, sparsities: Sequence[float]) -> Search:
    """From one sparsity, tries fewer keys, or else more, as long as that is faster."""
    assert best.source.sparsity is not None
    begin = sparsities.index(best.source.sparsity)
    for series in (sparsities[:begin][::-1], sparsities[begin + 1 :]):
        before = best
        for sparsity in series:
            found = yield DraftSource("sparse", best.source.gamma, sparsity)
            if found.rate <= best.rate:
                break
            best = found
        if best is not before:
            break
    return best
