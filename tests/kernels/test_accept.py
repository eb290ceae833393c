"""Lossless acceptance: against a textbook of full probabilities, over shards, and by chi-square."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from comm.loopback import LoopbackWorld, run_ranks
from helix.layout import share
from helix.sampling_params import SamplingParams
from helix.worker.sampling import SamplingState, distribution
from kernels.tokens import accept as kernels
from kernels.tokens import reference
from kernels.tokens.best_token import best_of_ranks
from kernels.tokens.reference import DRAFT, TARGET, gumbel, uniform
from kernels.tokens.uniform import uniform as kernel_uniform
from tests.unit.test_sampling import MIXED, chi_square, chi_square_limit, oracle_kept, state_of, word_logits

HOME = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step(
    p_logits: Tensor, q_logits: Tensor | None, draft: Tensor, state: SamplingState, q_state: SamplingState,
    position: Tensor, world: int = 1, ops: object = kernels,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accepted lengths and next tokens [B] over `world` ranks, which are checked to agree."""

    def body(ranks: LoopbackWorld, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        comm, ids = ranks.communicator(rank, [rank]), share(p_logits.shape[2], world, rank)
        p, greedy = distribution(p_logits[..., ids.start : ids.stop], ids.start, state, comm, filtered=True)
        p_mass = comm.all_reduce(ops.kept_mass(p, draft, ids.start))  # type: ignore[attr-defined]
        q = q_mass = None
        if q_logits is not None:
            q = distribution(q_logits[..., ids.start : ids.stop], ids.start, q_state, comm, filtered=True)[0]
            q_mass = comm.all_reduce(ops.kept_mass(q, draft, ids.start))  # type: ignore[attr-defined]
        accepted, candidates = ops.accept(  # type: ignore[attr-defined]
            p, q, p_mass, q_mass, draft, greedy, state.seed.contiguous(), position, ids.start
        )
        return accepted, best_of_ranks(comm.all_gather(candidates).flatten(0, 1))[1], candidates

    results = run_ranks(world, body, device=p_logits.device)
    for accepted, tokens, candidates in results:
        assert torch.equal(accepted, results[0][0]) and torch.equal(tokens, results[0][1])
        assert candidates.shape == results[0][2].shape
    return results[0][:2]


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The filtered distribution [V] fp64."""
    kept = oracle_kept(logits, params)
    scaled = logits.double() / torch.tensor(params.temperature).double()
    return scaled.masked_fill(~kept, -torch.inf).softmax(0)


def textbook(
    p_logits: Tensor,
    q_logits: Tensor | None,
    draft: list[int],
    params: SamplingParams,
    q_params: SamplingParams,
    at: int,
) -> tuple[int, int]:
    """One sequence, position after position: accepted length and next token, from the same random numbers."""
    seed, V = torch.tensor(params.seed), p_logits.shape[1]
    if params.is_greedy:
        best = p_logits.argmax(-1).tolist()
        k = next((j for j, (d, t) in enumerate(zip(draft, best, strict=False)) if d != t), len(draft))
        return k, best[k]

    def sampled(weights: Tensor, position: int, stream: int) -> int:
        return int((weights.log() + gumbel(seed, torch.tensor(position), stream, torch.arange(V))).argmax())

    for j, token in enumerate(draft):
        p = probabilities(p_logits[j], params)
        if token < 0:
            return j, sampled(p, at + j, TARGET)
        q = torch.eye(V, dtype=torch.float64)[token] if q_logits is None else probabilities(q_logits[j], q_params)
        u = float(uniform(seed, torch.tensor(at + j), 2, 0))
        if not u < float(p[token] / q[token]):
            return j, sampled((p - q).clamp(min=0), at + j, 3)
    return len(draft), sampled(probabilities(p_logits[len(draft)], params), at + len(draft), TARGET)


def drafts(q_logits: Tensor, params: tuple[SamplingParams, ...], position: Tensor) -> Tensor:
    """Tokens [B, gamma] drawn from q with stream DRAFT."""
    B, G, V = q_logits.shape
    tokens = torch.empty(B, G, dtype=torch.int64)
    for b in range(B):
        for j in range(G):
            noise = gumbel(torch.tensor(params[b].seed), position[b] + j, DRAFT, torch.arange(V))
            weights = q_logits[b, j] if params[b].is_greedy else probabilities(q_logits[b, j], params[b]).log() + noise
            tokens[b, j] = weights.argmax()
    return tokens


Setting = tuple[Tensor, Tensor, Tensor, Tensor, tuple[SamplingParams, ...], tuple[SamplingParams, ...]]


def setting(V: int, G: int, copies: int = 1, seed: int = 0) -> Setting:
    """Target and draft logits that resemble each other, drafts, positions, the parameters of both; all on the CPU."""
    params = tuple(replace(p, seed=p.seed % 2**62 + 100 * i) for i in range(copies) for p in MIXED)
    q_params = tuple(replace(p, temperature=p.temperature and 1.1 * p.temperature, min_p=0.0) for p in params)
    B = len(params)
    p = word_logits(B * (G + 1), V, seed).view(B, G + 1, V)
    q = p[:, :G] + 0.5 * word_logits(B * G, V, seed + 1).view(B, G, V)
    position = torch.arange(B) * 1000
    return p, q, drafts(q, q_params, position), position, params, q_params


def run(case: Setting, sampled: bool, world: int = 1, ops: object = kernels) -> tuple[list[int], list[int]]:
    p, q, draft, position, params, q_params = case
    p, q, draft, position = (t.to(HOME) for t in (p, q, draft, position))
    states = (SamplingState(**{k: t.to(HOME) for k, t in vars(state_of(s)).items()}) for s in (params, q_params))
    accepted, tokens = step(p, q if sampled else None, draft, *states, position, world, ops)
    return accepted.tolist(), tokens.tolist()


@pytest.fixture
def few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs that take several rounds each."""
    monkeypatch.setattr(kernels, "SLICES", 2)
    monkeypatch.setattr(kernels, "BLOCK", 64)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("V, G, world", [(150, 3, 1), (150, 3, 3), (61, 5, 2), (2, 1, 4), (200, 0, 1)])
def test_every_sharding_does_what_the_textbook_says(V: int, G: int, world: int, sampled: bool) -> None:
    case = setting(V, G, copies=3)
    p, q, draft, position, params, q_params = case
    draft[5::7, -1:] = -1
    expected = [
        textbook(p[b], q[b] if sampled else None, draft[b].tolist(), params[b], q_params[b], int(position[b]))
        for b in range(len(params))
    ]
    accepted, tokens = run(case, sampled, world)
    assert list(zip(accepted, tokens, strict=True)) == expected
    if V == 150 and sampled:
        assert len(set(accepted)) == G + 1, "every length should occur"


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("V, G, world", [(90, 3, 1), (61, 2, 2), (2, 1, 3), (50, 0, 1)])
@pytest.mark.usefixtures("few_slices", "device")
def test_kernels_do_what_the_reference_does(V: int, G: int, world: int, sampled: bool) -> None:
    case = setting(V, G, seed=4)
    case[2][::4, -1:] = -1
    assert run(case, sampled, world) == run(case, sampled, ops=reference)


@pytest.mark.usefixtures("few_slices")
def test_mass_of_strided_columns(device: torch.device) -> None:
    p, _, draft, _, params, _ = setting(101, 4)
    wide = torch.full((len(params), 5, 120), torch.nan, device=device)
    wide[..., 7:108] = p.to(device)
    logits = wide[..., 7:108]
    state = state_of(params)
    key = torch.randint(0, 1 << 32, (len(params), 5), generator=torch.Generator().manual_seed(0))
    key[:, 0] = (1 << 32) - 1
    p = kernels.Distribution(
        logits, logits.amax(-1).double(), key.to(device), state.temperature.to(device), state.min_p.to(device)
    )
    tokens = draft.to(device) + 40
    for columns in (tokens, torch.nn.functional.pad(tokens, (0, 1), value=44)):
        got, wanted = kernels.kept_mass(p, columns, 40), reference.kept_mass(p, columns, 40)
        # Two exponentials in fp64, of at most 2^40 units: half a unit apart by rounding, for each of 101 tokens.
        assert (got - wanted).abs().max() <= 101
        assert bool((got[..., 1] > 0).any()) and bool((got[..., 0] > got[..., 1]).any())


@pytest.mark.usefixtures("few_slices", "device")
@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernels", "reference"])
def test_a_broken_row_is_minus_one_and_alone(ops: object) -> None:
    p, q, draft, position, params, q_params = setting(40, 2)
    accepted, tokens = run((p, q, draft, position, params, q_params), True, ops=ops)
    broken = p.clone()
    hit = [0, 2, 5]
    broken[hit, 0, 7] = torch.nan
    broken[5, 0] = -torch.inf
    got = run((broken, q, draft, position, params, q_params), True, ops=ops)
    for b in range(len(params)):
        assert (got[0][b], got[1][b]) == ((0, -1) if b in hit else (accepted[b], tokens[b]))


@pytest.mark.usefixtures("few_slices", "device")
def test_a_request_ignores_its_row_and_its_neighbors() -> None:
    p, q, draft, position, params, q_params = setting(40, 2)
    accepted, tokens = run((p, q, draft, position, params, q_params), True)
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(3))
    moved = [tuple(s[i] for i in order) for s in (params, q_params)]
    shuffled = run((p[order], q[order], draft[order], position[order], moved[0], moved[1]), True, world=2)
    assert shuffled == ([accepted[i] for i in order], [tokens[i] for i in order])


@triton.jit
def _uniform_kernel(seed, position, index, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, kernel_uniform(tl.load(seed + n), tl.load(position + n), n * 0 + 3, tl.load(index + n)))


def test_kernels_draw_the_samplers_numbers(device: torch.device) -> None:
    g = torch.Generator().manual_seed(1)
    counters = [torch.randint(0, high, (64,), generator=g).to(device) for high in (2**63 - 1, 2**40, 2**20)]
    counters[0][0] = counters[1][0] = counters[2][0] = 0
    out = torch.full((64,), torch.nan, dtype=torch.float64, device=device)
    _uniform_kernel[(1,)](*counters, out, N=64)
    seed, position, index = counters
    assert torch.equal(out, uniform(seed, position, 3, index))


class TestDistribution:
    """What is emitted is distributed as the target; gamma drafts from another distribution, contexts left aside."""

    N, V, G = 24_000, 24, 2
    PARAMS = SamplingParams(temperature=1.4, top_k=18, top_p=0.97, min_p=0.003, seed=9)
    Q_PARAMS = SamplingParams(temperature=1.9, top_k=20, seed=9)

    def logits(self) -> tuple[Tensor, Tensor]:
        p = word_logits(self.G + 1, self.V, seed=2)
        return p, 0.6 * p[: self.G] + 0.5 * word_logits(self.G, self.V, seed=3)

    def rounds(self, sampled: bool, over: str, q_temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts [N, G], accepted lengths and next tokens [N]; the test is told a q of another temperature."""
        p_logits, q_logits = self.logits()
        running, fixed = torch.arange(self.N), torch.full((self.N,), 5)
        seed, position = (running, fixed) if over == "seed" else (fixed, running * (self.G + 1))
        if sampled:
            q = torch.stack([probabilities(row, self.Q_PARAMS) for row in q_logits])
            at = (position[:, None] + torch.arange(self.G))[..., None]
            draft = (q.log() + gumbel(seed[:, None, None], at, DRAFT, torch.arange(self.V))).argmax(-1)
        else:
            draft = p_logits[: self.G].argmax(-1).expand(self.N, -1)
        misreported = replace(self.Q_PARAMS, temperature=self.Q_PARAMS.temperature * q_temperature)
        alone = LoopbackWorld(1, device=HOME).communicator(0, [0])

        def expand(logits: Tensor, params: SamplingParams) -> tuple[kernels.Distribution, Tensor]:
            """What one row finds out serves all."""
            state = SamplingState(**{k: t.to(HOME) for k, t in vars(state_of((params,))).items()})
            one, greedy = distribution(logits[None].to(HOME), 0, state, alone, filtered=True)
            many = {k: t.expand(self.N, *t.shape[1:]) for k, t in vars(one).items()}
            rest = {k: t.contiguous() for k, t in many.items() if k != "logits"}
            return kernels.Distribution(many["logits"], **rest), greedy.expand(self.N, -1)

        p, greedy = expand(p_logits, self.PARAMS)
        tokens, counters = draft.contiguous().to(HOME), (seed.to(HOME), position.to(HOME))
        q_dist = q_mass = None
        if sampled:
            q_dist = expand(q_logits, misreported)[0]
            q_mass = kernels.kept_mass(q_dist, tokens, 0)
        p_mass = kernels.kept_mass(p, tokens, 0)
        accepted, candidates = kernels.accept(p, q_dist, p_mass, q_mass, tokens, greedy, *counters, 0)
        return draft, accepted.cpu(), best_of_ranks(candidates)[1].cpu()

    def statistics(self, draft: Tensor, accepted: Tensor, token: Tensor) -> list[tuple[float, float]]:
        """Chi-square and its limit: of the first token, of those behind it where there are some, of pairs."""
        wanted = [probabilities(row, self.PARAMS) for row in self.logits()[0]]
        emitted = torch.cat([draft, token[:, None]], 1)
        emitted[torch.arange(self.N), accepted] = token
        found = []
        for j in range(self.G + 1):
            tokens, kept = emitted[accepted >= j, j], wanted[j] > 0
            assert len(tokens) > 800 and 8 <= int(kept.sum()) < self.V, (
                "enough rounds, and a filter that does some work"
            )
            counts = torch.bincount(tokens, minlength=self.V)
            if int(counts[~kept].sum()):
                return [(math.inf, 0.0)]
            found.append((chi_square(counts[kept], len(tokens) * wanted[j][kept]), chi_square_limit(int(kept.sum()))))
        first, second = emitted[accepted >= 1, :2].unbind(1)
        pairs = torch.bincount(first % 3 * 3 + second % 3, minlength=9).view(3, 3).double()
        rows, columns = pairs.sum(1, keepdim=True), pairs.sum(0)
        live = (rows * columns) > 0
        expected = rows * columns / pairs.sum()
        found.append((chi_square(pairs[live], expected[live]), chi_square_limit(5)))
        return found

    @pytest.mark.parametrize("over", ["position", "seed"])
    @pytest.mark.parametrize("sampled", [True, False])
    def test_is_the_targets(self, sampled: bool, over: str) -> None:
        draft, accepted, token = self.rounds(sampled, over)
        for statistic, limit in self.statistics(draft, accepted, token):
            assert statistic < limit
        # No more is rejected than has to be: sum of min(p, q) is accepted, within five deviations.
        p_logits, q_logits = self.logits()
        p = probabilities(p_logits[0], self.PARAMS)
        q = probabilities(q_logits[0], self.Q_PARAMS) if sampled else torch.eye(self.V)[draft[0, 0]].double()
        rate = float(torch.minimum(p, q).sum())
        deviation = math.sqrt(rate * (1 - rate) / self.N)
        assert abs(float((accepted > 0).double().mean()) - rate) < 5 * deviation

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the bias is planted in the reference")
    @pytest.mark.parametrize("stream, value", [("ACCEPT", DRAFT), ("RECOVER", DRAFT), ("RECOVER", 2)])
    def test_shared_streams_fail(self, stream: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def shifted(*counters: Tensor | int) -> Tensor:
            return uniform(counters[0], counters[1], counters[2], 1)  # type: ignore[arg-type]

        monkeypatch.setattr(reference, stream, value)
        if stream == "ACCEPT":
            monkeypatch.setattr(reference, "uniform", shifted)  # the number that token 1 was drafted with
        if value == 2:  # one number for the test and for all tokens' noise: no Gumbel noise at all
            monkeypatch.setattr(reference, "gumbel", lambda s, p, stream, ids: gumbel(s, p, stream, ids * 0))
        assert any(statistic > limit for statistic, limit in self.statistics(*self.rounds(True, "position")))

    def test_recovery_from_the_target_fails(self) -> None:
        p_logits = self.logits()[0]
        draft, accepted, token = self.rounds(True, "position")
        p = torch.stack([probabilities(row, self.PARAMS) for row in p_logits])
        at = torch.arange(self.N) * (self.G + 1) + accepted
        sampled = (p[accepted].log() + gumbel(torch.tensor(5), at[:, None], 7, torch.arange(self.V))).argmax(-1)
        biased = torch.where(accepted < self.G, sampled, token)
        other_q = self.rounds(True, "position", q_temperature=1.3)  # which the drafts were not drawn from
        for rounds in ((draft, accepted, biased), other_q):
            assert any(statistic > limit for statistic, limit in self.statistics(*rounds))


@pytest.mark.gpu
def test_a_captured_step_serves_other_tokens() -> None:
    p_logits, _, draft, position, params, _ = setting(5000, 4)
    state = SamplingState(**{k: t.cuda() for k, t in vars(state_of(params)).items()})
    alone = LoopbackWorld(1, device=HOME).communicator(0, [0])
    p, greedy = distribution(p_logits.cuda(), 0, state, alone, filtered=True)
    tokens, at = draft.cuda(), position.cuda()

    def body() -> tuple[Tensor, Tensor]:
        mass = kernels.kept_mass(p, tokens, 0)
        accepted, candidates = kernels.accept(p, None, mass, None, tokens, greedy, state.seed, at, 0)
        return accepted, best_of_ranks(candidates)[1]

    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = body()
    for shift in (0, 1, 2):
        tokens.copy_((draft.cuda() + shift) % 5000)
        at.copy_(position.cuda() + shift)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, body(), strict=True))
