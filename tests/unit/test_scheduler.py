"""What the scheduler decides, case by case, and whatever comes: against a model of the ranks that carry it out."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from helix.engine.prefill_time import PrefillTime
from helix.engine.request import Request
from helix.engine.scheduler import LOOK_AHEAD
from helix.engine.scheduler_output import SchedulerOutput, StepPlan
from helix.sampling_params import SamplingParams
from tests.simulated_engine import DOUBLING, TOKEN_S, SimulatedEngine, calls_of


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 900, count).tolist()


class AnyRequests(RuleBasedStateMachine):
    """Requests come, are aborted, draw and end, while up to two decisions are under way."""

    @initialize(
        homes=st.sampled_from([1, 1, 2, 3]),
        grid=st.sampled_from([(1, 1, 2), (2, 1, 1), (2, 2, 2), (2, 4, 2), (3, 2, 3), (4, 2, 4)]),
        pages=st.integers(12, 60),
        lookahead=st.integers(0, 2),
        caching=st.booleans(),
        max_batch=st.integers(1, 5),
        prefill_chunk=st.sampled_from([7, 40, 4096]),
        run_steps=st.integers(1, 6),
        lookahead_tokens=st.sampled_from([1, 8, 30]),
        drafts=st.sampled_from([0, 0, 3]),
        patience_s=st.sampled_from([0.0, 0.05, 30.0]),
        chunk_sizes=st.sampled_from([(), (8, 12, 16, 24, 32)]),
        min_shared_pages=st.sampled_from([1, 1, 4, math.inf]),
        goal=st.sampled_from(["latency", "balance", "throughput"]),
        lacking=st.sampled_from([0.0, 5.0, 17.0, math.inf, math.inf]),
        snapshots=st.sampled_from([(0, 0, 0), (1, 0, 0), (2, 2, 0), (4, 1, 16)]),
        slabs=st.sampled_from([0, 0, 1, 6, 40]),
        records=st.sampled_from([0, 2, 30]),
        own_pages=st.booleans(),
        bounds=st.sampled_from([{}, {"stall_s": 0.002, "decode_share": 0.7}, {"stall_s": 0.05}, {"decode_share": 0.1}]),
    )
    def begin(self, grid: tuple[int, int, int], pages: int, bounds: dict[str, float], **options: Any) -> None:
        kvp, append_block, page_size = grid
        self.engine = SimulatedEngine(
            pages,
            kvp=kvp,
            append_block=append_block,
            page_size=page_size,
            accepted_drafts=(0, 3, 1, 2, 0),
            failing=0.05,
            **bounds,
            **options,
        )
        self.texts = [words(200, seed) for seed in range(2)]

    @rule(
        text=st.integers(0, 1),
        shared=st.integers(0, 60),
        suffix_length=st.integers(1, 20),
        new=st.integers(1, 40),
        stops=st.integers(1, 60),
        priority=st.sampled_from([0, 0, 0, 1]),
        cache_salt=st.sampled_from([None, None, "a"]),
        guided=st.sampled_from([False, False, True]),
        last_message_start=st.sampled_from([0, 0, 10, 40]),
    )
    def submit(self, text: int, shared: int, suffix_length: int, new: int, **options: Any) -> None:
        engine = self.engine
        prompt = self.texts[text][:shared] + words(suffix_length, len(engine.served))
        if engine.stripes.pages_for(len(prompt) + new + engine.drafts) <= engine.pool.pages:
            engine.submit(prompt, new, **options)

    @precondition(lambda self: self.engine.served)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """A further turn of a conversation, or what was aborted once more."""
        engine = self.engine
        before = data.draw(st.sampled_from(list(engine.served.values())[-4:]))
        prompt = [*before.request.prompt.tolist(), *before.drawn, *words(data.draw(st.integers(0, 6)))]
        if engine.stripes.pages_for(len(prompt) + 10 + engine.drafts) <= engine.pool.pages:
            engine.submit(prompt, 10, None, 0, before.request.cache_salt)

    @precondition(lambda self: self.engine.served)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(list(self.engine.served)[-6:])))

    @rule(times=st.integers(1, 6))
    def advance(self, times: int) -> None:
        for _ in range(times):
            self.engine.advance()

    @precondition(lambda self: self.engine.due)
    @rule()
    def read_tokens(self) -> None:
        self.engine.read_tokens()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain(5000)
            self.engine.check_nothing_is_left()


AnyRequests.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyRequests = AnyRequests.TestCase


def test_masks_are_of_steps_whose_sampling_is_left() -> None:
    """Not of a prompt's first token, which is in flight with the mask of its admission."""
    engine = SimulatedEngine(12, page_size=2, append_block=1, lookahead=1, max_batch=2, prefill_chunk=7, run_steps=1)
    engine.submit(words(1, 0), 3, 2, guided=True)
    engine.advance()
    engine.read_tokens()
    engine.submit(words(1, 1), 1, 1, guided=True)
    engine.drain()  # `sample_held` checks the masks
    engine.check_nothing_is_left()


def test_a_thousand_requests_with_aborts_leave_nothing() -> None:
    """Over four ranks, at most two decisions under way; conversations come back, a third of all requests is aborted."""
    rng = np.random.default_rng(0)
    engine = SimulatedEngine(
        60, kvp=4, append_block=4, page_size=4, max_batch=8, lookahead_tokens=6, run_steps=3, min_shared_pages=2
    )
    systems = [words(80, seed) for seed in range(3)]
    while len(engine.served) < 1000:
        for _ in range(rng.integers(0, 4)):
            prompt = systems[rng.integers(3)] + words(rng.integers(1, 200), len(engine.served))
            if len(engine.served) > 50 and rng.random() < 0.3:
                before = engine.served[len(engine.served) - int(rng.integers(1, 50))]
                prompt = [*before.request.prompt.tolist(), *before.drawn, *words(rng.integers(1, 20))][:600]
            name = engine.submit(prompt, int(rng.integers(1, 80)), priority=int(rng.random() < 0.1))
            if rng.random() < 0.3:
                engine.abort(name - int(rng.integers(0, min(name + 1, 20))))
        engine.advance()
    engine.drain()
    assert engine.scheduler.preemptions > 50, "the cache was never full"
    assert engine.shared_reads > 50, "no prefix was read once for several"
    computed = sum(s.computed for s in engine.served.values())
    assert computed < 0.7 * sum(len(s.request.prompt) for s in engine.served.values())
    engine.check_nothing_is_left()


@pytest.mark.parametrize(
    "goal, least, most", [("latency", 0.02, 0.0251), ("balance", 0.2, 0.401), ("throughput", 0.5, 1.0)]
)
def test_bursts_stay_within_the_goals_bounds_and_nobody_starves(goal: str, least: float, most: float) -> None:
    """A thousand prompts in five bursts, eight long ones before each: chunks become longer, and short again."""
    rng = np.random.default_rng(1)
    engine = SimulatedEngine(9000, kvp=4, append_block=4, page_size=4, max_batch=64, run_steps=8, goal=goal)
    for burst in range(5):
        for number in range(8):
            engine.submit(words(1500, 8 * burst + number), 20)
        for _ in range(192):
            engine.submit(words(int(rng.integers(1, 120)), len(engine.served)), int(rng.integers(1, 40)))
        for _ in range(200):
            engine.advance()
        assert engine.longest_s <= most * 1.001
    engine.drain()
    engine.check_nothing_is_left()
    assert engine.longest_s > least, "chunks stay short, however many wait"
    firsts = [s.times[0] for s in engine.served.values()]
    last_of_burst = [max(firsts[200 * i : 200 * (i + 1)]) for i in range(5)]
    assert last_of_burst == sorted(last_of_burst), "a burst passes the one before"
    gaps = [b - a for s in engine.served.values() for a, b in pairwise(s.times)]
    assert max(gaps) <= most + 2 * engine.step_s, "a stream has waited for more than a chunk and a step"


def test_chunks_follow_one_another_while_half_of_the_pause_is_left() -> None:
    """Beside a stream, for the goal throughput: chunks of 58 ms until 0.5 s are over, then one step, and again."""
    engine = SimulatedEngine(9000, max_batch=64, lookahead=0, prefill_chunk=500, run_steps=50, goal="throughput")
    engine.submit(words(100), 2000)
    engine.advance()
    for seed in range(40):
        engine.submit(words(500, seed + 1), 1)
    runs = [(len(d.prefill_chunks) > 0, d.decode_steps) for _ in range(20) if (d := engine.advance()) is not None]
    pause = [(True, 0)] * (len(runs[: runs.index((True, 1))])) + [(True, 1)]
    assert runs[: 2 * len(pause)] == 2 * pause and 0.5 < engine.longest_s < 0.6, (runs, engine.longest_s)


def test_chunks_are_cut_to_sizes_that_are_launched_at_once() -> None:
    """Chunks are rounded where somebody waits for tokens and a prompt goes on behind them."""
    engine = SimulatedEngine(9000, prefill_chunk=8192, lookahead=0, chunk_sizes=(64, 96, 128, 192, 256))
    engine.submit(words(100), 3000)
    decision = engine.advance()
    assert decision is not None and decision.prefill_chunks[0].end == 100
    engine.submit(words(1000, 1), 1)
    engine.submit(words(50, 2), 1)
    sizes = []
    while not (engine.served[1].ended and engine.served[2].ended):
        decision = engine.advance()
        assert decision is not None
        sizes.append(sum(s.end - s.begin for s in decision.prefill_chunks))
    few = [size for size in sizes if 0 < size <= 256]
    assert {*few[:-1]} <= {64, 96, 128, 192, 256} and len(few) > 2 and sum(sizes) == 1050, sizes


def test_a_chunk_is_expected_of_who_waits_too() -> None:
    """Each decision admits a chunk's prompts, all of which end with it: it is not the last chunk for that."""
    engine = SimulatedEngine(9000, max_batch=64, lookahead=1, prefill_chunk=20 * LOOK_AHEAD, goal="throughput")
    for seed in range(2 * LOOK_AHEAD):
        engine.submit(words(20, seed), 1)
    expected = []
    for _ in range(2):
        decision = engine.advance()
        assert decision is not None and len(decision.prefill_chunks) == LOOK_AHEAD and not engine.scheduler.has_prefill
        expected.append(engine.scheduler.expects_chunk)
    assert expected == [True, False]


@pytest.mark.parametrize("timed", [True, False])
def test_a_chunk_is_bounded_in_time_though_nothing_decodes(timed: bool) -> None:
    """Or an abort would be seen, and the next request admitted, after the whole prompt: here of 28 s."""
    engine = SimulatedEngine(9000, prefill_chunk=16_384)
    if not timed:
        engine.times = engine.scheduler._times = PrefillTime(DOUBLING)
    engine.submit(words(16_000), 1)
    seconds = []
    while (decision := engine.advance()) is not None:
        seconds.append(sum(engine.times.work(s.begin, s.end) for s in decision.prefill_chunks) * TOKEN_S)
    assert sum(seconds) == pytest.approx(28, rel=0.1) and max(seconds) < 2.01
    assert sum(one > 1.9 for one in seconds) > 10, "as few chunks as the bound allows"


def admitted(decision: SchedulerOutput | None) -> list[int]:
    return [] if decision is None else [int(a.id) for a in decision.new_requests]


@pytest.mark.parametrize("known, longest", [(True, 0.0501), (False, 0.4)])
def test_what_is_cached_is_no_queue(known: bool, longest: float) -> None:
    """Ten prompts wait for a slot beside a long one: pauses grow if they are still to be computed."""
    engine = SimulatedEngine(9000, kvp=1, append_block=4, page_size=4, goal="balance")
    prompts = [words(1000, number) for number in range(10)]
    for prompt in prompts if known else []:
        engine.submit(prompt, 2)
    engine.drain()
    for number in range(3):
        engine.submit(words(10, 100 + number), 3000)
    for _ in range(10):
        engine.advance()
    long = engine.submit(words(4000, 200), 5)
    engine.advance()
    for prompt in prompts:
        engine.submit([*prompt, 1, 2, 3], 2)
    engine.longest_s = 0.0
    while not engine.served[long].times:
        engine.advance()
    assert 0.8 * longest < engine.longest_s <= longest * 1.001


def test_by_priority_then_by_arrival() -> None:
    engine = SimulatedEngine(100, max_batch=2, lookahead=0)
    for priority in (0, 0, 1, -1):
        engine.submit(words(4), 3, priority=priority)
    assert [admitted(engine.advance()) for _ in range(2)] == [[2, 0], [1, 3]]


def test_others_pass_what_does_not_fit_until_its_patience_is_out() -> None:
    engine = SimulatedEngine(32, max_batch=4, lookahead=0, patience_s=0.5, run_steps=1, caching=False)
    engine.submit(words(20), 50)  # 70 tokens of 128
    large = engine.submit(words(100), 2)
    engine.advance()
    passed = [admitted(engine.advance()) for _ in range(3) if engine.submit(words(8), 1)]
    assert passed == [[2], [3], [4]]
    engine.now += 0.5
    engine.submit(words(8), 1)
    while not engine.served[0].ended:
        assert admitted(engine.advance()) == [], "pages are kept"
    assert admitted(engine.advance()) == [large, 5]
    engine.drain()
    engine.check_nothing_is_left()


def test_the_cheapest_is_preempted_and_goes_on_with_its_tokens() -> None:
    """Three sequences of 60, 30 and 20 tokens fill the cache, and all grow."""
    engine = SimulatedEngine(42, max_batch=3, lookahead=1, lookahead_tokens=16, run_steps=2, caching=False)
    for prompt in (60, 30, 20):
        engine.submit(words(prompt, prompt), 90)
    order = []
    while not all(s.ended for s in engine.served.values()):
        before = {slot: row.served for slot, row in engine.rows.items()}
        if (decision := engine.advance()) is not None:
            order += [before[slot].request.id for slot in decision.released_slots if not before[slot].ended]
    assert order[:2] == [2, 1]
    assert all(s.drawn == s.reply for s in engine.served.values())


def test_what_comes_back_has_a_lease() -> None:
    """It draws as many tokens as it has pages for, save those under way, before it is preempted once more."""
    engine = SimulatedEngine(40, max_batch=4, lookahead=1, lookahead_tokens=24, run_steps=2, caching=False)
    for seed, (prompt, new) in enumerate(((20, 60), (40, 60), (20, 90))):
        engine.submit(words(prompt, seed), new)
    engine.drain()
    drawn = [[a.num_output_tokens for a in s.admissions] for s in engine.served.values()]
    leases = [again - back for at in drawn for back, again in pairwise(at[1:])]
    assert leases and min(leases) >= 24 - 3 * 2, drawn


def test_prompts_that_begin_alike_begin_on_one_rank_and_others_anywhere() -> None:
    engine = SimulatedEngine(1000, kvp=4, max_batch=60)
    for seed in range(20):
        for _ in range(3):
            engine.submit(words(40, seed), 1)
    engine.drain()
    starts = [served.admissions[0].start for served in engine.served.values()]
    assert starts[::3] == starts[1::3] == starts[2::3] and set(starts) == set(range(4))


@pytest.mark.parametrize(
    "prompts, parts",
    [
        ([(1000, 0), (300, 0), (10, 0)], {0: 50, 1: 40, 2: 10}),  # half is the oldest's, then short ones go first
        ([(1000, 0), (10, 0), (300, 1)], {0: 50, 2: 50}),  # but behind those of a higher priority
    ],
)
def test_who_shares_a_chunk(prompts: list[tuple[int, int]], parts: dict[int, int]) -> None:
    engine = SimulatedEngine(1000, prefill_chunk=100, lookahead=0)
    for count, priority in prompts:
        engine.submit(words(count, count), 1, priority=priority)
    decision = engine.advance()
    assert decision is not None
    names = {a.slot: int(a.id) for a in decision.new_requests}
    assert {names[s.slot]: s.end - s.begin for s in decision.prefill_chunks} == parts
    engine.drain()
    assert engine.served[1].times < engine.served[0].times


def test_a_chunk_stalls_nobody_for_long() -> None:
    """While somebody decodes, a chunk takes as much of the prompt as its predicted time allows; alone, all."""
    engine = SimulatedEngine(5000, stall_s=0.05, lookahead=0, prefill_chunk=8192)
    engine.submit(words(3000), 100)
    decision = engine.advance()
    assert decision is not None and decision.prefill_chunks[0].end == 3000
    engine.submit(words(3000, 1), 1)
    ends = []
    while not engine.served[1].ended:
        decision = engine.advance()
        assert decision is not None
        ends += [(s.begin, s.end) for s in decision.prefill_chunks]
    seconds = [engine.times.work(*tokens) * TOKEN_S for tokens in ends]
    assert all(0.049 < s <= 0.05 for s in seconds[:-1]) and len(seconds) > 10


@pytest.mark.parametrize("share, steps", [(0.25, [9]), (0.7, [10, 10, 10, 10, 10, 9])])
def test_decode_has_its_share_behind_each_chunk(share: float, steps: list[int]) -> None:
    """50 ms of a chunk are followed by 16.7 ms of steps, or by 116.7 ms, in runs of 20 ms and with no chunk between."""
    engine = SimulatedEngine(5000, stall_s=0.05, decode_share=share, run_steps=50, lookahead=0, prefill_chunk=500)
    engine.submit(words(100), 2000)
    engine.advance()
    engine.submit(words(3000, 1), 1)
    outputs = [engine.advance() for _ in range(4 * len(steps))]
    runs = [(len(d.prefill_chunks), d.decode_steps) for d in outputs if d is not None]
    assert runs[: 2 * len(steps)] == 2 * [(int(i == 0), n) for i, n in enumerate(steps)]


def test_steps_in_which_somebody_has_a_grammar_are_drawn_by_the_next_decision() -> None:
    """One by one, from the prompt's own on; the next is launched as soon as the token before is read, not later."""
    engine = SimulatedEngine(1000, run_steps=50)
    engine.submit(words(10), 100)
    engine.submit(words(10, 1), 4, guided=True)
    seen = []
    while not engine.served[1].ended:
        decision = engine.advance()
        if decision is None:
            seen.append("read")
        else:
            seen.append(
                f"{decision.decode_steps} {'held' if decision.defers_sampling else 'drawn'} "
                f"{len(decision.token_bitmasks)}"
            )
    # Of a decision that is read behind the next one, nothing is under way that this waits for.
    assert seen == ["1 held 0", "read", "1 held 1", "1 held 1", "10 drawn 1"]
    assert engine.served[1].drawn == engine.served[1].reply


def test_steps_of_grammars_have_their_share_behind_each_chunk() -> None:
    """50 ms of a chunk are followed by 16.7 ms of steps, one a decision."""
    engine = SimulatedEngine(5000, stall_s=0.05, run_steps=50, prefill_chunk=500)
    engine.submit(words(100), 2000, guided=True)
    engine.advance()
    engine.submit(words(3000, 1), 1)
    outputs = [d for _ in range(60) if (d := engine.advance()) is not None]
    assert all(d.decode_steps == 1 for d in outputs)
    at = [i for i, d in enumerate(outputs) if d.prefill_chunks]
    assert {b - a for a, b in pairwise(at)} == {9} and len(at) > 4


def test_a_run_lasts_as_long_as_it_may() -> None:
    engine = SimulatedEngine(1000, run_s=0.020, run_steps=50, lookahead=0)
    engine.submit(words(10), 100)
    runs = [d.decode_steps for d in (engine.advance() for _ in range(3)) if d is not None]
    assert runs == [10, 10, 10]


def test_a_run_goes_at_its_pace() -> None:
    """Steps of three tokens: so many as the first to end needs, unless the pace says fewer."""
    asked: list[int] = []
    paces = [StepPlan(n, tokens, *more, seconds=1e-4) for n, tokens, *more in ((4, 3.0), (4, 3.0, 2, (4, 1)), (0, 1.0))]

    def pace(rows: int, kv_tokens: int, without: object) -> StepPlan:
        asked.append(rows)
        return paces[len(asked) - 1]

    engine = SimulatedEngine(100, drafts=4, run_steps=8)
    engine.scheduler._plan_steps = pace
    for new in (30, 17):
        engine.submit(words(5, new), new)
    decisions = [d for _ in paces if (d := engine.scheduler.schedule(0.0)) is not None]
    steps = [(d.decode_steps, d.kind.drafts, d.draft_limits) for d in decisions]
    # Of the other one, 5 tokens are left once all that is under way has come as expected.
    assert steps == [(6, 4, ()), (2, 4, (4, 1)), (5, 0, ())] and asked == [2, 2, 2]


def test_steps_that_nobody_has_timed_come_in_short_runs() -> None:
    """32 steps of 17 ms let a prompt wait for half a second."""
    engine = SimulatedEngine(100, run_steps=32)
    engine.scheduler._plan_steps = lambda rows, kv_tokens, without: StepPlan()
    engine.submit(words(5), 40)
    decisions = [engine.scheduler.schedule(0.0) for _ in range(2)]
    assert [d.decode_steps for d in decisions if d is not None] == [2, 2]


def test_what_is_under_way_counts_with_the_most_that_it_may_have_drawn() -> None:
    """Three runs of steps with three drafts are launched before a token is read; pages are there for each."""
    engine = SimulatedEngine(200, lookahead_tokens=1, drafts=3, run_steps=4, lookahead=3, accepted_drafts=(3,))
    engine.submit(words(10), 100)
    engine.drain()
    assert engine.served[0].drawn == engine.served[0].reply
    assert engine.served[0].admissions[0].reserved == 10 + 17 + 3


@pytest.mark.parametrize("homes, waiting", [(1, 0), (2, 0), (1, 40)])
def test_few_that_are_left_take_few_rows(homes: int, waiting: int) -> None:
    """Not while others wait, who take the slots below; each DP rank moves its own."""
    engine = SimulatedEngine(400, homes=homes, max_batch=8)
    for i in range(8 * homes):
        engine.submit(words(5, i), 200 if i >= 7 * homes else 3)
    for i in range(waiting):
        engine.submit(words(5, 100 + i), 4)
    rows: list[int] = []
    while any(not served.ended for served in engine.served.values()):
        waits = engine.scheduler.waiting > 0
        decision = engine.advance()
        if decision is not None and decision.decode_steps:
            rows.append(decision.kind.rows)
            left = max(sum(slot % homes == home for slot in engine.rows) for home in range(homes))
            assert waits or rows[-1] == 1 << (left - 1).bit_length()
            assert not (waits and decision.slot_moves)
    assert (rows[0], rows[-1]) == (8, 1) and engine.moved >= homes
    engine.drain()
    engine.check_nothing_is_left()


def test_the_same_prompt_is_computed_once() -> None:
    """Four at once: the others wait for what the first one computes, and compute what is no whole stripe."""
    engine = SimulatedEngine(1000, prefill_chunk=64, lookahead=2)
    for _ in range(4):
        engine.submit(words(403), 2)
    engine.drain()
    assert sorted(s.computed for s in engine.served.values())[:3] == [3, 3, 3]
    assert sum(s.computed for s in engine.served.values()) < 403 + 4 * 8


def test_pages_that_two_have_computed_are_the_same_on_the_ranks() -> None:
    """A prompt's last token is never taken over: its stripe, if it is whole, both compute, and one gives it back."""
    engine = SimulatedEngine(100, lookahead=0, max_batch=2)
    stripe = engine.stripes.tokens
    engine.submit(words(stripe), 1)
    engine.drain()
    for _ in range(2):
        engine.submit(words(2 * stripe), 20)
    for _ in range(2):
        engine.advance()
    a, b = (engine.rows[slot].table[: engine.stripes.pages_for(2 * stripe)] for slot in range(2))
    assert a == b and [s.computed for s in engine.served.values()][1:] == [stripe, stripe]


def test_a_long_beginning_is_shared_as_soon_as_it_is_computed() -> None:
    """There is no room for it twice: the second request waits for it, not for the end of the first."""
    engine = SimulatedEngine(150, prefill_chunk=64, lookahead=1, lookahead_tokens=16)
    for new in (150, 20):
        engine.submit(words(403), new)
    while not engine.served[1].ended:
        engine.advance()
        engine.now += 0.5
    assert not engine.served[0].ended and engine.served[1].computed < 8


def test_what_was_aborted_goes_on_where_it_was_cut() -> None:
    engine = SimulatedEngine(1000, prefill_chunk=64, lookahead=1)
    first = engine.submit(words(403), 2)
    for _ in range(3):
        engine.advance()
    engine.abort(first)
    again = engine.submit(words(403), 2)
    engine.drain()
    assert engine.served[again].admissions[0].num_cached_tokens == 3 * 64 and engine.served[again].drawn


def test_requests_of_one_token_starve_nobody() -> None:
    """A hundred of them go by one slot; the sequence in the other one goes on beside them."""
    engine = SimulatedEngine(100, max_batch=2, lookahead=0)
    engine.submit(words(5), 60)
    for seed in range(100):
        engine.submit(words(5, seed), 1)
    drawn = []
    while engine.advance() is not None:
        drawn.append(len(engine.served[0].drawn))
    assert drawn[:8] == [2, 10, 18, 26, 34, 42, 50, 58], "a run of steps follows each prompt"


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    engine = SimulatedEngine(16)  # 64 tokens
    assert engine.scheduler.submit(Request(0, words(50), 14), 0.0) is None
    reason = engine.scheduler.submit(Request(1, words(50), 15), 0.0)
    assert reason is not None and "65 tokens" in reason and "64 (16 pages)" in reason and "kv.tokens" in reason


def test_two_under_way_have_different_names() -> None:
    engine = SimulatedEngine(16)
    assert engine.scheduler.submit(Request("a", words(5), 3), 0.0) is None
    reason = engine.scheduler.submit(Request("a", words(5), 3), 0.0)
    assert reason is not None and "id='a' is in use" in reason
    assert engine.scheduler.end("a") and not engine.scheduler.end("a")
    assert engine.scheduler.submit(Request("a", words(5), 3), 0.0) is None


def test_what_steps_have_to_do() -> None:
    """Draw and filter where somebody's request says so; choose keys once a sequence is long enough."""
    engine = SimulatedEngine(100, lookahead=0, run_steps=1, sparse_from=20)
    found = []
    for name, sampling in enumerate((SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, top_k=5))):
        engine.scheduler.submit(Request(name, words(15 + name, name), 9, sampling), 0.0)
        decision = engine.scheduler.schedule(0.0)
        assert decision is not None
        found.append((decision.kind.stochastic, decision.kind.filtered, decision.kind.sparse))
    assert found == [(False, False, False), (True, False, False), (True, True, False)]
    found = [d.kind.sparse for _ in range(3) if (d := engine.scheduler.schedule(0.0)) is not None]
    assert found == [False, True, True], "from 20 tokens in the cache on, for all"


def test_a_decision_costs_alike_at_any_context_and_any_queue() -> None:
    """Four sequences decode, others wait for pages: of neither is anything looked at token by token."""
    most = []
    for context, waiting in ((1_000, 40), (1_000_000, 400)):
        pages = 4 * (context + 1000) // 32 + 20
        engine = SimulatedEngine(pages, append_block=16, page_size=16, max_batch=5, prefill_chunk=1 << 30, fetches=True)
        prompts = [np.full(context, seed, dtype=np.int32) for seed in range(5)]
        for name in range(4 + waiting):
            assert engine.scheduler.submit(Request(name, prompts[min(name, 4)], 1000), 0.0) is None
        for _ in range(3):  # which admit
            assert engine.scheduler.schedule(0.0) is not None
        most.append(max(calls_of(lambda s=engine.scheduler: s.schedule(0.0)) for _ in range(20)))
        assert len(engine.scheduler.running) == 4
    assert 0 < most[1] <= 1.1 * most[0], most


@pytest.mark.parametrize("keep_drawn, known", [(True, 29), (False, 20)])
def test_what_was_drawn_is_kept_where_all_caches_have_it(keep_drawn: bool, known: int) -> None:
    engine = SimulatedEngine(100, keep_drawn=keep_drawn)
    first = engine.submit(words(20), 10)
    engine.drain()
    text = [*words(20), *engine.served[first].reply]
    engine.submit([*text, 1], 1)
    decision = engine.scheduler.schedule(engine.now)
    assert decision is not None and decision.new_requests[0].num_cached_tokens == known


@pytest.mark.parametrize(
    "lacking, snapshots, computed",
    [
        (math.inf, (4, 0, 0), [92, 92, 12, 12]),
        (math.inf, (0, 0, 0), [92, 92, 92, 92]),
        (math.inf, (1, 3, 0), [92, 92, 12, 12]),
        (math.inf, (9, 0, 30), [92, 92 - 60, 12, 12]),
        (9.0, (4, 0, 0), [92, 12 + 9, 12, 12]),
        (9.0, (0, 0, 0), [92, 10 + 9, 10 + 9, 10 + 9]),
        (9.0, (40, 0, 4), [92, 12, 12, 12]),
        (9.0, (1, 0, 4), [92, 12 + 9, 12 + 9, 12 + 9]),
        (30.0, (1, 0, 0), [92, 12 + 30, 12 + 30, 12 + 30]),
    ],
)
def test_a_fork_computes_its_own_tokens_only(
    lacking: float, snapshots: tuple[int, int, int], computed: list[int]
) -> None:
    """Four prompts after the same 82 tokens, in stripes of four: the second takes a snapshot where it leaves them."""
    engine = SimulatedEngine(2000, lacking=lacking, snapshots=snapshots)
    for i in range(len(computed)):
        engine.submit(words(82) + words(10, 100 + i), 3)
        engine.drain()
    assert [served.computed for served in engine.served.values()] == computed
    engine.check_nothing_is_left()


@pytest.mark.parametrize("lacking", [9.0, math.inf])
def test_snapshots_of_an_aborted_prompt_stay_and_those_of_a_hit_lack_no_window(lacking: float) -> None:
    engine = SimulatedEngine(2000, lacking=lacking, snapshots=(30, 0, 8), prefill_chunk=16, lookahead=0)
    name = engine.submit(words(82), 3)
    for _ in range(3):
        engine.advance()
    engine.abort(name)
    engine.drain()
    assert engine.num_taken >= 3
    for length, own in ((80, 0), (46, 2), (60, 4)):
        engine.submit(words(length) + words(own, 5), 3, last_message_start=length)
        engine.drain()
    assert [served.computed for served in engine.served.values()][2:] == [8, 4 + 60 % 8], "all but whole snapshots"
    engine.check_nothing_is_left()


def test_windows_after_an_answer_are_computed_again_if_that_is_less() -> None:
    """The snapshot lies before an answer of 60 tokens; from it on, 62 tokens more would be computed."""
    engine = SimulatedEngine(2000, lacking=9.0, snapshots=(4, 0, 0))
    first = engine.served[engine.submit(words(42), 60)]
    engine.drain()
    second = engine.served[engine.submit(words(42) + first.drawn + words(11, 1), 3)]
    engine.drain()
    assert second.computed == 113 - (100 - 9)


def test_windows_of_tokens_that_another_prompt_computes_are_in_no_snapshot() -> None:
    """Prompts that begin alike skip what the first one computes, and no snapshot has windows that were skipped."""
    engine = SimulatedEngine(2000, lacking=9.0, snapshots=(1, 0, 4), prefill_chunk=32)
    for i in range(3):
        engine.submit(words(82) + words(10, i), 3)
    engine.drain()
    assert sum(served.computed for served in engine.served.values()) < 150
    engine.check_nothing_is_left()
