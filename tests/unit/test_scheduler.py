"""The scheduler against a model of the ranks that do what it decides, over random workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helix.kv_cache import Placement
from helix.layout import HelixLayout
from helix.request import Request
from helix.sampling import SamplingParams
from helix.scheduler import Decision, Scheduler, Segment, StepPlan

GREEDY, DRAWN, FILTERED = SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, top_k=5)


def pages_of(kvp: int, block: int, page_size: int) -> Callable[[int, int, int], int]:
    return Placement(HelixLayout.create("helix", kvp), 0, block, page_size).pages


def request(name: int, prompt: int, new: int, sampling: SamplingParams = GREEDY) -> Request:
    return Request(name, list(range(prompt)), new, sampling)


@dataclass(frozen=True)
class Workload:
    """Requests (prompt, max_new_tokens, tokens after which the model stops, sampling), and what they may use."""

    requests: list[tuple[int, int, int, SamplingParams]]
    kvp: int
    block: int
    page_size: int
    free: list[int]
    budget: int
    max_batch: int
    chunk: int
    run_steps: int
    late: int  # so many of the requests are submitted while others run


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    kvp = draw(st.integers(1, 4))
    one = st.tuples(
        st.integers(1, 90), st.integers(1, 20), st.integers(1, 20), st.sampled_from([GREEDY, DRAWN, FILTERED])
    )
    requests = draw(st.lists(one, min_size=1, max_size=12))
    block, page_size = draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from([1, 8, 16]))
    # Around what the longest request takes on a rank: some never fit, some fit alone, some together.
    longest = max(p + n for p, n, _, _ in requests)
    most = max(pages_of(kvp, block, page_size)(longest, s, k) for s in range(kvp) for k in range(kvp))
    return Workload(
        requests, kvp, block, page_size,
        free=[draw(st.integers(max(most - 1, 0), 3 * most)) for _ in range(kvp)],
        budget=draw(st.integers(longest - 5, 3 * longest)),
        max_batch=draw(st.integers(1, 5)),
        chunk=draw(st.sampled_from([1, 7, 30, 64, 500])),
        run_steps=draw(st.integers(1, 9)),
        late=draw(st.integers(0, 3)),
    )  # fmt: skip


@dataclass
class Row:
    """A slot on the ranks: what is in its cache, what it has drawn, what of that its request took."""

    which: int
    start: int
    prefilled: int = 0
    drawn: int = 0
    taken: int = 0
    ended: bool = False

    @property
    def length(self) -> int:
        return self.prefilled + max(self.drawn - 1, 0)


class Ranks:
    """Executes decisions as the engine does, and holds each one against the invariants."""

    def __init__(self, workload: Workload) -> None:
        self.w = workload
        self.pages = pages_of(workload.kvp, workload.block, workload.page_size)
        self.scheduler = Scheduler(
            self.pages, workload.free, workload.budget, workload.max_batch, workload.chunk, workload.run_steps
        )
        self.rows: dict[int, Row] = {}
        self.waiting: list[int] = []
        self.order: list[int] = []  # as admitted
        self.starts: list[int] = []
        self.decisions = 0

    def submit(self, which: int) -> None:
        prompt, new, _, sampling = self.w.requests[which]
        fits = prompt + new <= self.w.budget and all(
            self.pages(prompt + new, s, k) <= self.w.free[k] for s in range(self.w.kvp) for k in range(self.w.kvp)
        )
        reason = self.scheduler.submit(request(which, prompt, new, sampling))
        assert (reason is None) == fits
        if fits:
            self.waiting.append(which)

    def reserved(self, which: int) -> int:
        return self.w.requests[which][0] + self.w.requests[which][1]

    def left(self, *more: tuple[int, int]) -> tuple[int, list[int]]:
        """Tokens, and pages of each kvp rank, that the rows and `more` (request, start) leave free."""
        held = [(row.which, row.start) for row in self.rows.values()] + list(more)
        pages = [
            free - sum(self.pages(self.reserved(which), start, k) for which, start in held)
            for k, free in enumerate(self.w.free)
        ]
        return self.w.budget - sum(self.reserved(which) for which, _ in held), pages

    def execute(self, decision: Decision) -> None:
        self.decisions += 1
        assert decision.number == self.decisions
        assert set(decision.retire) == {slot for slot, row in self.rows.items() if row.ended}, "freed at once"
        for slot in decision.retire:
            del self.rows[slot]
        self.admit(decision)
        self.prefill(decision.prefill)
        self.decode(decision)
        for slot, row in self.rows.items():
            if not row.ended:
                assert self.scheduler.running[slot].cached == row.length, "the host knows what the cache holds"

    def admit(self, decision: Decision) -> None:
        for a in decision.admit:
            assert a.slot == min(set(range(self.w.max_batch)) - set(self.rows)), "the lowest free slot"
            assert a.id == self.waiting.pop(0), "first come, first served"
            assert a.reserved == self.reserved(int(a.id)) and len(a.prompt) == self.w.requests[int(a.id)][0]
            self.rows[a.slot] = Row(int(a.id), a.start)
            self.order.append(int(a.id))
            self.starts.append(a.start)
        tokens, pages = self.left()
        assert min(tokens, *pages) >= 0, "more reserved than there is"
        if self.waiting and len(self.rows) < self.w.max_batch:
            tokens, pages = self.left((self.waiting[0], len(self.starts) % self.w.kvp))
            assert min(tokens, *pages) < 0, "the next one waits although it fits"

    def prefill(self, segments: tuple[Segment, ...]) -> None:
        missing = {slot: self.w.requests[row.which][0] - row.prefilled for slot, row in self.rows.items()}
        assert sum(s.end - s.begin for s in segments) == min(self.w.chunk, sum(missing.values()))
        assert all(s.last for s in segments[:-1]), "one prompt after the other"
        admitted = [self.order.index(self.rows[s.slot].which) for s in segments]
        assert admitted == sorted(admitted)
        for s in segments:
            row = self.rows[s.slot]
            assert s.begin == row.prefilled < s.end <= self.w.requests[row.which][0]
            assert s.last == (s.end == self.w.requests[row.which][0])
            row.prefilled = s.end
            if s.last:
                self.draw(s.slot, row)

    def decode(self, decision: Decision) -> None:
        w = self.w
        active = {slot: row for slot, row in self.rows.items() if row.drawn}
        assert max(self.rows) < decision.rows <= w.max_batch, "every row takes part"
        sizes = {min(1 << i, w.max_batch) for i in range(w.max_batch.bit_length() + 1)}
        assert decision.rows == min(size for size in sizes if size > max(self.rows)), "a size of few, the smallest"
        sampling = [w.requests[row.which][3] for row in self.rows.values()]
        assert decision.stochastic == any(p is not GREEDY for p in sampling)
        assert decision.filtered == (FILTERED in sampling)
        most = 1 if len(active) < len(self.rows) else w.run_steps  # prompts that come in alternate with decode steps
        left = {slot: w.requests[row.which][1] - row.drawn for slot, row in active.items()}
        starved = [slot for slot in left if left[slot] > 0 and decision.decode_steps == 0]
        assert not starved, "each decision brings each sequence on that decodes"
        assert decision.decode_steps == (max(min(*left.values(), most), 1) if any(left.values()) else 0)
        for _ in range(decision.decode_steps):
            for slot, row in active.items():
                assert row.length < self.reserved(row.which), "a step past the pages"
                if row.drawn < w.requests[row.which][1]:  # the device draws no token past a row's limit
                    self.draw(slot, row)

    def draw(self, slot: int, row: Row) -> None:
        """The ranks draw for a row until it is retired; its request takes tokens until it ends."""
        _, new, stops, _ = self.w.requests[row.which]
        row.drawn += 1
        assert row.drawn <= new, "decoded past max_new_tokens"
        if not row.ended:
            row.taken += 1
            row.ended = row.taken == min(new, stops)
            self.scheduler.record_token(slot, row.ended)


def serve(workload: Workload, tampered: Callable[[Decision], Decision] = lambda decision: decision) -> Ranks:
    ranks = Ranks(workload)
    early = max(len(workload.requests) - workload.late, 1)
    for which in range(early):
        ranks.submit(which)
    later = list(range(early, len(workload.requests)))
    while (decision := ranks.scheduler.decide()) is not None:
        ranks.execute(tampered(decision))
        if later:
            ranks.submit(later.pop(0))
    assert not ranks.waiting and all(row.ended for row in ranks.rows.values()), "every request ends"
    return ranks


@settings(max_examples=300)
@given(workloads())
def test_any_workload(workload: Workload) -> None:
    ranks = serve(workload)
    assert ranks.starts == [i % workload.kvp for i in range(len(ranks.order))], "the first block goes round"
    assert ranks.scheduler._free_pages == workload.free and ranks.scheduler._free_tokens == workload.budget
    assert sorted(ranks.scheduler._free_slots) == list(range(workload.max_batch))


PLAIN = Workload([(20, 9, 20, GREEDY)] * 5, 2, 16, 16, [9, 9], 200, 3, 30, 8, 0)


@pytest.mark.parametrize(
    "tampered, words",
    [
        (lambda d: replace(d, decode_steps=d.decode_steps + 1), "decode_steps"),
        (lambda d: replace(d, decode_steps=0), "each decision brings each sequence on"),
        (lambda d: replace(d, number=d.number + 1), "number"),
        (lambda d: replace(d, rows=1), "every row takes part"),
        (lambda d: replace(d, retire=()), "freed at once"),
        (lambda d: replace(d, prefill=tuple(replace(s, begin=s.begin + 1) for s in d.prefill)), "min"),
        (lambda d: replace(d, admit=tuple(replace(a, slot=0) for a in d.admit)), "lowest free slot"),
    ],
)
def test_the_model_of_the_ranks_notices(tampered: Callable[[Decision], Decision], words: str) -> None:
    assert serve(PLAIN).order == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match=words):
        serve(PLAIN, tampered)


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    scheduler = Scheduler(pages_of(2, 16, 16), [2, 2], 64, 4, 64, 8)
    assert scheduler.submit(request(0, 50, 14)) is None
    reason = scheduler.submit(request(1, 50, 15))
    assert reason is not None and "65 tokens" in reason and "64" in reason and "kv.tokens" in reason


def test_pages_refuse_what_tokens_would_allow() -> None:
    """A rank's pages count, wherever the first block would go."""
    scheduler = Scheduler(pages_of(2, 16, 16), [1, 4], 1000, 4, 64, 8)
    assert scheduler.submit(request(0, 30, 2)) is None
    reason = scheduler.submit(request(1, 30, 3))
    assert reason is not None and "kvp rank 0 has 1 pages, and these may take 2 of them (raise" in reason


def test_drafts_have_room_behind_the_last_token() -> None:
    scheduler = Scheduler(pages_of(1, 16, 16), [3], 48, 1, 64, 8, drafts=4)
    assert scheduler.submit(request(0, 20, 25, GREEDY)) is not None, "48 tokens of KV are 1 too few"
    assert scheduler.submit(request(1, 20, 24, GREEDY)) is None
    decision = scheduler.decide()
    assert decision is not None and decision.admit[0].reserved == 48 and decision.admit[0].limit == 43


def test_a_run_of_steps_goes_at_its_pace() -> None:
    """Steps of three tokens: so many as the first to end needs, unless the pace says fewer."""
    asked: list[int] = []
    paces = [StepPlan(4, 3.0), StepPlan(4, 3.0, 2, (4, 1)), StepPlan(0)]

    def pace(rows: int) -> StepPlan:
        asked.append(rows)
        return paces[len(asked) - 1]

    scheduler = Scheduler(pages_of(1, 16, 16), [9], 144, 4, 64, 8, 4, pace)
    for name, new in ((0, 30), (1, 17)):
        assert scheduler.submit(request(name, 5, new)) is None
    steps = [(d.decode_steps, d.drafts, d.draft_limits) for _ in paces if (d := scheduler.decide()) is not None]
    assert steps == [(6, 4, ()), (2, 4, (4, 1)), (8, 0, ())] and asked == [2, 2, 2]


def test_requests_of_one_token_starve_nobody() -> None:
    """A hundred of them go by one slot; the sequence in the other one gets a step of each decision."""
    ranks = Ranks(Workload([(5, 60, 60, GREEDY), *[(5, 1, 1, GREEDY)] * 100], 1, 16, 16, [9], 144, 2, 64, 8, 0))
    for which in range(101):
        ranks.submit(which)
    drawn = []
    while (decision := ranks.scheduler.decide()) is not None:
        ranks.execute(decision)
        drawn += [row.drawn for row in ranks.rows.values() if row.which == 0]
    assert drawn[:59] == list(range(2, 61)), "the first one's second token comes with its prefill's decision"
    assert ranks.order[-1] == 100


def test_nothing_to_do() -> None:
    scheduler = Scheduler(pages_of(1, 16, 16), [4], 64, 4, 64, 8)
    assert scheduler.decide() is None
