"""Drafts change no token: whatever a drafter proposes, every layout gives what it gives without one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import pytest
import torch

from benchmarks.ranks.synthetic import synthesize_acceptance
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import ScheduleConfig
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request, RequestUpdate
from helix.engine.scheduler_output import NewRequest, StepPlan
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import Draft, Drafter, SuffixDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.sequence_observer import PrefillCommitted, RequestReleased
from helix.worker.step import DecodeState
from helix.worker.warmup import fill, step_seconds
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import UNHURRIED, Result, build_engine, check, generate, on_loopback
from tests.e2e.test_parity import LENGTHS, NEW_TOKENS
from tests.sequences import generated, generated_ids, resize


@pytest.mark.parametrize("acceptance, adaptive", [(0.0, False), (0.6, False), (1.0, False), (0.6, True)])
def test_drafts_hold_at_a_set_rate(acceptance: float, adaptive: bool) -> None:
    def body(world: LoopbackWorld, rank: int) -> tuple[dict[int, tuple[int, ...]], Engine]:
        comm, layout, drafter = world.communicator(rank, (0, 1)), HelixLayout.create("helix", 2), SuffixDrafter(3, 2)
        synthesize_acceptance(drafter, acceptance, 5, 256)
        options = dict(drafter=drafter, adaptive=adaptive, schedule=UNHURRIED)
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, **options)  # type: ignore[arg-type]
        return generated_ids(engine, [Request(i, (1, i), 121) for i in range(5)]), engine

    tokens, engine = run_ranks(2, body, timeout_s=120.0)[0]
    assert [len(t) for t in tokens.values()] == [121] * 5
    found = engine.timings.acceptance
    if acceptance in (0.0, 1.0):
        # Of 600 tokens behind the first ones, each step gives one, or four to each of five sequences.
        assert len(engine.timings.ttl_s) in ((120,) if acceptance == 0 else (30, 31))
        assert sum(found.accepted) == acceptance * 450
    else:
        # Five standard deviations of a coin, of which as many are thrown as drafts were tried.
        for tried, accepted in zip(found.verified, found.accepted, strict=True):
            assert abs(accepted - 0.6 * tried) <= 5 * (0.24 * tried) ** 0.5
        assert found.verified[0] > (5 if adaptive else 100)


def test_steps_are_timed_with_drafts_that_are_verified() -> None:
    def run(engine: Engine) -> list[float]:
        fill(engine.runner, 3, 59)
        before = engine.runner.state.lengths.tolist()
        drafts = torch.zeros(3, 5, dtype=torch.int64)
        assert torch.equal(engine.runner.state.within_limits(drafts), drafts), "none is beyond a row's end"
        seconds = [step_seconds(engine.runner, DecodeGraphKey(3, n), steps=2) for n in engine.draft_sizes]
        assert engine.runner.state.lengths.tolist() == before and engine.draft_sizes == (0, 1, 2, 4, 5)
        return seconds

    layout, options = HelixLayout.create("helix", 2), dict(max_length=60, drafter=SuffixDrafter(5, 3))
    first, second = on_loopback(checkpoint("qwen2"), layout, 16, run, **options)
    assert first == second and min(first) > 0, "those of the slowest rank, on each"


class RejectedDrafter(Drafter):
    """Proposes what is never drawn, and notes the limits under which it does."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limits: list[list[int]] = []

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        self.limits.append(state.draft_limits[: kind.rows].tolist())
        return Draft(torch.full((kind.rows, kind.drafts), 256))


def four_drafts(policy: DraftPolicy, rows: int, kv_tokens: int, takes_drafts: Mapping[int, bool]) -> StepPlan:
    return StepPlan(4, 1.0, None, tuple(policy.limit(slot) for slot in range(rows)), 1e-4)


def test_limits_reach_every_rank_and_end_with_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request of a slot begins with all drafts, whatever became of those of the first, to its last run."""

    monkeypatch.setattr(DraftPolicy, "plan_steps", four_drafts)
    drafters = [RejectedDrafter(4), RejectedDrafter(4)]

    def body(world: LoopbackWorld, rank: int) -> None:
        comm = world.communicator(rank, (0, 1))
        layout = HelixLayout.create("helix", 2)
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, max_batch=1, drafter=drafters[rank])
        resize(engine, run_steps=12)
        generated(engine, [Request(i, (1, 2), 49) for i in range(2)])

    run_ranks(2, body, timeout_s=120.0)
    # A run is decided when the one before it is not read yet.
    assert drafters[0].limits == drafters[1].limits == 2 * (24 * [[4]] + 24 * [[2]])


def test_a_preempted_sequence_leaves_no_acceptance_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence starts without acceptance statistics, even in the slot of a preempted one."""
    read_batch, found = Engine._read, list[tuple[int, int]]()

    def read(engine: Engine) -> list[RequestUpdate]:
        scheduler_output = engine._batches[0].scheduler_output
        found.extend((one.num_output_tokens, engine._policy.limit(one.slot)) for one in scheduler_output.new_requests)
        return read_batch(engine)

    monkeypatch.setattr(Engine, "_read", read)
    monkeypatch.setattr(DraftPolicy, "plan_steps", four_drafts)
    engine = build_engine(
        checkpoint("qwen2"), HelixLayout.create(), LoopbackWorld(1).communicator(0, (0,)), 4, page_size=4, max_batch=3,
        max_length=192, pages=26, drafter=RejectedDrafter(4), schedule=ScheduleConfig(lookahead_tokens=2),
    )  # fmt: skip
    resize(engine, run_steps=2)
    generated(engine, [Request(i, (1, 2, i), 60, SamplingParams(ignore_eos=True)) for i in range(4)])
    assert engine.timings.preemptions > 0 and any(tokens for tokens, _ in found)
    assert {limit for _, limit in found} == {4}, found


class CachingDrafter(Drafter):
    """Stands for a drafter with a cache: repeats the last token, and knows which token it last read at each place."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.read: dict[int, dict[int, int]] = {}
        self.missing: list[str] = []
        self.catch_ups = 0

    def admit(self, *admissions: NewRequest) -> None:
        for new_request in admissions:
            assert new_request.slot not in self.read
            self.read[new_request.slot] = {}

    def release(self, *gone: RequestReleased) -> None:
        for one in gone:
            del self.read[one.slot]

    def on_prefill(self, chunk: PrefillCommitted) -> None:
        for part in chunk.prompts:
            self.read[part.slot] |= {part.begin + i: token for i, token in enumerate(part.tokens.tolist())}

    def catch_up(self, state: DecodeState) -> None:
        self.catch_ups += 1
        for row in state.active.nonzero()[:, 0].tolist():
            self.read[row] = dict(enumerate(state.history[row, : int(state.lengths[row]) - 1].tolist()))

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        for row in state.active[: kind.rows].nonzero()[:, 0].tolist():
            length = int(state.lengths[row])
            history = state.history[row].tolist()
            stale = [i for i in range(length - 1) if self.read[row].get(i) != history[i]]
            if stale:
                self.missing.append(f"row {row} of {length}: {stale}")
            last = history[length]  # it reads the last two tokens, and all but the last draft
            self.read[row] |= {length - 1: history[length - 1], length: last}
            self.read[row] |= {length + i: last for i in range(1, kind.drafts)}
        return Draft(state.tokens[: kind.rows, None].expand(-1, kind.drafts).contiguous())


@pytest.mark.parametrize("lost", [False, True])
def test_a_drafter_with_a_cache_reads_every_token(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told where steps without drafts have gone by, before the next one with drafts.

    They take turns: at random, a slow machine's few decisions may have none behind the other.
    """
    turns = cycle((0, 3))
    monkeypatch.setattr(DraftPolicy, "plan_steps", lambda policy, *state: StepPlan(next(turns), 1.5, 2))
    if lost:
        monkeypatch.setattr(CachingDrafter, "catch_up", Drafter.catch_up)
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)
    layout = HelixLayout.create("helix", 2, 1)
    drafters = [CachingDrafter(3), CachingDrafter(3)]

    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, prefill_chunk=7, drafter=drafters[rank])
        return generate(engine, wanted)

    check(run_ranks(2, body, timeout_s=120.0), wanted)
    for drafter in drafters:
        assert (drafter.missing != []) == lost, drafter.missing
        assert lost or drafter.catch_ups > 0
        assert drafter.read == {}, "all are retired"
