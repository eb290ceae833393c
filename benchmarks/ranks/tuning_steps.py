"""The search for the keys and drafts with which a model drafts for itself best (Vegas, arXiv:2602.07223, section 3.4).

It says what it wants to know next, and is told; it does not care where that comes from. So it goes on where another run
stopped, and says the same of the same measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev
from typing import Any, Literal

from helix.config import SpeculationConfig

MIN_GAIN = 0.02  # more accepted tokens that count, of those accepted; and more speed over plain decoding
DEVIATIONS = 1.96  # of a mean: 95 of 100 lie within
PATIENCE = 2  # values in a row that are no better, and a series ends


@dataclass(frozen=True)
class DraftSource:
    """How a step gets its drafts.

    Attributes:
        drafter: none, ngram (lookup in the sequence itself) or sparse.
        gamma: drafts of a step.
        sparsity: of sparse.
    """

    drafter: Literal["none", "ngram", "sparse"]
    gamma: int = 0
    sparsity: float | None = None

    def over(self, config: SpeculationConfig) -> SpeculationConfig:
        """Returns settings that draft so, as many as before."""
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
    """What came of it.

    Attributes:
        tokens: of an iteration, the mean of each prompt.
        seconds: of an iteration.
    """

    source: DraftSource
    tokens: tuple[float, ...]
    seconds: float

    @property
    def mean(self) -> float:
        return fmean(self.tokens)

    @property
    def rate(self) -> float:
        """Tokens a second of one sequence."""
        return self.mean / self.seconds

    @property
    def interval(self) -> float:
        """Half of the interval that the mean lies in, over prompts; 0 of a single one."""
        return half_interval(self.tokens)

    def row(self) -> dict[str, Any]:
        source = {"drafter": self.source.drafter, "gamma": self.source.gamma, "sparsity": self.source.sparsity}
        return source | {"tokens_by_prompt": list(self.tokens), "step_us": 1e6 * self.seconds}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Measurement:
        """What `row` gave.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        source = DraftSource(row["drafter"], row["gamma"], row["sparsity"])
        return cls(source, tuple(map(float, row["tokens_by_prompt"])), row["step_us"] / 1e6)


Search = Generator[DraftSource, Measurement, Measurement]


@dataclass(frozen=True)
class TuningGrid:
    """What may be chosen.

    Attributes:
        sparsities, gammas: ascending.
        most: drafts of a step while the sparsity is sought: many.
        forced: drafts are kept at a set rate, so that fewer keys lose nothing: this sparsity is kept. None: the model
            says which are kept.
        grid: all pairs are measured in the end, for the map.
    """

    sparsities: tuple[float, ...]
    gammas: tuple[int, ...]
    max_gamma: int
    forced: float | None = None
    grid: bool = False


@dataclass(frozen=True)
class TuningResult:
    """What the search has found.

    Attributes:
        level: the sparsity at which accepted tokens level off; None: it was not sought.
        levelled: a larger one was tried, and was no better.
        sparse, ngram: the fastest of each; ngram is not tried where drafts are forced.
    """

    plain: Measurement
    plateau: float | None
    reached_plateau: bool
    sparse: Measurement
    ngram: Measurement | None

    @property
    def fastest(self) -> Measurement:
        """The fastest; plain decoding unless another is faster by what counts."""
        best = max((m for m in (self.sparse, self.ngram) if m is not None), key=lambda m: m.rate)
        return best if best.rate > (1 + MIN_GAIN) * self.plain.rate else self.plain


def search(candidates: TuningGrid) -> Generator[DraftSource, Measurement, TuningResult]:
    """Yields what is to be measured, is sent what came of it, and returns what it has found."""
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
    """Searches with what `measure` says of a way; each way is measured once."""
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
    """The first value of a rising curve than which none behind it is better.

    Better is: more tokens an iteration, by 2% and beyond the 95% interval of what the same prompts gain.
    """
    return next(i for i, here in enumerate(curve) if not any(_better(here, more) for more in curve[i + 1 :]))


def _better(fewer: Measurement, more: Measurement) -> bool:
    gains = [b - a for a, b in zip(fewer.tokens, more.tokens, strict=True)]
    return fmean(gains) > max(MIN_GAIN * fewer.mean, half_interval(gains))


def half_interval(values: Sequence[float]) -> float:
    return DEVIATIONS * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _fastest(sources: Iterable[DraftSource]) -> Search:
    """The fastest of a series that rises and falls."""
    best, num_worse = None, 0
    for source in sources:
        found = yield source
        best, num_worse = (found, 0) if best is None or found.rate > best.rate else (best, num_worse + 1)
        if num_worse == PATIENCE:
            break
    assert best is not None
    return best


def _nearby_sparsities(best: Measurement, sparsities: Sequence[float]) -> Search:
    """From a sparsity on to fewer keys, or else to more, as long as that is faster."""
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
