"""A draft model proposes: greedy tokens stay what they are, sampled ones are distributed as before; its KV is right.

That its KV is right shows in what is kept: of a draft model that is the target itself, everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.engine.scheduler_output import StepPlan
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import Draft, ModelDrafter
from helix.speculation.draft_sampler import DraftSampler
from helix.worker.step import DecodeState, Step
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.fuzz_runs import SMALL_CHUNKS
from tests.e2e.masked_attention import reads_table
from tests.e2e.parity import ModelDrafts, build_engine
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.kernels.test_accept import probabilities
from tests.sequences import generated, generated_ids
from tests.unit.test_sampling import chi_square, chi_square_limit

Grid = tuple[str, int, int]
Tamper = Callable[[Draft], Draft]


class Erring(DraftSampler):
    """Goes wrong at every 7th position, and goes on from there."""

    def sample(self, hidden: Tensor, state: DecodeState, positions: Tensor) -> Tensor:
        tokens = super().sample(hidden, state, positions)
        self._tokens[-1] = torch.where(positions % 7 == 0, (tokens + 1) % 257, tokens)
        return self._tokens[-1]


@pytest.fixture
def erring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helix.speculation.model.DraftSampler", Erring)


def runs(gamma: int, paused: bool) -> Iterator[tuple[int, int]]:
    """Drafts of the coming steps, and how many these are."""
    return cycle([(0, 2), (gamma, 3)] if paused else [(gamma, 3)])


def steps_of(length: int, tokens: int, gamma: int, paused: bool) -> int:
    """Decode steps until `tokens` tokens follow a prompt of `length`, where all drafts but those that err are kept."""
    done, steps = 1, 0  # prefill draws the first
    for drafts, run in runs(gamma, paused):
        for _ in range(min(run, tokens - done)):
            at = length + done  # of the first draft
            done += 1 + next((i for i in range(drafts) if (at + i) % 7 == 0), drafts)
            steps += 1
            if done >= tokens:
                return steps
    raise AssertionError("a cycle does not end")


def count_steps(family: str, length: int, tokens: int, gamma: int, paused: bool, pads: bool = False) -> int:
    """Decode steps of a sequence that the target itself drafts, over a layout other than its own."""
    prompt = tuple(torch.randint(1, 257, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    layout, draft_layout = HelixLayout.create("helix", 2, 1), HelixLayout.create("tp", 1, 2)

    def body(world: LoopbackWorld, rank: int) -> tuple[list[tuple[int, ...]], int]:
        ranks = world.communicator(rank, draft_layout.kvp_group(rank))
        drafter = ModelDrafts(checkpoint(family), draft_layout, ranks, gamma)
        comm = world.communicator(rank, layout.kvp_group(rank))
        num_accepted, steps = [], 0
        for each in (None, drafter):
            paces = (StepPlan(drafts, 1.0, run) for drafts, run in runs(gamma if each else 0, paused))
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(DraftPolicy, "plan_steps", lambda *_, paces=paces: next(paces))
                engine = build_engine(checkpoint(family), layout, comm, 16, drafter=each)
                engine.runner.pads_chunks |= pads
                outputs = generated_ids(engine, [Request(0, prompt, tokens)])
            num_accepted.append(outputs.get(0, ()))
            steps = engine.timings.sequence_steps
        return num_accepted, steps

    (plain, drafted), steps = run_ranks(2, body, timeout_s=120.0)[0]
    assert plain == drafted
    return steps


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("family, gamma", [("qwen3", 4), ("mistral-windowed", 1), ("deepseek-v3-yarn", 2)])
@pytest.mark.usefixtures("erring")
def test_all_that_is_right_is_kept(family: str, gamma: int, paused: bool) -> None:
    """Also behind steps without drafts, which the draft model reads up on."""
    for length in (1, 45):
        assert count_steps(family, length, 24, gamma, paused) == steps_of(length, 24, gamma, paused)


@pytest.mark.usefixtures("erring")
def test_all_is_kept_behind_padded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, value in SMALL_CHUNKS.items():
        monkeypatch.setattr(target, value)
    assert count_steps("qwen3", 45, 24, 4, False, pads=True) == steps_of(45, 24, 4, False)


def test_all_is_kept_behind_a_prefix_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("START_S", 0.0), ("LINK_RATE", 1e30), ("GRACE_S", 60.0)):
        monkeypatch.setattr(f"helix.engine.prefix_moves.{name}", value)
    layout, prompt = HelixLayout.create("helix", 2, 1), tuple(range(1, 120))

    def body(world: LoopbackWorld, rank: int) -> tuple[list[tuple[int, ...]], list[int], int]:
        ranks = world.communicator(rank, layout.kvp_group(rank))
        drafter = ModelDrafts(checkpoint("qwen3"), layout, ranks, 4)
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen3"), layout, comm, 16, drafter=drafter, adaptive=False, slabs=30)
        assert isinstance(engine.runner.drafter, ModelDrafter)
        tokens, steps = [], []
        for _ in range(2):
            tokens.append(generated_ids(engine, [Request(0, prompt, 24)]).get(0, ()))
            steps.append(engine.timings.sequence_steps)
            for tensor in (*engine.runner.cache.tensors, *engine.runner.drafter.cache.tensors):
                tensor.fill_(torch.nan)
            engine.tables[0].tree.evict(engine.tables[0].pool.available)
        assert engine.moves is not None
        return tokens, steps, engine.moves.counters["hits"]

    tokens, steps, hits = run_ranks(2, body, timeout_s=120.0)[0]
    assert tokens[0] == tokens[1] and hits == 96
    assert steps[0] == steps[1] < 10


@pytest.mark.parametrize("lost", ["the last draft's", "the tokens' of steps without drafts"])
@pytest.mark.usefixtures("erring")
def test_stale_kv_is_caught(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lost == "the last draft's":
        decode_step = DecodeState.decode_step

        def only_the_last(self: DecodeState, rows: int, *rest: object) -> Step:
            step = decode_step(self, rows, *rest)  # type: ignore[arg-type]
            if not self.history.shape[1]:  # the drafter's, which needs no history of its own
                step.slot_mappings[None][: rows * (step.max_q - 1)] = -1
            return step

        monkeypatch.setattr(DecodeState, "decode_step", only_the_last)
    else:
        monkeypatch.setattr(ModelDrafter, "catch_up", lambda self, state: None)
    paused = lost != "the last draft's"
    assert count_steps("qwen3", 45, 40, 4, paused) > steps_of(45, 40, 4, paused)


def sampled(grid: Grid, draft_grid: Grid, order: Sequence[int], max_batch: int) -> dict[int, tuple[int, ...]]:
    params = [
        SamplingParams(temperature=0.9, seed=9),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=20, seed=2),
        SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, seed=4),
    ]
    prompts = [c.prompt for c in oracle("qwen2", MOE_LENGTHS, MOE_TOKENS)] + [(5, 6, 7)]
    layout, draft_layout = HelixLayout.create(*grid), HelixLayout.create(*draft_grid)

    def body(world: LoopbackWorld, rank: int) -> dict[int, tuple[int, ...]]:
        ranks = world.communicator(rank, draft_layout.kvp_group(rank))
        drafter = ModelDrafts(checkpoint("qwen2-windowed-tied"), draft_layout, ranks, 3)
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(
            checkpoint("qwen2"), layout, comm, 16, drafter=drafter, adaptive=False, max_batch=max_batch
        )
        requests = [Request(i, prompts[i], 10, params[i]) for i in order]
        return generated_ids(engine, requests)

    return run_ranks(layout.world_size, body, timeout_s=120.0)[0]


def test_sampled_tokens_depend_neither_on_layouts_nor_on_the_batch() -> None:
    alone = sampled(("helix", 1, 1), ("helix", 1, 1), [0, 1, 2, 3], 4)
    assert sampled(("helix", 2, 2), ("helix", 4, 1), [2, 0, 3, 1], 4) == alone
    assert sampled(("tp", 1, 2), ("helix", 2, 1), [3, 2, 1, 0], 1) == alone


def test_a_target_that_is_no_number_is_an_error_and_a_draft_that_is_none_no_harm() -> None:
    layout = HelixLayout.create()

    def engine(broken: str) -> Engine:
        comm = LoopbackWorld(1).communicator(0, [0])
        drafter = ModelDrafts(checkpoint("qwen3"), layout, comm, 2)
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16, drafter=drafter, adaptive=False)
        assert isinstance(engine.runner.drafter, ModelDrafter)
        model = engine.runner.drafter.model if broken == "draft" else engine.runner.model
        if broken != "none":
            model.head.weight.fill_(torch.nan)
        return engine

    for temperature in (0.0, 1.0):
        requests = [Request(0, (1, 2, 3), 9, SamplingParams(temperature=temperature, seed=1))]
        drafted = generated_ids(engine("draft"), requests)[0]
        assert len(drafted) == 9 and min(drafted) >= 0
        with pytest.raises(RuntimeError, match="NaN"):
            generated(engine("target"), requests)


class TestDistribution:
    """Each token given those before, over the engine's own steps and two ranks; the models are tables of transitions.

    A model whose next token depends on the last one alone needs no oracle but its table, and 20,000 draws no attention.
    """

    IDS = (3, 60, 128, 129, 200, 256)  # the tokens that follow; ranks share 257
    SEQUENCES, TOKENS = 210, 100
    PARAMS = SamplingParams(temperature=1.0, min_p=0.1)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Logits [257, 257] behind each token, the target's and the draft's, which resemble each other."""
        generator = torch.Generator().manual_seed(5)
        target, noise = (torch.randn(257, 257, generator=generator) for _ in range(2))
        others = torch.ones(257, dtype=torch.bool).index_fill(0, torch.tensor(self.IDS), False)
        return target.masked_fill(others, -torch.inf), (target + 0.6 * noise).masked_fill(others, -torch.inf)

    def generated_tokens(self, tamper: Tamper = lambda draft: draft) -> Tensor:
        """[SEQUENCES, TOKENS], a seed each, behind the same prompt."""
        requests = [Request(i, (7, 8), self.TOKENS, replace(self.PARAMS, seed=i)) for i in range(self.SEQUENCES)]

        def body(world: LoopbackWorld, rank: int) -> Tensor:
            engine = self.engine(world, rank, tamper, max_batch=self.SEQUENCES, max_length=128)
            found = generated_ids(engine, requests)
            kept = engine.timings.decode_tokens / max(engine.timings.sequence_steps, 1)
            assert rank or 1.5 < kept < 3.5, f"{kept} tokens a step: some drafts should be kept, and some not"
            return torch.tensor([found[i] for i in range(len(found))])

        return run_ranks(2, body, timeout_s=120.0)[0]

    def engine(self, world: LoopbackWorld, rank: int, tamper: Tamper, **sizes: Any) -> Engine:
        """Its models read the tables."""
        layout, draft_layout = HelixLayout.create("helix", 2, 1), HelixLayout.create("helix", 1, 2)

        class Tampered(ModelDrafter):
            def propose(self, *args: object) -> Draft:  # type: ignore[override]
                return tamper(super().propose(*args))  # type: ignore[arg-type]

        drafter = ModelDrafts(
            checkpoint("qwen3"), draft_layout, world.communicator(rank, draft_layout.kvp_group(rank)), 3, Tampered
        )
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen3"), layout, comm, 16, drafter=drafter, adaptive=False, **sizes)
        assert isinstance(engine.runner.drafter, ModelDrafter)
        for model, table in zip((engine.runner.model, engine.runner.drafter.model), self.tables(), strict=True):
            reads_table(model, table)
        return engine

    def statistic(self, tokens: Tensor) -> tuple[float, float]:
        """Chi-square and its limit: of each token given the last one, for each token before that."""
        n = len(self.IDS)
        place = torch.full((257,), -1).index_copy(0, torch.tensor(self.IDS), torch.arange(n))
        x = place[tokens]
        assert int(x.min()) >= 0, "a token that cannot follow"
        counts = torch.bincount((x[:, :-2] * n * n + x[:, 1:-1] * n + x[:, 2:]).flatten(), minlength=n**3).view(n, n, n)
        wanted = torch.stack([probabilities(self.tables()[0][i], self.PARAMS)[list(self.IDS)] for i in self.IDS])
        behind = counts.sum(-1, keepdim=True)
        cells = (wanted > 0) & (behind > 0)
        expected = (behind * wanted)[cells]
        assert int(counts[~cells].sum()) == 0 and bool((wanted == 0).any()), "a filter that does some work"
        assert float(expected.min()) > 2
        return chi_square(counts[cells], expected), chi_square_limit(len(expected) - int((behind > 0).sum()) + 1)

    def test_is_the_targets(self) -> None:
        tokens = self.generated_tokens()
        assert tokens.numel() > 20_000
        statistic, limit = self.statistic(tokens)
        assert statistic < limit

    def test_a_wrong_draft_distribution_is_caught(self) -> None:
        def hotter(draft: Draft) -> Draft:
            assert draft.sampled_from is not None
            misreported = replace(draft.sampled_from, temperature=1.3 * draft.sampled_from.temperature)
            return replace(draft, sampled_from=misreported)

        statistic, limit = self.statistic(self.generated_tokens(hotter))
        assert statistic > limit
