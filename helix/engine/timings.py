"""Statistics that rank 0 collects while serving."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from helix.engine.draft_policy import Acceptance, DraftOutcome
from helix.engine.request_state import RequestState
from helix.kv_placement import KVPlacement

LAST = 1 << 20  # decode steps in `ttl_s`


@dataclass
class Timings:
    """Statistics of one call of `serve`, on rank 0.

    Attributes:
        ttl_s: seconds between the tokens of consecutive decode steps, one entry per step; the last LAST steps.
        sequence_steps: decode steps times the sequences in each.
        kv_tokens: tokens in the cache of each kvp rank (mode dp: of each rank), when the total was highest.
        kv_by_slot: (slot, tokens in the cache, kvp rank of the first block) of each sequence at that time.
        decide_s: seconds that rank 0 spent scheduling.
        chunk_s: predicted seconds of the longest prefill chunk in flight; 0 if there is none.
        drafts: decode steps by drafts per sequence.
        queries: decode steps by queries: rows, times 1 + drafts.
        accepted: sequence steps by accepted drafts.
        cached_tokens: prompt tokens of admitted requests that were cached, by source: device, host or disk.
    """

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    ttl_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    decode_tokens: int = 0
    sequence_steps: int = 0
    kv_tokens: list[int] = field(default_factory=list)
    kv_by_slot: list[tuple[int, int, int]] = field(default_factory=list)
    max_kv_tokens: int = 0
    decisions: int = 0
    preemptions: int = 0
    decide_s: float = 0.0
    chunk_s: float = 0.0
    drafts: Counter[int] = field(default_factory=Counter)
    queries: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    cached_tokens: Counter[str] = field(default_factory=Counter)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0))

    def step(self, seconds: float, drafts: int, outcomes: Sequence[DraftOutcome]) -> None:
        self.ttl_s.append(seconds)
        self.sequence_steps += len(outcomes)
        self.drafts[drafts] += 1
        for outcome in outcomes:
            self.decode_tokens += 1 + outcome.accepted
            self.accepted[outcome.accepted] += 1
            self.acceptance.add(outcome)

    def record_admission(self, s: RequestState) -> None:
        restored, on_disk = (0, 0) if s.restore is None else (s.restore.tokens, s.restore.disk_tokens)
        restored = min(restored, s.cached_tokens)
        on_disk = min(on_disk, restored)
        self.cached_tokens += Counter(device=s.cached_tokens - restored, host=restored - on_disk, disk=on_disk)

    def record_kv(self, running: Mapping[int, RequestState]) -> None:
        """Records what each running sequence has in the cache, if the total is a new maximum."""
        if (total := sum(s.num_kv_tokens for s in running.values() if s.block_table is not None)) > self.max_kv_tokens:
            self.max_kv_tokens = total
            self.kv_by_slot = [
                (slot, s.num_kv_tokens, s.block_table.start) for slot, s in running.items() if s.block_table is not None
            ]

    def count_kv(self, placement: KVPlacement) -> None:
        layout, block = placement.layout, placement.append_block
        self.kv_tokens = [
            sum(
                layout.local_length(n, k, block, start)
                for slot, n, start in self.kv_by_slot
                if slot % layout.dp == dp_rank
            )
            for dp_rank in range(layout.dp)
            for k in range(layout.kvp)
        ]
