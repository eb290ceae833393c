"""Wishes of sequences that come, go and come back, over sharded logits, against one rank that walks over lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.scheduler_output import NewRequest
from helix.kv_placement import NO_PAGES
from helix.layout import share
from helix.sampling_params import SamplingParams
from helix.worker.logits_processor import LogitsProcessor
from helix.worker.sampling import SamplingState, sample
from kernels.tokens.reference import logprobs
from kernels.tokens.top_tokens import TOP, WIDTH
from tests.kernels.test_process_logits import LogitsParams, bits
from tests.sequences import new_request
from tests.unit.test_sampling import Alone, oracle

V, SLOTS, EOS = 45, 3, (7, 44)
Op = tuple[int, int] | None  # sequence -> slot, or a step of all slots


@dataclass
class Sequence:
    """A request, and what it has drawn."""

    name: int
    params: SamplingParams
    prompt: list[int]
    drawn: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.drawn)

    def logits(self) -> Tensor:
        """What a model says behind its tokens: [V], with many ties."""
        generator = torch.Generator().manual_seed(1000 * self.name + self.position)
        return torch.randint(-4, 5, (V,), generator=generator) / 2

    def allowed(self) -> list[int] | None:
        """What a grammar allows next."""
        return [t for t in range(V) if (t + self.position) % 3 == 0] if self.params.masked else None

    def sample_step(self) -> int:
        """The token that the walk draws."""
        p = self.params
        logits_params = LogitsParams(
            self.prompt, self.drawn, p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        )
        logits_params = replace(
            logits_params, bias=dict(p.logit_bias), ends=[*EOS, *p.stop_token_ids], allowed=self.allowed()
        )
        logits_params.min_end_position = len(self.prompt) + p.min_tokens
        shaped = torch.tensor(logits_params.shape(self.logits().tolist(), self.position), dtype=torch.float64).float()
        return oracle(shaped, p, self.position)


def make_sequences(params: list[SamplingParams]) -> list[Sequence]:
    return [Sequence(i, p, [(7 * i + j * j) % V for j in range(2 + i)]) for i, p in enumerate(params)]


def walk(params: list[SamplingParams], script: list[Op]) -> list[list[int]]:
    """Tokens of each sequence."""
    sequences = make_sequences(params)
    slots: dict[int, Sequence] = {}
    for op in script:
        if op is not None:
            name, slot = op
            slots = {s: q for s, q in slots.items() if s != slot and q.name != name} | {slot: sequences[name]}
        for sequence in slots.values() if op is None else [slots[op[1]]]:
            sequence.drawn.append(sequence.sample_step())
    return [s.drawn for s in sequences]


class SimulatedRank:
    """One rank that plays a script as the engine's ranks would: the first token with the prompt, then step by step."""

    def __init__(self, world: LoopbackWorld, rank: int, params: list[SamplingParams], size: int) -> None:
        self.columns = share(V, size, rank)
        self.comm = world.communicator(rank, [rank])
        self.shaper = LogitsProcessor(SLOTS, V, self.columns, EOS, torch.device("cpu"))
        self.sampling = SamplingState.create(SLOTS, "cpu")
        self.sequences = make_sequences(params)
        self.slots: dict[int, Sequence] = {}
        self.reported: list[tuple[Tensor, Tensor, Tensor]] = []

    def admit(self, sequence: Sequence, slot: int) -> None:
        self.slots = {s: q for s, q in self.slots.items() if s != slot and q is not sequence} | {slot: sequence}
        tokens = np.array(sequence.prompt + sequence.drawn, np.int32)
        drawn = len(sequence.drawn)
        self.shaper.admit(new_request(slot, 0, NO_PAGES, 0, tokens, sampling=sequence.params, num_output_tokens=drawn))
        self.sampling.set(torch.tensor([slot]), [sequence.params])
        self.sample_step([slot], [-1])

    def step(self) -> None:
        self.sample_step(list(range(SLOTS)), [self.slots[s].drawn[-1] if s in self.slots else -1 for s in range(SLOTS)])

    def sample_step(self, slots: list[int], last: list[int]) -> None:
        live = [self.slots.get(s) for s in slots]
        raw = torch.stack([torch.zeros(V) if q is None else q.logits() for q in live])
        logits = raw[:, self.columns.start : self.columns.stop].contiguous()
        positions = torch.tensor([0 if q is None else q.position for q in live])
        masks = {s: bits(a, V).numpy() for s, q in self.slots.items() if (a := q.allowed()) is not None}
        if masks:
            self.shaper.set_bitmasks(masks)
        rows, first = torch.tensor(slots), self.columns.start
        shaped = self.shaper.process(logits, rows, torch.tensor(last), positions)
        state = self.sampling.rows(rows)
        tokens = sample(shaped, first, positions, state, self.comm, stochastic=True, filtered=True)
        self.shaper.record_logprobs(logits, tokens, rows, self.comm)
        self.reported.append((raw, tokens, self.shaper.summaries[slots]))
        for sequence, token in zip(live, tokens.tolist(), strict=True):
            if sequence is not None:
                sequence.drawn.append(token)


def play(
    params: list[SamplingParams],
    script: list[Op],
    size: int,
    fault: Callable[[SimulatedRank], None] = lambda rank: None,
) -> tuple[list[list[int]], list[tuple[Tensor, Tensor, Tensor]]]:
    """Tokens of each sequence, and what is reported of each draw, on all ranks alike."""

    def body(world: LoopbackWorld, number: int) -> Any:
        rank = SimulatedRank(world, number, params, size)
        fault(rank)
        for op in script:
            if op is None:
                rank.step()
            else:
                rank.admit(rank.sequences[op[0]], op[1])
        return [s.drawn for s in rank.sequences], rank.reported

    first, *others = run_ranks(size, body)
    for drawn, reported in others:
        assert drawn == first[0]
        assert all(
            torch.equal(a, b) for x, y in zip(reported, first[1], strict=True) for a, b in zip(x, y, strict=True)
        )
    return first


PARAMS = [
    SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, logprobs=3),
    SamplingParams(1.0, seed=3),
    SamplingParams(0.8, top_k=9, seed=4, repetition_penalty=1.7, min_tokens=4, logit_bias={44: 100.0, 7: 50.0}),
    SamplingParams(masked=True, presence_penalty=2.0, stop_token_ids=[3, 6], min_tokens=6),
    SamplingParams(1.2, top_p=0.9, seed=5, logit_bias=dict.fromkeys(range(0, V, 2), -3.0), frequency_penalty=-0.5),
    SamplingParams(),
]
# All come; two are sent away and come back; slots change hands, also to one that wants nothing.
SCRIPT: list[Op] = [
    (0, 0), (2, 1), None, None, (3, 2), None, None, None, (1, 0), None, (4, 1), None, None, (2, 0), None, None, (5, 2),
    None, (0, 2), None, None, (3, 1), None, (1, 1), None, None,
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_sharding_draws_what_the_walk_draws(size: int) -> None:
    drawn, reported = play(PARAMS, SCRIPT, size)
    assert drawn == walk(PARAMS, SCRIPT)
    for raw, tokens, summaries in reported:
        ids, values = logprobs(summaries)
        wanted = raw.double().log_softmax(1)
        assert ids[:, 0].tolist() == tokens.tolist()
        for row, row_logits in enumerate(raw.tolist()):
            assert ids[row, 1:].tolist() == sorted(range(V), key=lambda t, x=row_logits: (-x[t], t))[:TOP]
        torch.testing.assert_close(values.double(), wanted.gather(1, ids), rtol=2**-23, atol=1e-12)


def test_the_end_waits_and_masks_hold() -> None:
    drawn = walk(PARAMS, SCRIPT)
    assert not {*drawn[2][:4]} & {*EOS}, "min_tokens of one whose bias wants to end"
    assert {*drawn[2][4:]} & {*EOS}
    assert all((token + at + len(make_sequences(PARAMS)[3].prompt)) % 3 == 0 for at, token in enumerate(drawn[3]))


def test_a_row_that_wants_nothing_draws_what_it_draws_alone() -> None:
    """With others in the batch or not, and in a slot of one that wanted much."""
    plain = [1, 5]
    drawn, _ = play(PARAMS, SCRIPT, 2)
    alone = [PARAMS[i] if i in plain else SamplingParams() for i in range(len(PARAMS))]
    without, _ = play(
        alone, SCRIPT, 1, fault=lambda rank: setattr(rank.shaper, "process", lambda logits, *rest: logits)
    )
    assert [drawn[i] for i in plain] == [without[i] for i in plain]


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    top_k=st.sampled_from([0, 6]),
    seed=st.integers(0, 99),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -0.5, 0.5, 100.0]), max_size=4),
    min_tokens=st.integers(0, 5),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.5]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, 2.0]),
    masked=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=3),
)


@settings(max_examples=25)
@given(
    params=st.lists(some_params, min_size=5, max_size=5),
    script=st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 4), st.integers(0, SLOTS - 1))), max_size=12),
    size=st.integers(1, 4),
)
def test_any_script(params: list[SamplingParams], script: list[Op], size: int) -> None:
    assert play(params, script, size)[0] == walk(params, script)


def _biased_beside(new_request: NewRequest) -> NewRequest:
    sampling = new_request.sampling
    bias = {(token + 1) % V: value for token, value in sampling.logit_bias.items()}
    return replace(new_request, sampling=replace(sampling, logit_bias=bias))


@pytest.mark.parametrize(
    "method, change",
    [
        pytest.param("process", lambda f, x, slots, last, p: f(x, slots, last.roll(1), p), id="counts of another"),
        pytest.param("process", lambda f, x, slots, last, p: f(x, slots, last * 0 - 1, p), id="a token not counted"),
        pytest.param("admit", lambda f, a: a.sampling.changes_logits and f(a), id="wishes of the slot's last"),
        pytest.param("admit", lambda f, a: f(replace(a, num_output_tokens=0)), id="nothing drawn by who comes back"),
        pytest.param("admit", lambda f, a: f(_biased_beside(a)), id="biases of other columns"),
        pytest.param(
            "set_bitmasks", lambda f, masks: f({s: np.roll(m, 1) for s, m in masks.items()}), id="mask of another"
        ),
    ],
)
def test_planted_faults_show(method: str, change: Callable[..., Any]) -> None:
    def plant(rank: SimulatedRank) -> None:
        original = getattr(rank.shaper, method)
        setattr(rank.shaper, method, lambda *args: change(original, *args))

    assert play(PARAMS, SCRIPT, 2, plant)[0] != walk(PARAMS, SCRIPT)


def test_nothing_waits_for_the_host() -> None:
    comm, B, columns = Alone(), 4, 200_000
    with FakeTensorMode():  # refuses whatever would need a value on the host
        shaper = LogitsProcessor(B, columns, range(columns), EOS, torch.device("cpu"))
        logits, ids = torch.empty(B, columns), torch.empty(B, dtype=torch.int64)
        assert shaper.process(logits, ids, ids, ids).shape == (B, columns)
        shaper.record_logprobs(logits, ids, ids, comm)
    assert comm.calls == {"all_gather": 1} and comm.largest == B * WIDTH


def test_a_grammar_alone_copies_its_mask_and_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first token would wait for that, at each admission on each rank."""
    copied: list[int] = []
    monkeypatch.setattr(
        "helix.worker.logits_processor.to_device", lambda x, device: copied.append(x.numel()) or x.to(device)
    )
    processor = LogitsProcessor(SLOTS, 3200, range(3200), EOS, torch.device("cpu"))
    mask = np.arange(100, dtype=np.int32)
    for bias, wanted in (({}, [100, 1]), ({5: 1.0}, [3200, 100, 1])):
        sampling = SamplingParams(masked=True, logit_bias=bias)
        processor.admit(new_request(0, 1, NO_PAGES, 9, mask[:3], sampling=sampling, token_bitmask=mask))
        assert copied == wanted
        copied.clear()
