"""What rank 0 notes of the requests that it serves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from helix.speculation.adaptive import Acceptance, Outcome

LAST = 1 << 20  # decode steps that are remembered one by one


@dataclass
class Timings:
    """What rank 0 saw of a call of `generate` or `serve`.

    Attributes:
        prefill_s: seconds in prefill steps.
        prefill_tokens: prompt tokens in them.
        ttl_s: seconds between decode steps' tokens, one entry a step; of the last ones, where there were many.
        decode_tokens: tokens that decode steps gave to requests.
        sequence_steps: decode steps of all sequences, each counted by itself.
        kv_tokens: tokens held when they were most, for each kvp rank.
        held: of each sequence then, how many it had and where its first block was.
        decisions: how many there were.
        preemptions: how often a sequence lost its pages for another one.
        decide_s: seconds of rank 0's host in making them.
        drafts: decode steps by how many tokens they proposed for a sequence.
        kept: sequence steps by how many drafts were kept.
        acceptance: by the place of a draft.
    """

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    ttl_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    decode_tokens: int = 0
    sequence_steps: int = 0
    kv_tokens: list[int] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)
    decisions: int = 0
    preemptions: int = 0
    decide_s: float = 0.0
    drafts: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0))

    def step(self, seconds: float, drafts: int, outcomes: Sequence[Outcome]) -> None:
        """Notes a decode step and what it gave to each sequence that has not ended."""
        self.ttl_s.append(seconds)
        self.sequence_steps += len(outcomes)
        self.drafts[drafts] += 1
        for outcome in outcomes:
            self.decode_tokens += 1 + outcome.kept
            self.kept[outcome.kept] += 1
            self.acceptance.add(outcome)
