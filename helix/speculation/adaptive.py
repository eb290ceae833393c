"""How many drafts a step verifies: rank 0's choice, from what earlier steps kept and how long they took.

Tokens per second of a count of drafts are the tokens expected of a step over its seconds. Both are only known of what
has run lately, so that now and then another count is tried for a few steps. A trial costs tokens, and the next one
waits until that is a hundredth of what has come meanwhile: this bounds what adapting costs, whatever the drafts are
worth. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from helix.events.decision import StepPlan

MEMORY = 32.0  # weight, in tries, that earlier runs keep
EVIDENCE = 4.0  # the same for the first run with drafts after runs without
TRIAL_STEPS = 4
TRIAL_SHARE = 0.01  # of all tokens that trials may cost
WAIT = 16, 512  # steps between two trials, at least and at most
SECONDS_MEMORY = 0.95  # of earlier times, from one step to the next
OUTLIER = 1.5  # longer times than so many times the usual one are cut to that
ROW_GAIN, ROW_MARGIN = 0.25, 4.0


def draft_sizes(limit: int, adaptive: bool) -> tuple[int, ...]:
    """Counts of drafts that steps may have: `limit`, or where they adapt, also 0 and the powers of two below."""
    return tuple(sorted({0, limit, *(1 << i for i in range(limit.bit_length()))})) if adaptive else (limit,)


@dataclass(frozen=True)
class DraftOutcome:
    """One sequence in one step.

    Attributes:
        tried: drafts that were verified and would have counted.
        kept: of these, the first so many held.
    """

    slot: int
    tried: int
    kept: int


class Acceptance:
    """How often the draft at each place was kept, given that all before it were.

    Attributes:
        tried, kept: counts by place, the first draft's first.
    """

    def __init__(self, places: int) -> None:
        self.tried = [0.0] * places
        self.kept = [0.0] * places

    def add(self, outcome: DraftOutcome) -> None:
        for place in range(min(outcome.kept + 1, outcome.tried)):
            self.tried[place] += 1
            self.kept[place] += place < outcome.kept

    def keep(self, share: float) -> None:
        """Lets what was counted so far weigh less."""
        self.tried = [share * n for n in self.tried]
        self.kept = [share * n for n in self.kept]

    def expected_tokens(self) -> list[float]:
        """Tokens of a step with 0, 1, .. drafts; where nothing is known, a place is as good as the one before it."""
        rate, held, tokens = 0.0, 1.0, [1.0]  # the first place counts as refused until it is tried
        for tried, kept in zip(self.tried, self.kept, strict=True):
            rate = (kept + rate) / (tried + 1)
            held *= rate
            tokens.append(tokens[-1] + held)
        return tokens


class DraftPolicy:
    """Chooses drafts before each run of steps, and learns from it.

    Args:
        sizes: counts to choose from, ascending; of one there is nothing to choose.
        timed: seconds of a step of so many rows with so many drafts, where they were timed before.
    """

    def __init__(self, sizes: Sequence[int], timed: Mapping[tuple[int, int], float]) -> None:
        self.sizes = tuple(sizes)
        self._timed = timed
        self._seconds: dict[tuple[int, int], float] = {}
        self._last_run: dict[tuple[int, int], int] = {}
        self._acceptance = Acceptance(max(sizes))
        self._rows_keep: dict[int, float] = {}
        self._sent: tuple[int, ...] = ()
        self._without: Collection[int] = ()
        self._clock = 0
        self._wait: float = TRIAL_STEPS
        self._in_use = 0  # what the last choice would have been, had it not been a trial

    def pace(self, rows: int, without: Collection[int] = ()) -> StepPlan:
        """What the next run of steps of `rows` rows does; the sequences of slots `without` take no drafts."""
        self._without = without
        tokens = self._acceptance.expected_tokens()
        rates = {drafts: tokens[drafts] / self._step_seconds(rows, drafts) for drafts in self.sizes}
        self._in_use = drafts = max(self.sizes, key=lambda n: (rates[n], -n))
        trial = len(self.sizes) > 1 and self._wait <= 0
        if trial:
            at = self.sizes.index(drafts)
            others = {self.sizes[0], *self.sizes[max(at - 1, 0) : at + 2]} - {drafts}
            drafts = min(sorted(others), key=lambda n: self._last_run.get((rows, n), -1))
        is_new = len(self.sizes) > 1 and (rows, drafts) not in self._seconds
        return StepPlan(
            drafts,
            tokens[drafts],
            TRIAL_STEPS if trial or is_new else None,
            self._new_limits(rows, drafts),
            self.seconds(rows, drafts),
        )

    def seconds(self, rows: int, drafts: int) -> float | None:
        """Seconds of a step as last seen, or as timed before; None where neither was."""
        return self._seconds.get((rows, drafts), self._timed.get((rows, drafts)))

    def limit(self, slot: int) -> int:
        """Drafts of a sequence that are verified: many times what it lately kept, so that they cost little."""
        if slot in self._without:
            return 0
        most = self.sizes[-1]
        wanted = ROW_MARGIN * self._rows_keep.get(slot, float(most)) + 1
        return most if len(self.sizes) == 1 else next((n for n in self.sizes if n >= wanted), most)

    def forget(self, slot: int) -> None:
        """The sequence of a slot has ended."""
        self._rows_keep.pop(slot, None)

    def observe(self, rows: int, drafts: int, seconds: Sequence[float], outcomes: Sequence[DraftOutcome]) -> None:
        """A run of steps has ended.

        Args:
            seconds: of each of its steps.
            outcomes: of each sequence in each step, those aside that have ended.
        """
        if not seconds or not outcomes:
            return
        key, rate = (rows, drafts), self._rate_in_use(rows)
        age = self._clock - self._last_run.get(key, self._clock)
        self._clock += len(seconds)
        self._last_run[key] = self._clock
        typical = median(seconds)
        before = self._seconds.get(key, typical)
        kept = SECONDS_MEMORY ** (len(seconds) + age)
        self._seconds[key] = kept * before + (1 - kept) * min(typical, OUTLIER * before)
        if drafts == self._in_use:
            self._wait -= len(seconds)
        else:
            tokens = len(seconds) * sum(1 + o.kept for o in outcomes) / len(outcomes)
            spent = min(sum(seconds), OUTLIER * typical * len(seconds))
            lost_steps = (spent * rate - tokens) / self._acceptance.expected_tokens()[self._in_use]
            self._wait = min(max(lost_steps / TRIAL_SHARE, WAIT[0]), WAIT[1])
        if drafts:
            self._learn(outcomes)

    def _learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        memory = EVIDENCE if self._in_use == 0 else MEMORY
        self._acceptance.keep(min(1.0, memory / max(self._acceptance.tried[0], memory)))
        for outcome in outcomes:
            self._acceptance.add(outcome)
            before = self._rows_keep.get(outcome.slot, float(self.sizes[-1]))
            shown = outcome.kept if outcome.kept < outcome.tried else max(outcome.kept, before)
            self._rows_keep[outcome.slot] = before + ROW_GAIN * (shown - before)

    def _rate_in_use(self, rows: int) -> float:
        return self._acceptance.expected_tokens()[self._in_use] / self._step_seconds(rows, self._in_use)

    def _step_seconds(self, rows: int, drafts: int) -> float:
        """Seconds of a step as last seen; else as timed before, in the proportion that those seen have to their times.

        Of what was never timed: on the line through the fewest and the most drafts seen.
        """
        if (rows, drafts) in self._seconds:
            return self._seconds[rows, drafts]
        seen = {n: self._seconds[rows, n] for n in self.sizes if (rows, n) in self._seconds}
        if not seen:
            return self._timed.get((rows, drafts), 1.0)
        if (rows, drafts) in self._timed:
            return self._timed[rows, drafts] * sum(s / self._timed[rows, n] for n, s in seen.items()) / len(seen)
        few, many = min(seen), max(seen)
        slope = max(seen[many] - seen[few], 0.0) / max(many - few, 1)
        return max(seen[few] + slope * (drafts - few), min(seen.values()))

    def _new_limits(self, rows: int, drafts: int) -> tuple[int, ...]:
        """The limits of slots [0, rows) where they are not what the ranks have."""
        limits = tuple(self.limit(slot) for slot in range(rows))
        unlimited = len(self.sizes) == 1 and not self._without and not self._sent
        if drafts == 0 or unlimited or limits == self._sent:
            return ()
        self._sent = limits
        return limits
