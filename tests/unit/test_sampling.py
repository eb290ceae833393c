"""The sampler against a one-rank fp64 oracle, transformers' own filters and chi-square tests that can fail."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from comm.loopback import LoopbackCommunicator, LoopbackWorld, run_ranks
from helix.layout import share
from helix.sampling_params import SamplingParams
from helix.worker import sampling
from helix.worker.sampling import SamplingState, sample
from kernels.tokens import reference as random
from kernels.tokens.reference import TARGET, uniform

GREEDY = SamplingParams()
MIXED = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=40, seed=2),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.02, seed=4),
    SamplingParams(temperature=2.0, top_k=500, top_p=0.9, min_p=0.01, seed=2**63 - 1),
    SamplingParams(temperature=1e-4, seed=5),
    SamplingParams(temperature=100.0, top_k=10**9, seed=6),
    SamplingParams(temperature=1.0, top_p=1e-30, seed=7),
)


def state_of(params: tuple[SamplingParams, ...]) -> SamplingState:
    state = SamplingState.create(len(params), "cpu")
    state.set(torch.arange(len(params)), params)
    return state


class Alone(LoopbackCommunicator):
    """A world of one rank that notes what is communicated."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(LoopbackWorld(1, device=device), 0, [0])
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note("all_reduce", x)
        return super().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._note("all_gather", x)
        return super().all_gather(x)

    def _note(self, call: str, x: Tensor) -> None:
        self.calls[call] += 1
        self.largest = max(self.largest, x.numel())


def same(params: SamplingParams, rows: int) -> SamplingState:
    return state_of((params,)).rows(torch.zeros(rows, dtype=torch.int64))


def draw(
    logits: Tensor,
    params: tuple[SamplingParams, ...] | SamplingState,
    positions: Tensor | None = None,
    world: int = 1,
    flags: dict[str, bool] | None = None,
) -> Tensor:
    """Tokens [B] of `sample` over `world` ranks, which are checked to agree; only the work that is needed is asked."""
    B, V = logits.shape
    state = params if isinstance(params, SamplingState) else state_of(params)
    positions = torch.arange(B) if positions is None else positions
    if flags is None:
        sampled = state.temperature > 0
        filtered = sampled & ((state.top_k > 0) | (state.top_p < 1))
        flags = dict(stochastic=bool(sampled.any()), filtered=bool(filtered.any()))

    def rank_tokens(ranks: LoopbackWorld, rank: int) -> Tensor:
        ids = share(V, world, rank)
        shard = logits[:, ids.start : ids.stop]  # strided
        return sample(shard, ids.start, positions, state, ranks.communicator(rank, [rank]), **flags)

    tokens = run_ranks(world, rank_tokens)
    assert tokens[0].dtype == torch.int64 and all(torch.equal(t, tokens[0]) for t in tokens)
    return tokens[0]


def oracle_kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens [V] may be drawn from logits [V]: sorts the whole vocabulary; ties stay together."""
    scaled = (logits.double() - logits.max()) / torch.tensor(params.temperature).double()
    keep = torch.ones_like(logits, dtype=torch.bool)
    if params.top_k:
        keep &= logits >= logits.topk(min(params.top_k, len(logits))).values[-1]
    if params.top_p < 1:
        values, order = logits.masked_fill(~keep, -torch.inf).sort(descending=True)
        mass = scaled.masked_fill(~keep, -torch.inf).softmax(0)[order].cumsum(0)
        larger = torch.searchsorted(-values, -logits)  # how many tokens have a strictly larger logit
        above = torch.cat([torch.zeros(1, dtype=torch.float64), mass])[larger]
        keep &= (above < torch.tensor(params.top_p).double()) & (logits >= values[keep.sum() - 1])
    return keep & (scaled >= torch.tensor(params.min_p).double().log()) & logits.isfinite()


def oracle(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token drawn from logits [V]: the best of the kept set, with Gumbel noise from the same random numbers."""
    if params.is_greedy:
        return int((logits == logits.max()).nonzero()[0])
    u = uniform(torch.tensor(params.seed), torch.tensor(position), TARGET, torch.arange(len(logits)))
    scaled = logits.double() / torch.tensor(params.temperature).double()
    return int((scaled - (-u.log()).log()).masked_fill(~oracle_kept(logits, params), -torch.inf).argmax())


def kept_by_sample(logits: Tensor, params: SamplingParams, monkeypatch: pytest.MonkeyPatch, world: int = 1) -> Tensor:
    """Which tokens [V] `sample` can draw: row i's noise favors token i by 40, so that i wins wherever it is kept."""
    V = len(logits)
    gap = (logits.max() - logits.min()) / params.temperature
    assert gap < 40, f"a gap of {gap} outweighs the favor"

    def favor(seed: Tensor, position: Tensor, stream: int, index: Tensor) -> Tensor:
        # Gumbel noise 36.7 for one token and -3.6 for the others.
        return 2.0**-53 + (position == index).double() * (1 - 2.0**-52)

    with monkeypatch.context() as patch:
        patch.setattr(random, "uniform", favor)
        return draw(logits.expand(V, V), same(params, V), world=world) == torch.arange(V)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(cells: int) -> float:
    """Exceeded by chance with probability 3e-7 (five sigma), in the approximation of Wilson and Hilferty."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + 5 * math.sqrt(2 / (9 * df))) ** 3


def word_logits(batch: int, V: int, seed: int = 0) -> Tensor:
    """Logits with a peaked head and a long tail, as of a language model: the filters cut at odd places."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, V, generator=generator) * 2.5


class TestParams:
    @pytest.mark.parametrize(
        "field, value",
        [
            *[("temperature", v) for v in (-0.1, math.nan, math.inf, 1e39, 10**400, True, "1", None)],
            *[("top_k", v) for v in (-1, 2**63, 1.0, True, math.nan, None)],
            *[("top_p", v) for v in (0, -0.5, 1.0001, math.nan, True, "0.9")],
            *[("min_p", v) for v in (-1e-9, 1.0001, math.nan, False, None)],
            *[("seed", v) for v in (-1, 2**63, 0.0, True, None)],
            *[("presence_penalty", v) for v in (-2.01, 2.01, math.nan, True, None)],
            *[("frequency_penalty", v) for v in (-2.01, 2.01, math.nan, "1")],
            *[("repetition_penalty", v) for v in (0, 0.009, 100.1, -1, math.nan, math.inf, True)],
            *[("min_tokens", v) for v in (-1, 2**31, 1.0, True)],
            *[("ignore_eos", v) for v in (0, 1, None, "true")],
            *[("logprobs", v) for v in (-1, 21, 1.0, True)],
            *[("stop_token_ids", v) for v in (5, "5", None, {1})],
            *[("logit_bias", v) for v in ([(1, 2.0)], None, "1")],
        ],
    )
    def test_refuses_by_name_value_and_range(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=rf"{field}=.* must be ") as error:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert repr(value) in str(error.value)

    @pytest.mark.parametrize(
        "params, words",
        [
            (dict(logit_bias={-1: 1.0}), "logit_bias: token=-1 must be an integer"),
            (dict(logit_bias={"5": 1.0}), "logit_bias: token='5' must be an integer"),
            (dict(logit_bias={2**31: 1.0}), "logit_bias: token=2147483648 must be an integer"),
            (dict(logit_bias={5: 100.5}), r"logit_bias\[5\]=100.5 must be a number in \[-100, 100\]"),
            (dict(logit_bias={5: math.nan}), r"logit_bias\[5\]=nan must be a number"),
            (dict(logit_bias=dict.fromkeys(range(301), 0.0)), "must be values of at most 300 token ids"),
            (dict(stop_token_ids=[1, -1]), "stop_token_ids: token=-1 must be an integer"),
            (dict(stop_token_ids=[True]), "stop_token_ids: token=True must be an integer"),
            (dict(stop_token_ids=range(301)), "must be a list of at most 300 token ids"),
            (dict(stop_token_ids=[1] * 301), "must be a list of at most 300 token ids"),
        ],
    )
    def test_tokens_are_named(self, params: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words) as error:
            SamplingParams(**params)
        assert len(str(error.value)) < 700

    def test_accepts_the_ends_of_every_range(self) -> None:
        SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, min_tokens=0, logprobs=0)
        SamplingParams(repetition_penalty=100, logprobs=20, logit_bias={0: -100, 9: 100.0}, stop_token_ids=(0,))
        SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0)
        SamplingParams(temperature=3.4e38, top_k=2**63 - 1, top_p=1e-300, min_p=1, seed=2**63 - 1)

    def test_what_work_a_request_needs(self) -> None:
        assert GREEDY.is_greedy and not SamplingParams(temperature=0.5).is_greedy
        assert SamplingParams(temperature=1, top_k=1).is_filtered
        assert SamplingParams(temperature=1, top_p=0.9).is_filtered
        assert not SamplingParams(temperature=1, min_p=0.5).is_filtered
        assert not SamplingParams(temperature=0, top_k=5).is_filtered
        for changes in (
            dict(logit_bias={1: 0.0}), dict(presence_penalty=0.1), dict(frequency_penalty=-0.1), dict(min_tokens=1),
            dict(repetition_penalty=1.1), dict(masked=True),
        ):  # fmt: skip
            assert SamplingParams(**changes).changes_logits and SamplingParams(**changes).needs_logits_processor, (
                changes
            )
        assert SamplingParams(logprobs=0).needs_logits_processor and not SamplingParams(logprobs=0).changes_logits
        assert not SamplingParams(1.0, 5, 0.5, 0.1, 3, stop_token_ids=[1], ignore_eos=True).needs_logits_processor

    @pytest.mark.parametrize(
        "given",
        [
            {},
            dict(temperature=0.5, top_k=7, seed=2**63 - 1, masked=True, stop_token_ids=[3], prompt_logprobs=0),
            dict(logit_bias={5: -100, 0: 1.5}, ignore_eos=True, frequency_penalty=-2),
        ],
    )
    def test_what_differs_from_the_defaults_survives_json(self, given: dict[str, Any]) -> None:
        params = SamplingParams(**given)
        assert params.to_dict() == given
        assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params

    def test_what_ends_an_answer(self) -> None:
        assert SamplingParams(stop_token_ids=[5]).ends((7,)) == {5, 7}
        assert SamplingParams(stop_token_ids=[5], ignore_eos=True).ends((7,)) == {5}

    def test_state_is_written_in_place_and_rows_are_copies(self) -> None:
        state = SamplingState.create(3, "cpu")
        before = [t.data_ptr() for t in vars(state).values()]
        params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**63 - 1)
        names = "temperature", "top_k", "top_p", "min_p", "seed"
        state.set(torch.tensor([2, 1]), [GREEDY, params])
        assert [t.data_ptr() for t in vars(state).values()] == before
        some = state.rows(torch.tensor([1, 0]))
        assert {name: getattr(some, name).tolist() for name in names} == {
            name: [getattr(params, name), getattr(GREEDY, name)] for name in names
        }
        rows = state.rows(torch.tensor([1]))
        state.set(torch.tensor([1]), [GREEDY])
        assert rows.temperature.item() == 0.5
        assert [t.dtype for t in vars(state).values()] == [torch.float32, torch.int64]


class TestTokens:
    @pytest.mark.parametrize("V, worlds", [(50257, (1, 2, 3, 4, 8)), (3, (1, 2, 4, 8)), (1, (1, 3))])
    def test_every_sharding_draws_what_the_oracle_draws(self, V: int, worlds: tuple[int, ...]) -> None:
        logits = word_logits(len(MIXED), V)
        positions = torch.arange(len(MIXED)) * 1000
        expected = [oracle(row, p, int(t)) for row, p, t in zip(logits, MIXED, positions, strict=True)]
        for world in worlds:
            assert draw(logits, MIXED, positions, world).tolist() == expected

    @pytest.mark.parametrize("elements", [1, 211, 700])
    def test_filters_may_look_at_some_rows_at_a_time(self, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of rows of 211 columns: one at a time, and three, with fewer in the last piece."""
        logits = word_logits(len(MIXED), 211)
        expected = draw(logits, MIXED)
        monkeypatch.setattr(sampling, "FILTERED_ELEMENTS", elements)
        assert torch.equal(draw(logits, MIXED), expected)

    @pytest.mark.parametrize("world", [1, 3])
    def test_flags_set_without_need_change_nothing(self, world: int) -> None:
        plain = (GREEDY, SamplingParams(temperature=0.9, seed=3), SamplingParams(temperature=1.0, min_p=0.1, seed=3))
        logits = word_logits(5, 211)
        logits[:, 50:] = -torch.inf  # a filter that is off must not touch them either
        for params in ((GREEDY,) * 5, plain + plain[1:], MIXED[4:5] * 5):
            expected = draw(logits, params, world=world)
            for filtered in (False, True):
                flags = dict(stochastic=True, filtered=filtered)
                assert torch.equal(draw(logits, params, world=world, flags=flags), expected)

    def test_a_request_ignores_its_row_and_its_neighbors(self) -> None:
        logits, positions = word_logits(len(MIXED), 307), torch.arange(len(MIXED)) + 17
        together = draw(logits, MIXED, positions)
        order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(1))
        shuffled = draw(logits[order], tuple(MIXED[i] for i in order), positions[order], world=3)
        assert torch.equal(shuffled, together[order])
        alone = [draw(logits[i : i + 1], MIXED[i : i + 1], positions[i : i + 1]).item() for i in range(len(MIXED))]
        assert alone == together.tolist()

    def test_seed_and_position_change_the_draw(self) -> None:
        flat, B = torch.zeros(64, 10_007), 64
        by_position = draw(flat, same(SamplingParams(temperature=1.0), B)).tolist()
        by_seed = draw(flat, tuple(SamplingParams(temperature=1.0, seed=s) for s in range(B)), torch.zeros(B).long())
        # 127 independent draws out of 10007 have 0.8 equal pairs on average, more than 7 with probability 1e-6.
        assert by_position[0] == by_seed[0]
        assert len({*by_position, *by_seed.tolist()}) >= 120

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_greedy_takes_the_smallest_id_among_equals(self, world: int) -> None:
        logits = torch.full((4, 9), -3.0)
        logits[0, [2, 5, 8]] = 1.0
        logits[1, [8]] = 1.0
        logits[2] = 0.0
        logits[2, 0] = -0.0
        assert draw(logits, (GREEDY,) * 4, world=world).tolist() == [2, 8, 0, 0]

    @pytest.mark.parametrize("world", [1, 2, 5])
    def test_a_broken_row_is_minus_one_and_alone(self, world: int) -> None:
        params = tuple(p for p in (GREEDY, *MIXED[1:6]) for _ in range(6))
        logits = word_logits(len(params), 11)
        expected = draw(logits, params)
        broken = logits.clone()
        broken[1::6, 10] = math.nan
        broken[2::6, 0] = -math.nan
        broken[3::6, 4] = math.inf
        broken[4::6] = -math.inf
        tokens = draw(broken, params, world=world)
        for kind in range(6):
            assert tokens[kind::6].tolist() == (expected[kind::6].tolist() if kind in (0, 5) else [-1] * 6)

    def test_minus_infinity_is_never_drawn(self) -> None:
        params = tuple(SamplingParams(temperature=t, seed=s) for t in (0.0, 1.0, 3e38) for s in range(50))
        logits = torch.full((150, 40), -math.inf)
        logits[:, [3, 39]] = torch.tensor([-1e30, -1.1e30])
        assert set(draw(logits, params, world=3).tolist()) == {3, 39}
        logits[:, 39] = -math.inf
        assert set(draw(logits, params, world=3).tolist()) == {3}

    def test_extreme_temperatures(self) -> None:
        logits = torch.zeros(2000, 8)
        logits[:, 5] = 0.01  # a gap of 100 at temperature 1e-4
        assert set(draw(logits, same(SamplingParams(temperature=1e-4), 2000)).tolist()) == {5}
        logits[:, 5] = 10.0
        counts = torch.bincount(draw(logits, same(SamplingParams(temperature=100.0), 2000)), minlength=8)
        assert chi_square(counts, 2000 * (logits[0] / 100).softmax(0)) < chi_square_limit(8)
        for tiny in (1e-44, 1e-300):  # subnormal in fp32, and zero
            assert set(draw(logits, same(SamplingParams(temperature=tiny), 2000)).tolist()) == {5}


class TestKeptSet:
    @pytest.mark.parametrize("temperature", [0.5, 1.7])
    @pytest.mark.parametrize("min_p", [0.0, 0.03])
    @pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
    @pytest.mark.parametrize("top_k", [0, 1, 20, 10**6])
    def test_equals_transformers(
        self, temperature: float, top_k: int, top_p: float, min_p: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        logits = word_logits(1, 150, seed=top_k + 1)[0]
        filters = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            filters.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            filters.append(TopPLogitsWarper(top_p))
        if min_p:
            filters.append(MinPLogitsWarper(min_p))
        # In fp64 and with distinct logits no rounding stands between the two.
        expected = filters(None, logits.double()[None])[0].isfinite()
        assert torch.equal(oracle_kept(logits, params), expected)
        assert torch.equal(kept_by_sample(logits, params, monkeypatch), expected)

    @pytest.mark.parametrize("world", [1, 3])
    def test_ties_stay_together(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = torch.tensor([0.0, 2.0, 1.0, 1.0, -1.0, 1.0, 0.0, -0.0, 2.0])
        # e^2 twice, e three times, 1 three times, 1/e: the best 2, 5 and 8 hold 56.5%, 87.1% and 98.6% of the mass.
        for more, kept in (
            (dict(top_k=1), 2), (dict(top_k=2), 2), (dict(top_k=3), 5), (dict(top_k=6), 8), (dict(top_k=9), 9),
            (dict(top_p=0.01), 2), (dict(top_p=0.55), 2), (dict(top_p=0.7), 5), (dict(top_p=0.9), 8),
            (dict(top_p=0.99), 9), (dict(min_p=1.0), 2), (dict(top_k=3, top_p=0.64), 2), (dict(top_k=3, top_p=0.7), 5),
        ):  # fmt: skip
            params = SamplingParams(temperature=1.0, **more)
            mask = kept_by_sample(logits, params, monkeypatch, world)
            assert int(mask.sum()) == kept, more
            assert torch.equal(mask, oracle_kept(logits, params)), more

    def test_the_ends_of_the_ranges(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = torch.tensor([-30.0, 0.0, -35.0, 1.0])  # e^-31 is below the unit of mass
        for more, expected in (
            (dict(top_k=2**63 - 1), [True] * 4),
            (dict(top_k=3), [True, True, False, True]),
            (dict(top_p=1e-300), [False, False, False, True]),  # zero in fp32
            (dict(min_p=1e-300), [True] * 4),
        ):
            params = SamplingParams(temperature=1.0, **more)
            assert kept_by_sample(logits, params, monkeypatch).tolist() == expected, more

    @given(
        levels=st.lists(st.sampled_from([-math.inf, -8.0, -1.5, -0.0, 0.0, 1e-40, 1.0, 4.0]), min_size=1, max_size=30),
        temperature=st.sampled_from([0.3, 1.0, 50.0]),
        top_k=st.integers(0, 40),
        top_p=st.floats(0, 1, exclude_min=True, width=32),
        min_p=st.floats(0, 1, width=32),
        seed=st.integers(0, 2**63 - 1),
        position=st.integers(0, 2**40),
        world=st.integers(1, 4),
    )
    def test_the_drawn_token_is_kept(
        self, levels: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
        position: int, world: int,
    ) -> None:  # fmt: skip
        logits = torch.tensor(levels)
        params = SamplingParams(temperature, top_k, top_p, min_p, seed)
        token = int(draw(logits[None], (params,), torch.tensor([position]), world))
        if logits.max() == -math.inf:
            assert token == -1
        else:
            assert oracle_kept(logits, params)[token] and token == oracle(logits, params, position)


class TestDistribution:
    N = 20_000
    V = 60
    PARAMS = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.004, seed=11)

    def statistic(self, sampled: Tensor, params: SamplingParams) -> tuple[float, float]:
        """Chi-square of tokens [N] against the filtered distribution under `params`, and its limit."""
        logits = word_logits(1, self.V)[0]
        kept = oracle_kept(logits, params)
        assert 10 < int(kept.sum()) < 40, "each filter should do some work"
        weights = (logits.double() / params.temperature)[kept].softmax(0)
        counts = torch.bincount(sampled, minlength=self.V)
        assert counts[~kept].sum() == 0
        return chi_square(counts[kept], self.N * weights), chi_square_limit(int(kept.sum()))

    def draws(self) -> Tensor:
        """N tokens, over running positions; in batches whose histograms stay in the CPU's cache."""
        logits, state = word_logits(1, self.V).expand(200, -1), same(self.PARAMS, 200)
        positions = torch.arange(self.N).split(200)
        return torch.cat([sample(logits, 0, at, state, Alone(), stochastic=True, filtered=True) for at in positions])

    def test_over_positions(self) -> None:
        sampled = self.draws()
        statistic, limit = self.statistic(sampled, self.PARAMS)
        assert statistic < limit
        pairs = torch.bincount((sampled[1:] % 4) * 4 + sampled[:-1] % 4, minlength=16).view(4, 4).double()
        independent = pairs.sum(0) * pairs.sum(1, keepdim=True) / pairs.sum()
        assert chi_square(pairs, independent) < chi_square_limit(10)  # (4 - 1)^2 = 9 degrees of freedom
        # The test has the power to tell a temperature that is 10% higher, with the same kept set.
        kept = int(oracle_kept(word_logits(1, self.V)[0], self.PARAMS).sum())
        statistic, limit = self.statistic(sampled, SamplingParams(self.PARAMS.temperature * 1.1, top_k=kept))
        assert statistic > limit

    def test_a_planted_bias_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Noise shared by pairs of tokens: each draw still looks random, only the better one of a pair always wins.
        shared = lambda seed, position, stream, index: uniform(seed, position, stream, index // 2)  # noqa: E731
        monkeypatch.setattr(random, "uniform", shared)
        statistic, limit = self.statistic(self.draws(), self.PARAMS)
        assert statistic > 2 * limit


class TestUniform:
    N = 1 << 18

    def along(self, counter: str, at: int = 5) -> Tensor:
        """N numbers with one counter running and the others fixed."""
        values = {name: torch.tensor(at) for name in ("seed", "position", "index")}
        if counter == "stream":
            return torch.stack([uniform(**values, stream=s) for s in range(1 << 12)])
        return uniform(**values | {counter: torch.arange(self.N)}, stream=0)

    @staticmethod
    def evenness(u: Tensor) -> float:
        """The larger chi-square of the first and the last 8 bits of u, 256 cells each."""
        bits = (u * 2.0**52).long()
        return max(
            chi_square(torch.bincount(part, minlength=256), torch.full((256,), len(u) / 256))
            for part in (bits >> 44, bits & 255)
        )

    @pytest.mark.parametrize("counter", ["seed", "position", "index", "stream"])
    def test_even_and_uncorrelated_along_every_counter(self, counter: str) -> None:
        u = self.along(counter)
        assert u.dtype == torch.float64 and u.min() > 0 and u.max() < 1
        assert self.evenness(u) < chi_square_limit(256)
        for lag in (1, 2, 3, 16):
            # The correlation of n independent pairs is normal with deviation 1 / sqrt(n).
            assert abs(torch.corrcoef(torch.stack([u[lag:], u[:-lag]]))[0, 1]) < 5 / math.sqrt(len(u) - lag)

    def test_no_two_counters_alias(self) -> None:
        small = torch.arange(24)
        u = torch.stack(
            [uniform(small[:, None, None], small[:, None], stream, small) for stream in range(4)]
        )  # [4, 24, 24, 24]
        # 55296 numbers of 52 bits: 3e-7 equal pairs by chance.
        assert u.unique().numel() == u.numel()
        assert u[0, 0, 0, 0] > 1e-6, "zero, which the finalizer maps to itself, must not be reached by zero counters"

    def test_never_zero_or_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = torch.tensor([1])
        for word, expected in ((0, 2.0**-53), (-1, 1 - 2.0**-53)):
            monkeypatch.setattr(random, "mix", lambda x, word=word: torch.full_like(x, word))
            u = uniform(one, one, 0, one)
            assert u.item() == expected and (-(-u.log()).log()).isfinite()

    def test_is_splitmix64(self) -> None:
        # First outputs of Vigna's reference implementation, seeded with 1234567.
        expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
        state = 1234567 + (torch.arange(4) + 1) * random.GOLDEN
        assert [x % (1 << 64) for x in random.mix(state).tolist()] == expected


@pytest.mark.parametrize(
    "flags, calls, per_row",
    [
        (dict(stochastic=False, filtered=False), dict(all_gather=1), 2),
        (dict(stochastic=True, filtered=False), dict(all_gather=2), 2),
        (dict(stochastic=True, filtered=True), dict(all_gather=2, all_reduce=5), 2 * 2048),
    ],
)
def test_little_is_communicated_and_the_host_never_waits(
    flags: dict[str, bool], calls: dict[str, int], per_row: int
) -> None:
    comm = Alone()
    with FakeTensorMode():  # refuses whatever would need a value on the host
        B = len(MIXED)
        fake = torch.empty(B, 200_000), torch.empty(B, dtype=torch.int64), SamplingState.create(B, "cpu")
        tokens = sample(fake[0], 0, fake[1], fake[2], comm, **flags)
    assert tokens.shape == (B,) and comm.calls == calls and comm.largest == B * per_row


@pytest.mark.gpu
def test_one_graph_serves_new_requests() -> None:
    B, V = len(MIXED), 50257
    state = SamplingState.create(B, "cuda")
    logits, positions = torch.zeros(B, V, device="cuda"), torch.zeros(B, dtype=torch.int64, device="cuda")
    comm = Alone("cuda")
    step = lambda: sample(logits, 0, positions, state, comm, stochastic=True, filtered=True)  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # allocations and lazy loading happen outside the graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = step()
    for shift in range(3):
        params = MIXED[shift:] + MIXED[:shift]
        state.set(torch.arange(B, device="cuda"), params)
        fresh = word_logits(B, V, seed=shift)
        logits.copy_(fresh)
        positions.copy_(torch.arange(B) + shift)
        graph.replay()
        # exp and log of GPU and CPU differ in the last place: that moves a draw with probability about 2^-40.
        assert torch.equal(tokens.cpu(), draw(fresh, params, torch.arange(B) + shift))
