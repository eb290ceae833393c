"""process_logits: kernel and reference against a walk over tokens, and transformers' and vLLM's words on each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kernels.tokens.process_logits import ENDS, FORBIDDEN, IN_PROMPT, ONCE, LogitsState, process_logits
from kernels.tokens.reference import process_logits as reference

OPS = pytest.mark.parametrize("op", [process_logits, reference], ids=["kernel", "reference"])


@dataclass
class LogitsParams:
    """What one sequence wants, in a slot."""

    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    min_end_position: int = 0
    allowed: list[int] | None = None

    def shape(self, logits: list[float], position: int) -> list[float]:
        """fp64, token by token, from numbers in fp32."""
        counts, shaped = Counter(self.answer), []
        repetition, frequency, presence = torch.tensor([self.repetition, self.frequency, self.presence]).tolist()
        for token, raw in enumerate(logits):
            if math.isnan(raw) or raw == math.inf:
                shaped.append(raw)
                continue
            x = raw + float(torch.tensor(self.bias.get(token, 0.0)))
            if token in self.ends and position < self.min_end_position:
                x = min(x, FORBIDDEN)
            if token in self.prompt or counts[token]:
                x = x / repetition if x > 0 else x * repetition
            x -= frequency * counts[token]
            x -= presence * (counts[token] > 0)
            shaped.append(x if self.allowed is None or token in self.allowed else -math.inf)
        return shaped


def bits(allowed: list[int] | None, V: int) -> Tensor:
    words = [0xFFFFFFFF if allowed is None else 0] * -(-V // 32)
    for token in allowed or []:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


def tables(params_by_slot: dict[int, LogitsParams], slots: int, V: int, columns: range) -> LogitsState:
    """The state of `slots` slots, of which those without a wish hold what nobody may read."""
    n = len(columns)
    nan = torch.full((3, slots), torch.nan)
    bias, seen = torch.full((slots, n), torch.nan), torch.full((slots, n), -1, dtype=torch.int32)
    min_end_position, allowed = torch.full((slots,), 1 << 40), torch.zeros(slots, -(-V // 32), dtype=torch.int32)
    shaped = torch.zeros(slots, dtype=torch.bool)
    for slot, logits_params in params_by_slot.items():
        nan[:, slot] = torch.tensor([logits_params.repetition, logits_params.frequency, logits_params.presence])
        counts = Counter(logits_params.answer)
        bias[slot] = torch.tensor([logits_params.bias.get(t, 0.0) for t in columns])
        seen[slot] = torch.tensor(
            [
                IN_PROMPT * (t in logits_params.prompt) + ENDS * (t in logits_params.ends) + ONCE * counts[t]
                for t in columns
            ]
        )
        min_end_position[slot], allowed[slot], shaped[slot] = (
            logits_params.min_end_position,
            bits(logits_params.allowed, V),
            True,
        )
    return LogitsState(shaped, nan[0].clone(), nan[1].clone(), nan[2].clone(), min_end_position, bias, seen, allowed)


def shape(
    op: Callable[..., Tensor], logits: Tensor, params_by_slot: dict[int, LogitsParams], rows: list[int], position: int,
    device: torch.device, columns: range | None = None, last: list[int] | None = None,
    change: Callable[[LogitsState], LogitsState] = lambda shaping: shaping,
) -> tuple[Tensor, LogitsState]:  # fmt: skip
    """Shaped logits [N, V_local] of the sequences in slots `rows`, and what the state has become."""
    N, V = logits.shape
    columns = range(V) if columns is None else columns
    state = tables(params_by_slot, max(rows) + 2, V, columns)
    shaping = change(LogitsState(**{name: t.to(device) for name, t in vars(state).items()}))
    wide = torch.full((N, len(columns) + 3), torch.nan, device=device)  # rows lie apart
    wide[:, : len(columns)] = logits[:, columns.start : columns.stop]
    each = N // len(rows)
    positions = (position + torch.arange(each)).repeat(len(rows)).to(device)
    slots, last_tokens = (torch.tensor(x, device=device) for x in (rows, last or [-1] * len(rows)))
    out = op(wide[:, : len(columns)], shaping, slots, last_tokens, positions, columns.start)
    assert out.shape == (N, len(columns)) and out.dtype == torch.float32
    return out.cpu(), shaping


def make_logits(N: int, V: int, seed: int = 0) -> Tensor:
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(seed)) * 4
    logits[0, :4] = torch.tensor([0.0, -0.0, -math.inf, 1e-40])[: min(V, 4)]
    return logits


def random_logits_params(V: int) -> dict[int, LogitsParams]:
    return {
        4: LogitsParams(
            prompt=[1, V - 1], answer=[0, 0, 0, V // 2, V - 1], repetition=1.3, frequency=0.7, presence=-0.4
        ),
        0: LogitsParams(bias={0: 100.0, V // 3: -100.0, V - 1: 0.1}, ends=[V // 2, V - 1], min_end_position=41),
        2: LogitsParams(
            answer=[V - 1] * 5, repetition=0.6, allowed=[0, V // 2, V - 1], ends=[0], min_end_position=40, bias={0: 3.0}
        ),
    }


def expected(logits: Tensor, params_by_slot: dict[int, LogitsParams], rows: list[int], position: int) -> Tensor:
    """The walk's logits; rows of a sequence behind its first one stay as they are."""
    each = len(logits) // len(rows)
    wanted = logits.clone()
    for b, slot in enumerate(rows):
        if slot in params_by_slot:
            row = params_by_slot[slot].shape(logits[b * each].tolist(), position)
            wanted[b * each] = torch.tensor(row, dtype=torch.float64).float()
    return wanted


@OPS
@pytest.mark.parametrize("V", [1, 33, 1024, 2500])
@pytest.mark.parametrize("each", [1, 3])
def test_every_wish(op: Any, V: int, each: int, device: torch.device) -> None:
    """Bit for bit; slots in any order, others beside them, rows of drafts behind the first."""
    rows = [4, 1, 0, 2]
    logits = make_logits(len(rows) * each, V)
    got, _ = shape(op, logits, random_logits_params(V), rows, 40, device)
    assert torch.equal(got, expected(logits, random_logits_params(V), rows, 40))
    assert torch.equal(got[each].view(torch.int32), logits[each].view(torch.int32)), "slot 1 wants nothing"


@OPS
@pytest.mark.parametrize("cuts", [[0, 1000, 1000, 1033], [0, 500, 1033]])
def test_every_cut_of_the_vocabulary(op: Any, cuts: list[int], device: torch.device) -> None:
    V, rows = 1033, [2, 4, 0]
    logits = make_logits(3, V)
    parts = [
        shape(op, logits, random_logits_params(V), rows, 40, device, range(a, b), last=[V - 1, 0, 0])
        for a, b in pairwise(cuts)
    ]
    whole, state = shape(op, logits, random_logits_params(V), rows, 40, device, last=[V - 1, 0, 0])
    assert torch.equal(torch.cat([part for part, _ in parts], 1), whole)
    assert torch.equal(torch.cat([s.seen for _, s in parts], 1), state.seen)


@OPS
def test_the_last_token_counts_once(op: Any, device: torch.device) -> None:
    """It counts where something is wanted, in its own slot, before the logits are shaped."""
    V, rows = 40, [3, 1, 0]
    params_by_slot = {
        3: LogitsParams(answer=[7], frequency=1.0, presence=0.5),
        0: LogitsParams(prompt=[7], repetition=2.0),
    }
    logits = make_logits(3, V)
    before = tables(params_by_slot, 5, V, range(V)).seen
    got, state = shape(op, logits, params_by_slot, rows, 9, device, last=[7, 7, -1])
    params_by_slot[3].answer.append(7)
    assert torch.equal(got, expected(logits, params_by_slot, rows, 9))
    changed = (state.seen.cpu() != before).nonzero().tolist()
    assert changed == [[3, 7]] and int(state.seen[3, 7]) == 2 * ONCE


@OPS
def test_broken_rows_stay_broken(op: Any, device: torch.device) -> None:
    """Neither a mask nor a penalty hides what is no number, and where nothing may be drawn, all is -inf."""
    logits = make_logits(3, 8)
    logits[0, 3], logits[1, 5] = torch.nan, torch.inf
    params_by_slot = {
        s: LogitsParams(ends=[3, 5], min_end_position=99, allowed=[1], answer=[3, 5], repetition=9.0) for s in (0, 1)
    }
    params_by_slot[2] = LogitsParams(allowed=[])
    got, _ = shape(op, logits, params_by_slot, [0, 1, 2], 9, device)
    assert got[0].isnan().tolist() == [i == 3 for i in range(8)] and got[1, 5] == torch.inf
    assert (got[2] == -torch.inf).all()


@OPS
def test_tokens_that_end_give_way_only_to_others(op: Any, device: torch.device) -> None:
    """A row that may draw nothing else than what ends it draws that: no wish breaks a row."""
    logits_params = LogitsParams(
        ends=[4, 5], min_end_position=10, allowed=[4, 5], bias={5: 100.0}, answer=[5], repetition=100.0, frequency=2.0
    )
    logits = make_logits(1, 8, seed=1)
    early, _ = shape(op, logits, {0: logits_params}, [0], 9, device)
    assert early.isfinite().nonzero()[:, 1].tolist() == [4, 5] and (early[early.isfinite()] <= FORBIDDEN).all()
    late, _ = shape(op, logits, {0: logits_params}, [0], 10, device)
    assert late[0, 4] == logits[0, 4]


def test_planted_errors_show(device: torch.device) -> None:
    V, rows = 64, [4, 1, 0, 2]
    logits = make_logits(4, V)
    wanted = expected(logits, random_logits_params(V), rows, 40)
    changes: dict[str, Callable[[LogitsState], LogitsState]] = {
        "a count in the wrong slot": lambda s: replace(s, seen=s.seen.roll(1, 0)),
        "the mask of another": lambda s: replace(s, allowed=s.allowed.roll(2, 0)),
        "a bias one column off": lambda s: replace(s, bias=s.bias.roll(1, 1)),
        "the end allowed too early": lambda s: replace(s, min_end_position=s.min_end_position - 1),
        "a row that is left out": lambda s: replace(s, is_active=s.is_active & (torch.arange(6, device=device) != 2)),
        "penalties exchanged": lambda s: replace(s, presence=s.frequency, frequency=s.presence),
    }
    for name, change in changes.items():
        got, _ = shape(process_logits, logits, random_logits_params(V), rows, 40, device, change=change)
        assert not torch.equal(got, wanted), name


V, PROMPT, ANSWER = 50, [3, 3, 8], [8, 9, 9, 9, 49]
COUNTS = torch.bincount(torch.tensor(ANSWER), minlength=V)


def repetition(penalty: float) -> Any:
    return (
        LogitsParams(PROMPT, ANSWER, repetition=penalty),
        [*PROMPT, *ANSWER],
        RepetitionPenaltyLogitsProcessor(penalty),
    )


def min_tokens(drawn: int) -> Any:
    """An end that may come after five tokens, of which so many are drawn."""
    processor = MinNewTokensLengthLogitsProcessor(3, 5, [7, 49], device="cpu")
    return LogitsParams(ends=[7, 49], min_end_position=3 + 5), [0] * (3 + drawn), processor


def vllm_processor(ids: Tensor, logits: Tensor) -> Tensor:
    """logits -= frequency_penalties * output_bin_counts; logits -= presence_penalties * output_mask."""
    return (logits.double() - 0.5 * COUNTS - 0.25 * (COUNTS > 0)).float()


# One wish at a time, in fp32: a sequence's tokens, and what transformers or vLLM do with its logits.
OTHERS = {
    "repetition-1.3": repetition(1.3),
    "repetition-0.7": repetition(0.7),
    "bias": (LogitsParams(bias={0: -3.7, 49: 99.9}), [0], SequenceBiasLogitsProcessor({(0,): -3.7, (49,): 99.9})),
    **{f"least-{drawn}": min_tokens(drawn) for drawn in (0, 4, 5, 6)},
    "frequency-and-presence": (LogitsParams(PROMPT, ANSWER, frequency=0.5, presence=0.25), [0], vllm_processor),
}


@pytest.mark.parametrize("logits_params, ids, others", OTHERS.values(), ids=OTHERS)
def test_a_wish_is_that_of_others(
    logits_params: LogitsParams, ids: list[int], others: Callable[[Tensor, Tensor], Tensor]
) -> None:
    logits = make_logits(1, V)
    got = shape(reference, logits, {0: logits_params}, [0], len(ids), torch.device("cpu"))[0]
    got = torch.where(got == torch.tensor(FORBIDDEN), -torch.inf, got)
    assert torch.equal(got, others(torch.tensor([ids]), logits.clone()))
