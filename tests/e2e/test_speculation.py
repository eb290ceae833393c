"""Drafts change no token: whatever a drafter proposes, every layout gives what it gives without one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from datetime import timedelta
from itertools import cycle

import pytest
import torch
from torch import Tensor

from benchmarks.quality.copy_prompts import copy_prompts
from benchmarks.ranks.kept import keep_drafts
from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from helix.engine.core import Engine
from helix.engine.decision import Admission, StepPlan
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import Draft, Drafter, SuffixDrafter
from helix.worker.follower import Prefilled, Retired
from helix.worker.graph_keys import StepKind
from helix.worker.step import DecodeState
from helix.worker.warm_up import fill, step_seconds
from kernels.tokens.commit import Candidates
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.parity import Continuation, Result, build_engine, check, differences, distributed_rank, generate
from tests.e2e.test_parity import LENGTHS, MOE_LENGTHS, MOE_TOKENS, NEW_TOKENS
from tests.pool import pool
from tests.sequences import generated, generated_ids, resize

Tokens = dict[int, tuple[int, ...]]


class Replay(Drafter):
    """Proposes what will come, but for every `wrong`-th token of a sequence."""

    def __init__(self, limit: int, sequences: list[tuple[int, ...]], wrong: int) -> None:
        super().__init__(limit)
        width = max(map(len, sequences)) + limit + 1
        self.known = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences])
        self.wrong = wrong

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        tokens = []
        for row in range(kind.rows):
            at = int(state.lengths[row])
            prompt = state.history[row, :2].tolist()
            which = next((i for i, s in enumerate(self.known.tolist()) if s[: len(prompt)] == prompt), 0)
            place = torch.arange(at + 1, at + 1 + kind.drafts).clamp(max=self.known.shape[1] - 1)
            tokens.append(torch.where(place % self.wrong == 0, 1, self.known[which, place]))
        return Draft(torch.stack(tokens))


def whimsical() -> Callable[[DraftPolicy, int], StepPlan]:
    """Paces at random: every count of drafts, every limit of a row, runs of one to three steps."""
    generator = random.Random(0)

    def pace(policy: DraftPolicy, rows: int, kv_tokens: int, without: Collection[int]) -> StepPlan:
        limits = tuple(generator.choice([0, 1, 2, policy.sizes[-1]]) for _ in range(rows))
        return StepPlan(generator.choice(policy.sizes), 1.5, generator.randint(1, 3), generator.choice([(), limits]))

    return pace


@pytest.mark.parametrize("drafts, block, adaptive", [(1, 1, False), (4, 16, True), (7, 64, False), (16, 16, True)])
@pytest.mark.parametrize(
    "family, kvp, tpa", [("qwen2", 1, 1), ("qwen3", 2, 2), ("mistral-windowed", 3, 1), ("llama-llama3", 4, 1)]
)
def test_greedy_tokens_and_logits(
    family: str, kvp: int, tpa: int, drafts: int, block: int, adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if adaptive:
        monkeypatch.setattr(DraftPolicy, "pace", whimsical())
    wanted = oracle(family, LENGTHS, NEW_TOKENS)
    layout = HelixLayout.create("helix", kvp, tpa)

    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafter = SuffixDrafter(drafts, 3)
        engine = build_engine(checkpoint(family), layout, comm, block, drafter=drafter, adaptive=adaptive)
        return generate(engine, wanted)

    check(run_ranks(layout.world_size, body, timeout_s=120.0), wanted)


def with_lookup(
    family: str, layout: HelixLayout, drafts: int, wanted: list[Continuation], device: str = "cpu"
) -> list[Result]:
    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafter = SuffixDrafter(drafts, 2)
        return generate(build_engine(checkpoint(family), layout, comm, 16, drafter=drafter, adaptive=False), wanted)

    return run_ranks(layout.world_size, body, timeout_s=120.0, device=device)


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3-yarn"])
def test_experts_sinks_and_latents(family: str) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(with_lookup(family, HelixLayout.create("helix", 3, 1), 3, wanted), wanted)


def served(drafter: Drafter | None, layout: HelixLayout, adaptive: bool = False) -> tuple[Tokens, int]:
    """Tokens of sampled requests on rank 0, and in how many decode steps."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=9),
        SamplingParams(temperature=0.7, top_k=20, seed=2),
        SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, seed=4),
    ]
    prompts = [c.prompt for c in oracle("qwen2", LENGTHS, NEW_TOKENS) if len(c.prompt) > 1]

    def body(world: LoopbackWorld, rank: int) -> tuple[Tokens, Engine]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, drafter=drafter, adaptive=adaptive)
        requests = [Request(i, prompts[i], 24, p) for i, p in enumerate(params)]
        return generated_ids(engine, requests), engine

    tokens, engine = run_ranks(layout.world_size, body, timeout_s=120.0)[0]
    return tokens, len(engine.timings.ttl_s)


def test_sampled_tokens_and_fewer_steps() -> None:
    """Good drafts save steps, bad ones cost none of the tokens."""
    plain, steps = served(None, HelixLayout.create())
    prompts = [c.prompt for c in oracle("qwen2", LENGTHS, NEW_TOKENS) if len(c.prompt) > 1]
    known = [(*prompts[i], *tokens) for i, tokens in plain.items()]
    # A second run is launched before the first one says how many drafts hold.
    for wrong, most in ((1000, steps * 3 // 4), (3, steps)):
        for kvp in (1, 2):
            tokens, taken = served(Replay(5, known, wrong), HelixLayout.create("helix", kvp, 1))
            assert tokens == plain
            assert taken <= most, f"{taken} steps, {steps} without drafts"
            assert served(Replay(5, known, wrong), HelixLayout.create("helix", kvp, 1), adaptive=True)[0] == plain


@pytest.mark.parametrize("acceptance, adaptive", [(0.0, False), (0.6, False), (1.0, False), (0.6, True)])
def test_drafts_hold_at_a_set_rate(acceptance: float, adaptive: bool) -> None:
    def body(world: LoopbackWorld, rank: int) -> tuple[Tokens, Engine]:
        comm = world.communicator(rank, (0, 1))
        drafter = SuffixDrafter(3, 2)
        keep_drafts(drafter, acceptance, 5, 256)
        engine = build_engine(
            checkpoint("qwen2"), HelixLayout.create("helix", 2), comm, 16, drafter=drafter, adaptive=adaptive
        )
        requests = [Request(i, (1, i), 121) for i in range(5)]
        return generated_ids(engine, requests), engine

    tokens, engine = run_ranks(2, body, timeout_s=120.0)[0]
    assert [len(t) for t in tokens.values()] == [121] * 5
    found = engine.timings.acceptance
    if acceptance in (0.0, 1.0):
        # Of 600 tokens behind the first ones, each step gives one, or four to each of five sequences.
        assert len(engine.timings.ttl_s) in ((120,) if acceptance == 0 else (30, 31))
        assert sum(found.kept) == acceptance * 450
    else:
        # Five standard deviations of a coin, of which as many are thrown as drafts were tried.
        for tried, kept in zip(found.tried, found.kept, strict=True):
            assert abs(kept - 0.6 * tried) <= 5 * (0.24 * tried) ** 0.5
        assert found.tried[0] > (5 if adaptive else 100)


def test_steps_are_timed_with_drafts_that_are_verified() -> None:
    def body(world: LoopbackWorld, rank: int) -> list[float]:
        comm = world.communicator(rank, (0, 1))
        engine = build_engine(
            checkpoint("qwen2"), HelixLayout.create("helix", 2), comm, 16, max_length=60, drafter=SuffixDrafter(5, 3)
        )
        fill(engine.runner, 3, 59)
        before = engine.runner.state.lengths.tolist()
        drafts = torch.zeros(3, 5, dtype=torch.int64)
        assert torch.equal(engine.runner.state.within_limits(drafts), drafts), "none is beyond a row's end"
        seconds = [step_seconds(engine.runner, StepKind(3, n), steps=2) for n in engine.draft_sizes]
        assert engine.runner.state.lengths.tolist() == before and engine.draft_sizes == (0, 1, 2, 4, 5)
        return seconds

    first, second = run_ranks(2, body, timeout_s=120.0)
    assert first == second and min(first) > 0, "those of the slowest rank, on each"


class Refused(Drafter):
    """Proposes what is never drawn, and notes the limits under which it does."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limits: list[list[int]] = []

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        self.limits.append(state.draft_limits[: kind.rows].tolist())
        return Draft(torch.full((kind.rows, kind.drafts), 256))


def test_limits_reach_every_rank_and_end_with_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request of a slot begins with all drafts, whatever became of those of the first, to its last run."""

    def pace(policy: DraftPolicy, rows: int, kv_tokens: int, without: Collection[int]) -> StepPlan:
        return StepPlan(4, 1.0, None, tuple(policy.limit(slot) for slot in range(rows)), 1e-4)

    monkeypatch.setattr(DraftPolicy, "pace", pace)
    drafters = [Refused(4), Refused(4)]

    def body(world: LoopbackWorld, rank: int) -> None:
        comm = world.communicator(rank, (0, 1))
        layout = HelixLayout.create("helix", 2)
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, max_batch=1, drafter=drafters[rank])
        resize(engine, run_steps=12)
        generated(engine, [Request(i, (1, 2), 49) for i in range(2)])

    run_ranks(2, body, timeout_s=120.0)
    # A run is decided when the one before it is not read yet.
    assert drafters[0].limits == drafters[1].limits == 2 * (24 * [[4]] + 24 * [[2]])


class Witness(Drafter):
    """Stands for a drafter with a cache: repeats the last token, and knows which token it last read at each place."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.read: dict[int, dict[int, int]] = {}
        self.missing: list[str] = []
        self.behind = 0

    def admit(self, *admissions: Admission) -> None:
        for admission in admissions:
            assert admission.slot not in self.read
            self.read[admission.slot] = {}

    def retire(self, *gone: Retired) -> None:
        for one in gone:
            del self.read[one.slot]

    def prefilled(self, chunk: Prefilled) -> None:
        for part in chunk.prompts:
            self.read[part.slot] |= {part.begin + i: token for i, token in enumerate(part.tokens.tolist())}

    def catch_up(self, state: DecodeState) -> None:
        self.behind += 1
        for row in state.active.nonzero()[:, 0].tolist():
            self.read[row] = dict(enumerate(state.history[row, : int(state.lengths[row]) - 1].tolist()))

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
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
    monkeypatch.setattr(DraftPolicy, "pace", lambda policy, *state: StepPlan(next(turns), 1.5, 2))
    if lost:
        monkeypatch.setattr(Witness, "catch_up", Drafter.catch_up)
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)
    layout = HelixLayout.create("helix", 2, 1)
    drafters = [Witness(3), Witness(3)]

    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, prefill_chunk=7, drafter=drafters[rank])
        return generate(engine, wanted)

    check(run_ranks(2, body, timeout_s=120.0), wanted)
    for drafter in drafters:
        assert (drafter.missing != []) == lost, drafter.missing
        assert lost or drafter.behind > 0
        assert drafter.read == {}, "all are retired"


def test_a_draft_taken_unseen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = DecodeState.commit

    def trusting(
        self: DecodeState, rows: int, drawn: Candidates, drafts: Tensor | None = None, outcome: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if drafts is not None:
            first = drawn.pairs[:, :: 1 + drafts.shape[1], 1]
            first[:] = torch.where(drafts[:, 0] >= 0, drafts[:, 0].double(), first)
        return commit(self, rows, drawn, drafts, outcome)

    monkeypatch.setattr(DecodeState, "commit", trusting)
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)

    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, (0,))
        return generate(
            build_engine(
                checkpoint("qwen2"), HelixLayout.create(), comm, 16, drafter=SuffixDrafter(2, 3), adaptive=False
            ),
            wanted,
        )

    results = run_ranks(1, body, timeout_s=120.0)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [1, 4, 15])
@pytest.mark.parametrize("family", ["qwen3", "mistral-windowed", "demo"])
def test_fp32_of_loopback_ranks_on_one_gpu(family: str, drafts: int) -> None:
    wanted = oracle(family, LENGTHS, NEW_TOKENS)
    for kvp in (1, 4):
        check(with_lookup(family, HelixLayout.create("helix", kvp, 1), drafts, wanted, "cuda"), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3-yarn"])
def test_fp32_experts_sinks_and_latents_on_one_gpu(family: str) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(with_lookup(family, HelixLayout.create("helix", 3, 1), 3, wanted, "cuda"), wanted)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kvp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "demo"])
def test_fp32_over_gpus(family: str, kvp: int) -> None:
    """Eager steps and captured ones."""
    wanted = oracle(family, LENGTHS, NEW_TOKENS)
    layout = HelixLayout.create("helix", kvp, 2 // kvp)
    task = (checkpoint(family), layout, 16, wanted, "cuda", SymmMemCommunicator, SuffixDrafter(4, 3))
    check(pool(2, "nccl").run(distributed_rank, *task, timeout_s=120.0), wanted)


class Garbage(Drafter):
    """Proposes what hardly ever comes, so that a step with drafts gives one token."""

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        offsets = torch.arange(1, 1 + kind.drafts, device=state.tokens.device)
        return Draft((state.tokens[: kind.rows, None] * 31 + offsets * 977) % 4096)


def in_bf16(
    comm: Communicator, layout: HelixLayout, wanted: list[Continuation], drafter: Drafter | None, judges: bool
) -> tuple[Result | None, list[tuple[int, int]], int]:
    """The demo model's tokens and logits, or where it takes other tokens than wanted; and drafts kept, on rank 0."""
    longest = max(len(c.prompt) + len(c.tokens) for c in wanted)
    engine = build_engine(
        DEMO, layout, comm, 16, max_batch=8, max_length=longest, prefill_chunk=4096, dtype=torch.bfloat16,
        drafter=drafter, adaptive=False,
    )  # fmt: skip
    result = None if judges else generate(engine, wanted)
    differing = differences(engine, [(c.prompt, c.tokens) for c in wanted]) if judges else []
    engine.close()
    return result, differing, int(sum(engine.timings.acceptance.kept))


def over_gpus(rank: int, world_size: int, layout: HelixLayout, *task: object) -> object:
    """`in_bf16` in a task for a worker pool."""
    comm = SymmMemCommunicator(layout.kvp_groups(), torch.device("cuda", rank), timedelta(seconds=60))
    found = in_bf16(comm, layout, *task)
    comm.close()
    return found


# Where the best token leads by more than this, rounding to bf16 (2^-8 of logits below 32, over a few layers) cannot
# turn the choice.
CLEAR_MARGIN = 1.0


@pytest.mark.parametrize(
    "ranks", [pytest.param("loopback", marks=pytest.mark.gpu), pytest.param("symm_mem", marks=pytest.mark.gpu(2))]
)
def test_bf16_differs_only_where_two_tokens_are_close(ranks: str) -> None:
    """Drafts against no drafts, and against drafts that are refused: the same steps, and each token from the first row.

    Every difference is printed with the lead of the best token over the second.
    """
    from tokenizers import Tokenizer

    layout = HelixLayout.create("helix", 2, 1)

    def run(*task: object) -> list[tuple[Result, list[tuple[int, int]], int]]:
        if ranks == "symm_mem":
            return pool(2, "nccl").run(over_gpus, layout, *task, timeout_s=120.0)

        def body(world: LoopbackWorld, rank: int) -> object:
            return in_bf16(world.communicator(rank, layout.kvp_group(rank)), layout, *task)

        return run_ranks(2, body, timeout_s=240.0, device="cuda")

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(str(prompt["prompt"])).ids) for prompt in copy_prompts(NEW_TOKENS)]
    asked = [Continuation(prompt, (0,) * NEW_TOKENS, torch.empty(0)) for prompt in prompts]
    lookup = SuffixDrafter(4, 3)
    kept = run(asked, lookup, False)[0][2]
    assert kept > len(prompts) * NEW_TOKENS / 4, "too few drafts held for the test to mean something"
    for name, drafter in (("none", None), ("refused", Garbage(4))):
        found = run(asked, drafter, False)
        tokens = found[0][0].tokens
        leads: dict[tuple[int, int], float] = {}
        for i, n in ((i, n) for i in range(len(prompts)) for n in range(NEW_TOKENS)):
            best, second = torch.cat([result.logits[i, n] for result, _, _ in found]).topk(2).values.tolist()
            leads[i, n] = best - second
        wanted = [Continuation(prompt, tokens[i], torch.empty(0)) for i, prompt in enumerate(prompts)]
        assert drafter is None or found[0][2] < 0.02 * len(leads), "refused drafts were kept"
        differing = run(wanted, lookup, True)[0][1]
        listed = sorted(((round(leads[step], 4), *step) for step in differing), reverse=True)
        print(json.dumps({"ranks": ranks, "against": name, "steps": len(leads), "kept": kept, "differing": listed}))
        assert sum(lead > CLEAR_MARGIN for lead in leads.values()) > len(leads) / 4, "too few clear steps"
        assert all(lead <= CLEAR_MARGIN for lead, _, _ in listed), listed
