"""The gated delta rule: kernels against the reference, and its chunks against its steps in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.recurrent import reference
from kernels.recurrent.gated_delta_prefill import gated_delta_prefill
from kernels.recurrent.gated_delta_step import gated_delta_step
from tests.pairwise import params


class Heads(NamedTuple):
    """Heads of a rank: of values, the first one's place in its group, the group, and widths of keys and values."""

    values: int
    first: int
    group: int
    key: int
    value: int

    @property
    def keys(self) -> int:
        return -(-(self.first + self.values) // self.group)

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.key + self.values * self.value


HEADS = [
    Heads(3, 0, 3, 16, 16), Heads(4, 1, 2, 12, 10), Heads(1, 2, 3, 128, 128), Heads(2, 0, 1, 20, 40),
    Heads(2, 0, 1, 10, 12), Heads(2, 1, 2, 5, 8),
]  # fmt: skip


def pair_shapes(shapes: list[Any]) -> list[Any]:
    """Shapes, heads and dtypes; bf16, which Triton's interpreter cuts off where it should round, is for GPUs."""
    return [
        *params([*product(shapes, HEADS, (torch.float32, torch.float16))]),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in product(shapes, HEADS, (torch.bfloat16,))),
    ]


def parameters(h: Heads, conv: int, dtype: torch.dtype, device: torch.device) -> GatedDelta:
    gen = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    weights = random(conv, h.channels, dtype=dtype)
    rates = random(h.values), random(h.values)
    return GatedDelta(weights, *rates, random(h.value, dtype=dtype), 1e-6, h.keys, h.group, h.first)


def make_state(h: Heads, slots: int, most: int, conv: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
    """Memory that nobody wrote is NaN."""
    nan = torch.nan
    return DeltaState(
        torch.full((slots, h.values, h.key, h.value), nan, device=device),
        torch.full((slots, most + conv - 1, h.channels), nan, dtype=dtype, device=device),
        torch.full((slots, most, h.values, h.key + h.value), nan, device=device),
        torch.full((slots, most, h.values), nan, device=device),
        torch.full((slots,), 1 << 40, dtype=torch.int64, device=device),
    )


def inputs(h: Heads, N: int, dtype: torch.dtype, device: torch.device, seed: int) -> DeltaInput:
    """Rows of one wider matrix, as a projection makes them."""
    gen = torch.Generator().manual_seed(seed)
    widths = h.channels, h.values * h.value, 2 * h.values
    qkv, z, gates = torch.randn(N, sum(widths) + 3, generator=gen).to(device, dtype)[:, :-3].split(widths, 1)
    return DeltaInput(qkv, gates, z)


def copy_of(state_cache: DeltaState) -> DeltaState:
    return DeltaState(*(t.clone() for t in vars(state_cache).values()))


@dataclass
class Batch:
    """Rows that follow behind positions of sequences, and what was kept of these."""

    p: GatedDelta
    state_cache: DeltaState
    slots: Tensor
    x: DeltaInput
    at: Tensor
    cu_q: Tensor
    live: Tensor

    @classmethod
    def of(
        cls, h: Heads, positions: list[int], lengths: list[int], device: torch.device, *,
        counts: list[int] | None = None, most: int = 1, conv: int = 4, dtype: torch.dtype = torch.float32,
    ) -> Batch:  # fmt: skip
        """States and rings are in slots from 2 on; so many rows of the last step, at `most`, were accepted."""
        p, before, n = parameters(h, conv, dtype, device), conv - 1, len(positions)
        state_cache, slots = make_state(h, n + 3, most, conv, dtype, device), torch.arange(2, 2 + n, device=device)
        state_cache.state[slots] = torch.randn(
            state_cache.state[slots].shape, generator=torch.Generator().manual_seed(3)
        ).to(device)
        for slot, position, count in zip(slots.tolist(), positions, counts or [0] * n, strict=True):
            begin = max(0, position - count - before)
            rows = inputs(h, position - begin, dtype, device, slot)
            reference.remember(state_cache, slot, begin, rows.qkv)
            state_cache.accepted[slot] = count
            if count:
                behind = torch.nn.functional.pad(rows.qkv, (0, 0, count + before - len(rows.qkv), 0))
                q, k, v, g, beta = reference.heads(reference.convolve(behind, p), rows.gates[-count:], p)
                deltas = reference.recurrent(state_cache.state[slot], q, k, v, g, beta)[1]
                state_cache.rows[slot, :count], state_cache.decays[slot, :count] = (
                    torch.cat((k, deltas), -1),
                    g.cumsum(0),
                )
        x, live = inputs(h, sum(lengths), dtype, device, 9), torch.ones(sum(lengths), dtype=torch.bool, device=device)
        at = torch.cat([torch.arange(b, b + n) for b, n in zip(positions, lengths, strict=True)]).to(device)
        return cls(p, state_cache, slots, x, at, torch.tensor([0, *lengths]).cumsum(0).int().to(device), live)

    def step(self, function: Any, state_cache: DeltaState, rows: slice = slice(None)) -> Tensor:
        x = DeltaInput(self.x.qkv[rows], self.x.gates[rows], self.x.z[rows])
        found: Tensor = function(x, self.p, state_cache, self.slots, self.at[rows], self.live[rows])
        assert found.dtype == self.x.z.dtype
        return found

    def prefill(self, function: Any, state_cache: DeltaState) -> Tensor:
        found: Tensor = function(self.x, self.p, state_cache, self.slots, self.at, self.cu_q)
        assert found.dtype == self.x.z.dtype
        return found


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Numbers of a few units: fp32 sums of 128 terms in another order; an output is rounded once to its dtype."""
    tolerance = {torch.float32: 5e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}[dtype]
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


def off(got: Tensor, wanted: Tensor) -> float:
    """Error relative to the size of all numbers; it is that of one rounding of q, k, v, T, w, u and d, times a few.

    Single numbers are no measure: an output is divided by the size of its head's sums, which may be small. A row that
    is wrong is an error of more than a sixteenth of several hundred rows.
    """
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def check_steps(batch: Batch, rows: int) -> None:
    """Two steps, the second from what the first has kept."""
    state_cache, dtype = batch.state_cache, batch.x.z.dtype
    for _ in range(2):
        wanted_state = copy_of(state_cache)
        wanted = batch.step(reference.gated_delta_step, wanted_state)
        close(batch.step(gated_delta_step, state_cache), wanted, dtype)
        for name in ("state", "rows", "decays"):
            close(getattr(state_cache, name), getattr(wanted_state, name))
        torch.testing.assert_close(state_cache.qkv, wanted_state.qkv, atol=0, rtol=0, equal_nan=True)
        batch.at, state_cache.accepted[batch.slots] = batch.at + rows, rows


@pytest.mark.parametrize("shape, h, dtype", pair_shapes([(1, 4), (3, 4), (2, 3)]))
def test_step(shape: tuple[int, int], h: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """At the beginning of sequences and over the ring's end; sequences without accepted rows; one that pauses."""
    rows, conv = shape
    batch = Batch.of(
        h, [1, 7, 40, 2, 13], [rows] * 5, device, counts=[0, 1, 3, 2, 2], most=3, conv=conv, dtype=dtype
    )  # fmt: skip
    batch.live[4 * rows :], batch.x.qkv[4 * rows :] = False, torch.nan
    check_steps(batch, rows)


@pytest.mark.parametrize(
    "rows, most, h",
    [
        (8, 8, HEADS[1]),
        (11, 19, HEADS[2]),
        (19, 19, HEADS[1]),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in product((8, 11, 19), (19,), HEADS[1:3])),
    ],
)
def test_steps_of_many_rows(rows: int, most: int, h: Heads, device: torch.device) -> None:
    """Several systems of 8 rows, the last one with fewer, behind as many accepted ones."""
    counts = [0, 3, most, min(9, most)]
    check_steps(Batch.of(h, [1, 7, 40, 13], [rows] * 4, device, counts=counts, most=most), rows)


def test_a_verified_row_is_that_of_a_plain_step(device: torch.device) -> None:
    """Three steps of one row, and one of three, but for rounding in fp32; behind one more it is another."""
    batch = Batch.of(HEADS[0], [9], [3], device, counts=[2], most=3)
    alone = copy_of(batch.state_cache)
    together = batch.step(gated_delta_step, batch.state_cache)
    for i in range(3):
        row = slice(i, i + 1)
        close(batch.step(gated_delta_step, alone, row), together[row])
        alone.accepted[batch.slots] = 1
    with pytest.raises(AssertionError):
        close(batch.step(gated_delta_step, alone, row), together[row])


@pytest.mark.parametrize("h", HEADS[:3])
def test_drafts_leave_the_state(h: Heads, device: torch.device) -> None:
    """Draft rows one by one are those of one step; then that step finds the state and the ring as without drafts."""
    batch = Batch.of(h, [9, 1, 40], [3] * 3, device, counts=[2, 0, 3], most=3)
    alone, plain, first = copy_of(batch.state_cache), copy_of(batch.state_cache), torch.arange(0, 9, 3, device=device)
    wanted = batch.step(gated_delta_step, plain)
    for drafted in range(3):
        rows = first + drafted
        x = DeltaInput(*(t[rows] for t in vars(batch.x).values()))
        live = torch.ones(3, dtype=torch.bool, device=device)
        found = gated_delta_step(x, batch.p, alone, batch.slots, batch.at[rows], live, drafted)
        close(found, wanted[rows])
        assert torch.equal(alone.state.nan_to_num(), plain.state.nan_to_num()), drafted
        alone.accepted[batch.slots] = 0
    close(alone.decays, plain.decays)
    assert torch.equal(batch.step(gated_delta_step, alone), wanted) and torch.equal(
        alone.rows.nan_to_num(), plain.rows.nan_to_num()
    )


@pytest.mark.parametrize("mistake", ["count", "conv", "place"])
def test_mistakes_are_caught(mistake: str, device: torch.device) -> None:
    """An accepted row too few, a row of the convolution lost, value heads with another's key."""
    batch = Batch.of(HEADS[1], [11, 30], [1, 1], device, counts=[2, 1], most=3)
    wanted = batch.step(reference.gated_delta_step, copy_of(batch.state_cache))
    if mistake == "count":
        batch.state_cache.accepted[batch.slots] -= 1
    elif mistake == "conv":
        batch.state_cache.qkv[batch.slots[0], 8 % batch.state_cache.qkv.shape[1]] = 0
    else:
        batch.p = replace(batch.p, first=0)
    with pytest.raises(AssertionError):
        close(batch.step(gated_delta_step, batch.state_cache), wanted)


@pytest.mark.parametrize("conv, h, dtype", pair_shapes([4, 3]))
def test_prefill(conv: int, h: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """Chunks below and above 64 rows, of fewer rows than the convolution reads, at the beginning and behind others."""
    batch = Batch.of(h, [0, 1, 0, 70, 2], [1, 2, 64, 150, 65], device, conv=conv, dtype=dtype)
    state_cache, wanted_state = batch.state_cache, copy_of(batch.state_cache)
    wanted, found = (
        batch.prefill(reference.gated_delta_prefill, wanted_state),
        batch.prefill(gated_delta_prefill, state_cache),
    )
    for ours, theirs in ((found, wanted), (state_cache.state[batch.slots], wanted_state.state[batch.slots])):
        assert off(ours, theirs) < {torch.float32: 2**-16, torch.float16: 2**-8, torch.bfloat16: 2**-5}[dtype]
    assert state_cache.state.isnan().flatten(1).all(1).tolist() == [True, True, *[False] * 5, True]
    torch.testing.assert_close(state_cache.qkv, wanted_state.qkv, atol=0, rtol=0, equal_nan=True)
    if dtype == torch.float32:  # a planted error: no state is handed over
        batch.state_cache.state.zero_()
        assert off(batch.prefill(gated_delta_prefill, batch.state_cache), wanted) > 2**-5


def test_nothing_is_kept_of_padding(device: torch.device) -> None:
    """A sequence without a slot behind another, and an empty one: the other's numbers stay as they are."""
    alone = Batch.of(HEADS[1], [70], [70], device)
    slots, cu_q = torch.tensor([2, -1, -1]).to(device), torch.tensor([0, 70, 128, 128]).int().to(device)
    others = inputs(HEADS[1], 58, torch.float32, device, 8)
    x = DeltaInput(*(torch.cat(parts) for parts in zip(vars(alone.x).values(), vars(others).values(), strict=True)))
    at = torch.cat((alone.at, torch.zeros(58, dtype=torch.int64, device=device)))
    padded = replace(alone, x=x, at=at, slots=slots, cu_q=cu_q)
    for function, bitwise in ((reference.gated_delta_prefill, False), (gated_delta_prefill, True)):
        mine, theirs = copy_of(alone.state_cache), copy_of(alone.state_cache)
        found, wanted = padded.prefill(function, mine), alone.prefill(function, theirs)
        assert found.isfinite().all()
        for a, b in ((found[:70], wanted), (mine.state, theirs.state), (mine.qkv, theirs.qkv)):
            tolerance = 0.0 if bitwise else 1e-5  # sums of fp32 over 70 rows, in another order where there are others
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_hard_systems(device: torch.device) -> None:
    """Keys that are nearly the same, gates near 1 and no decay: the powers of such a system's matrix are huge."""
    batch = Batch.of(Heads(1, 0, 1, 32, 32), [0], [128], device, conv=2)
    batch.p = replace(batch.p, a_log=torch.full((1,), -9.0, device=device))
    batch.p.conv.copy_(torch.tensor([[0.0], [1.0]]))
    batch.x.qkv[:, 32:64] = 3 + 0.1 * batch.x.qkv[:, 32:64]
    batch.x.gates[:, 0] = 9
    wanted = batch.prefill(reference.gated_delta_prefill, copy_of(batch.state_cache))
    torch.testing.assert_close(batch.prefill(gated_delta_prefill, batch.state_cache), wanted, atol=1e-3, rtol=1e-3)


def test_chunks_are_steps(device: torch.device) -> None:
    """In float64, with a state handed over; keys that are nearly the same and gates near 1 are hard for a chunk."""
    gen = torch.Generator().manual_seed(2)
    n, V, dk, dv = 150, 2, 16, 12
    q, k, v = (torch.randn(n, V, width, generator=gen, dtype=torch.float64) for width in (dk, dk, dv))
    k = torch.nn.functional.normalize(k * 0.1 + 1.0, dim=-1)
    g, beta = -0.01 * torch.rand(n, V, generator=gen).double(), 1 - 0.01 * torch.rand(n, V, generator=gen).double()
    state = torch.randn(V, dk, dv, generator=gen, dtype=torch.float64)
    rows = q, k, v, g, beta
    out, deltas, after = reference.recurrent(state, *rows)
    first = reference.chunked(state, *(t[:70] for t in rows))
    second = reference.chunked(first[1], *(t[70:] for t in rows))
    torch.testing.assert_close(torch.cat((first[0], second[0])), out, atol=1e-9, rtol=0)
    torch.testing.assert_close(second[1], after, atol=1e-9, rtol=0)
    state_cache = torch.cat((k, deltas), -1)
    torch.testing.assert_close(reference.with_rows(state, state_cache, g.cumsum(0)), after, atol=1e-9, rtol=0)
