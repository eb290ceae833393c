"""Statistics that rank 0 keeps of the requests it serves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from helix.engine.draft_policy import Acceptance, DraftOutcome
from helix.engine.scheduled import Scheduled
from helix.placement import Placement

LAST = 1 << 20  # decode steps of which each time is kept


@dataclass
class Timings:
    """Statistics of one call of `serve`, on rank 0.

    Attributes:
        prefill_s: seconds in prefill steps.
        prefill_tokens: prompt tokens in prefill steps.
        ttl_s: seconds between the tokens of consecutive decode steps, one entry a step; the last LAST steps.
        decode_tokens: tokens that requests took from decode steps.
        sequence_steps: decode steps, counted once per sequence in each.
        kv_tokens: tokens in the cache of each kvp rank (mode dp: of each rank), when the total was highest.
        held: (slot, tokens in the cache, kvp rank of the first block) of each sequence at that time.
        most_held: total tokens in `held`.
        decisions: number of decisions.
        preemptions: number of preemptions.
        decide_s: seconds of rank 0's host in making decisions.
        chunk_s: predicted seconds of the longest prompt chunk that is launched and not read; 0 if there is none.
        drafts: decode steps by the number of drafts per sequence.
        queries: decode steps by the number of their queries: rows, times 1 + drafts.
        kept: sequence steps by the number of accepted drafts.
        acceptance: acceptance by the index of a draft.
    """

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    ttl_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    decode_tokens: int = 0
    sequence_steps: int = 0
    kv_tokens: list[int] = field(default_factory=list)
    held: list[tuple[int, int, int]] = field(default_factory=list)
    most_held: int = 0
    decisions: int = 0
    preemptions: int = 0
    decide_s: float = 0.0
    chunk_s: float = 0.0
    drafts: Counter[int] = field(default_factory=Counter)
    queries: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0))

    def step(self, seconds: float, drafts: int, outcomes: Sequence[DraftOutcome]) -> None:
        """Records a decode step and its outcome for each sequence that has not ended."""
        self.ttl_s.append(seconds)
        self.sequence_steps += len(outcomes)
        self.drafts[drafts] += 1
        for outcome in outcomes:
            self.decode_tokens += 1 + outcome.kept
            self.kept[outcome.kept] += 1
            self.acceptance.add(outcome)

    def note_kv(self, running: Mapping[int, Scheduled]) -> None:
        """Records what each running sequence has in the cache, if the total is a new maximum."""
        if (total := sum(s.cached for s in running.values() if s.held is not None)) > self.most_held:
            self.most_held = total
            self.held = [(slot, s.cached, s.held.start) for slot, s in running.items() if s.held is not None]

    def count_kv(self, placement: Placement) -> None:
        """Computes `kv_tokens` from `held`."""
        layout, block = placement.layout, placement.append_block
        self.kv_tokens = [
            sum(layout.local_length(n, k, block, start) for slot, n, start in self.held if slot % layout.dp == home)
            for home in range(layout.dp)
            for k in range(layout.kvp)
        ]
