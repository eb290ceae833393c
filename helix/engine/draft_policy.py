"""Chooses the number of drafts per decode step on rank 0, from measured acceptance and step times.

The policy maximizes expected tokens per step over seconds per step. Seconds depend on the batch, its KV size and the
number of drafts in ways that no formula predicts (rows per expert, another tile), so they are measured. Since only
numbers of drafts that ran lately are known, the policy tries another one for a few steps from time to time, and adopts
none without a trial. The next trial waits until the tokens that the last one lost are a hundredth of those generated
since, which bounds the cost of adapting for drafts of any quality and cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from helix.engine.scheduler_output import StepPlan

MEMORY = 32.0  # weight of earlier runs in the acceptance, in verified first drafts
EVIDENCE = 4.0  # the same while no drafts are in use
TRIAL_STEPS = 4
TRIAL_SHARE = 0.01  # share of all tokens that trials may cost
WAIT = 16, 4096  # minimum and maximum steps between two trials
SECONDS_MEMORY = 0.95  # weight of earlier times, per step
SMALL_KV = 13  # log2 of the KV tokens of a batch below which their number does not affect the step time
OUTLIER = 1.5  # longer times are clamped to this multiple of the usual one
ROW_GAIN, ROW_MARGIN = 0.25, 4.0


def draft_sizes(limit: int, adaptive: bool) -> tuple[int, ...]:
    """Returns the numbers of drafts that steps may have: `limit`; if adaptive, also 0 and the powers of two below."""
    return tuple(sorted({0, limit, *(1 << i for i in range(limit.bit_length()))})) if adaptive else (limit,)


def kv_bucket(kv_tokens: int) -> int:
    """Returns the bucket of KV sizes with similar step times: up to 8K tokens, then powers of four."""
    return (max(kv_tokens.bit_length() - SMALL_KV, 0) + 1) // 2


@dataclass(frozen=True)
class DraftOutcome:
    """Result of verification for one sequence in one step.

    Attributes:
        verified: drafts that could have been accepted.
        accepted: how many of these were, from the first on.
    """

    slot: int
    verified: int
    accepted: int


class Acceptance:
    """Acceptance rates by draft index, given that all drafts before it were accepted."""

    def __init__(self, num_drafts: int) -> None:
        self.verified = [0.0] * num_drafts
        self.accepted = [0.0] * num_drafts

    def add(self, outcome: DraftOutcome) -> None:
        for index in range(min(outcome.accepted + 1, outcome.verified)):
            self.verified[index] += 1
            self.accepted[index] += index < outcome.accepted

    def decay(self, share: float) -> None:
        self.verified = [share * n for n in self.verified]
        self.accepted = [share * n for n in self.accepted]

    def expected_tokens(self) -> list[float]:
        """Computes the expected tokens of a step with 0, 1, .. drafts; untried drafts count like the one before."""
        rate, probability, tokens = 0.0, 1.0, [1.0]  # the first draft counts as rejected until tried
        for verified, accepted in zip(self.verified, self.accepted, strict=True):
            rate = (accepted + rate) / (verified + 1)
            probability *= rate
            tokens.append(tokens[-1] + probability)
        return tokens


class DraftPolicy:
    """Chooses the number of drafts before each run of decode steps, and learns from each run.

    Args:
        sizes: numbers of drafts to choose from, ascending.
        timed: (rows, drafts) -> seconds of a step, if timed in advance.
    """

    def __init__(self, sizes: Sequence[int], timed: Mapping[tuple[int, int], float]) -> None:
        self.sizes = tuple(sizes)
        self._timed = timed
        self._seconds: dict[int, dict[int, dict[int, float]]] = {}  # by rows, KV bucket, drafts
        self._last_run: dict[tuple[int, int, int], int] = {}
        self._acceptance = Acceptance(max(sizes))
        self._row_accepted: dict[int, float] = {}
        self._bucket = 0  # KV bucket of the last plan
        self._sent_limits: tuple[int, ...] = ()
        self._takes_drafts: Mapping[int, bool] = {}
        self._clock = 0
        self._wait: float = TRIAL_STEPS
        self._in_use = 0  # the best tried number of drafts, also during a trial

    def plan_steps(self, rows: int, kv_tokens: int, takes_drafts: Mapping[int, bool] | None = None) -> StepPlan:
        self._takes_drafts = takes_drafts or {}
        self._bucket = kv_bucket(kv_tokens)
        if not self._observed(rows, self._bucket):  # step times of other batches predict little about this one
            self._wait = min(self._wait, WAIT[0])
        tokens = self._expected_tokens()
        rates = {drafts: tokens[drafts] / self._step_seconds(rows, drafts) for drafts in self.sizes}
        best = max(self.sizes, key=lambda n: (rates[n], -n))
        ran = self._observed(rows, self._bucket)
        self._in_use = drafts = max((n for n in self.sizes if n in ran or not ran), key=lambda n: (rates[n], -n))
        is_trial = len(self.sizes) > 1 and self._wait <= 0
        if is_trial:
            self._wait = WAIT[0]  # `observe` sets the real one after the trial
            drafts = self._trial_drafts(rows, best)
        is_new = len(self.sizes) > 1 and drafts not in ran
        return StepPlan(
            drafts,
            tokens[drafts],
            TRIAL_STEPS if is_trial or is_new else None,
            self._new_limits(rows, drafts),
            self.seconds(rows, drafts),
        )

    def _trial_drafts(self, rows: int, best: int) -> int:
        """Returns the number of drafts to try: the next towards the estimated `best`, else the least recently timed."""
        ran, at = self._observed(rows, self._bucket), self.sizes.index(self._in_use)
        way = self.sizes[at:] if best > self._in_use else self.sizes[at::-1]
        if best != self._in_use and (new := [n for n in way if n not in ran]):
            return new[0]
        others = {self.sizes[0], *self.sizes[max(at - 1, 0) : at + 2]} - {self._in_use}
        return min(sorted(others), key=lambda n: self._last_run.get((rows, self._bucket, n), -1))

    def seconds(self, rows: int, drafts: int) -> float | None:
        """Returns the observed seconds of a step, else those timed in advance; None if there are neither."""
        return self._observed(rows, self._bucket).get(drafts, self._timed.get((rows, drafts)))

    def limit(self, slot: int) -> int:
        """Returns the maximum drafts to verify for a slot: a multiple of what its sequence accepted lately."""
        if not self._takes_drafts.get(slot, True):
            return 0
        max_drafts = self.sizes[-1]
        wanted = ROW_MARGIN * self._row_accepted.get(slot, float(max_drafts)) + 1
        return max_drafts if len(self.sizes) == 1 else next((n for n in self.sizes if n >= wanted), max_drafts)

    def forget(self, slot: int) -> None:
        self._row_accepted.pop(slot, None)

    def observe(
        self, rows: int, kv_tokens: int, drafts: int, seconds: Sequence[float], outcomes: Sequence[DraftOutcome]
    ) -> None:
        """Records a run of steps that has ended.

        Args:
            seconds: of each step.
            outcomes: of each sequence in each step, without sequences that had ended.
        """
        if not seconds or not outcomes:
            return
        bucket, rate = kv_bucket(kv_tokens), self._rate_in_use(rows)
        key, observed = (rows, bucket, drafts), self._seconds.setdefault(rows, {}).setdefault(bucket, {})
        age = self._clock - self._last_run.get(key, self._clock)
        self._clock += len(seconds)
        self._last_run[key] = self._clock
        typical = median(seconds)
        before = observed.get(drafts, typical)
        weight = SECONDS_MEMORY ** (len(seconds) + age)
        observed[drafts] = weight * before + (1 - weight) * min(typical, OUTLIER * before)
        if drafts == self._in_use:
            self._wait -= len(seconds)
        else:
            tokens = len(seconds) * sum(1 + o.accepted for o in outcomes) / len(outcomes)
            spent = min(sum(seconds), OUTLIER * typical * len(seconds))
            lost_steps = (spent * rate - tokens) / self._expected_tokens()[self._in_use]
            self._wait = min(max(lost_steps / TRIAL_SHARE, WAIT[0]), WAIT[1])
        if drafts:
            self._learn(outcomes)

    def _learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        memory = EVIDENCE if self._in_use == 0 else MEMORY
        self._acceptance.decay(min(1.0, memory / max(self._acceptance.verified[0], memory)))
        for outcome in outcomes:
            self._acceptance.add(outcome)
            before = self._row_accepted.get(outcome.slot, float(self.sizes[-1]))
            estimate = outcome.accepted if outcome.accepted < outcome.verified else max(outcome.accepted, before)
            self._row_accepted[outcome.slot] = before + ROW_GAIN * (estimate - before)

    def _rate_in_use(self, rows: int) -> float:
        return self._expected_tokens()[self._in_use] / self._step_seconds(rows, self._in_use)

    def _expected_tokens(self) -> list[float]:
        """Computes the expected tokens per sequence of a step with 0, 1, .. drafts, over those that take none, too."""
        takes = self._takes_drafts.values()
        share = sum(takes) / len(takes) if takes else 1.0
        return [1 + share * (tokens - 1) for tokens in self._acceptance.expected_tokens()]

    def _observed(self, rows: int, bucket: int) -> Mapping[int, float]:
        return self._seconds.get(rows, {}).get(bucket, {})

    def _step_seconds(self, rows: int, drafts: int) -> float:
        """Estimates the seconds of a step in the KV bucket of the last plan.

        In order: observed; observed in the nearest other bucket, or timed in advance, scaled by the ratio at numbers of
        drafts that are known in both; interpolated linearly between the fewest and the most drafts.
        """
        seen = self._observed(rows, self._bucket)
        if drafts in seen:
            return seen[drafts]
        buckets = self._seconds.get(rows, {})
        nearest = sorted(buckets.keys() - {self._bucket}, key=lambda bucket: abs(bucket - self._bucket))
        timed = {n: self._timed[rows, n] for n in self.sizes if (rows, n) in self._timed}
        for measured in (*(buckets[bucket] for bucket in nearest), timed):
            if drafts in measured:
                ratios = [s / measured[n] for n, s in seen.items() if n in measured]
                return measured[drafts] * (sum(ratios) / len(ratios) if ratios else 1.0)
        if not seen:
            return 1.0
        few, many = min(seen), max(seen)
        slope = max(seen[many] - seen[few], 0.0) / max(many - few, 1)
        return max(seen[few] + slope * (drafts - few), min(seen.values()))

    def _new_limits(self, rows: int, drafts: int) -> tuple[int, ...]:
        """Returns the draft limits of slots [0, rows), or () if the ranks have them already."""
        limits = tuple(self.limit(slot) for slot in range(rows))
        unlimited = len(self.sizes) == 1 and all(self._takes_drafts.values()) and not self._sent_limits
        if drafts == 0 or unlimited or limits == self._sent_limits:
            return ()
        self._sent_limits = limits
        return limits
