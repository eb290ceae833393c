"""The gated delta rule: kernels against the reference, and its chunks against its steps in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.recurrent import reference
from kernels.recurrent.gated_delta_prefill import gated_delta_prefill
from kernels.recurrent.gated_delta_step import gated_delta_step

# Triton's interpreter cuts bf16 off where it should round: bf16 is for GPUs.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


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


def parameters(h: Heads, conv: int, dtype: torch.dtype, device: torch.device) -> GatedDelta:
    gen = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    weights = random(conv, h.channels, dtype=dtype)
    rates = random(h.values), random(h.values)
    return GatedDelta(weights, *rates, random(h.value, dtype=dtype), 1e-6, h.keys, h.group, h.first)


def kept_of(h: Heads, slots: int, most: int, conv: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
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


def copy_of(kept: DeltaState) -> DeltaState:
    return DeltaState(*(t.clone() for t in vars(kept).values()))


def begun(
    h: Heads,
    p: GatedDelta,
    positions: list[int],
    counts: list[int],
    most: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DeltaState, Tensor]:
    """States and rings of sequences, in slots from 2 on, of which so many rows of the last step were accepted."""
    before = len(p.conv) - 1
    kept = kept_of(h, len(positions) + 3, most, len(p.conv), dtype, device)
    slots = torch.arange(2, 2 + len(positions), device=device)
    gen = torch.Generator().manual_seed(3)
    kept.state[slots] = torch.randn(kept.state[slots].shape, generator=gen).to(device)
    for slot, position, count in zip(slots.tolist(), positions, counts, strict=True):
        begin = max(0, position - count - before)
        rows = inputs(h, position - begin, dtype, device, slot)
        reference.remember(kept, slot, begin, rows.qkv)
        kept.accepted[slot] = count
        if count:
            behind = torch.nn.functional.pad(rows.qkv, (0, 0, count + before - len(rows.qkv), 0))
            q, k, v, g, beta = reference.heads(reference.convolve(behind, p), rows.gates[-count:], p)
            deltas = reference.recurrent(kept.state[slot], q, k, v, g, beta)[1]
            kept.rows[slot, :count], kept.decays[slot, :count] = torch.cat((k, deltas), -1), g.cumsum(0)
    return kept, slots


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Numbers of a few units: fp32 sums of 128 terms in another order; an output is rounded once to its dtype."""
    tolerance = {torch.float32: 5e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}[dtype]
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


def off(got: Tensor, wanted: Tensor) -> float:
    """Error relative to the size of all numbers; it is that of one rounding of q, k, v, T, w, u and d, times a few.

    Single numbers are no measure: an output is divided by the size of its head's sums, which may be small. A row that
    is wrong is an error of more than a sixteenth of several hundred rows.
    """
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", HEADS, ids=str)
@pytest.mark.parametrize("rows, conv", [(1, 4), (3, 4), (2, 3)])
def test_step(h: Heads, rows: int, conv: int, dtype: torch.dtype, device: torch.device) -> None:
    """At the beginning of sequences and over the ring's end; sequences without accepted rows; one that pauses."""
    positions, counts, most = [1, 7, 40, 2, 13], [0, 1, 3, 2, 2], 3
    p = parameters(h, conv, dtype, device)
    kept, slots = begun(h, p, positions, counts, most, dtype, device)
    x = inputs(h, rows * len(slots), dtype, device, 9)
    live = torch.ones(len(x.z), dtype=torch.bool, device=device)
    live[4 * rows :] = False
    x.qkv[4 * rows :] = torch.nan
    at = (torch.tensor(positions)[:, None] + torch.arange(rows)).flatten().to(device)
    for _ in range(2):  # the second time from what the first has kept
        wanted_kept = copy_of(kept)
        wanted = reference.gated_delta_step(x, p, wanted_kept, slots, at, live)
        found = gated_delta_step(x, p, kept, slots, at, live)
        assert found.dtype == dtype
        close(found, wanted, dtype)
        for name in ("state", "rows", "decays"):
            close(getattr(kept, name), getattr(wanted_kept, name), torch.float32)
        torch.testing.assert_close(kept.qkv, wanted_kept.qkv, atol=0, rtol=0, equal_nan=True)
        at, kept.accepted[slots] = at + rows, rows


@pytest.mark.parametrize("h", [HEADS[1], HEADS[2]], ids=str)
@pytest.mark.parametrize("rows, most", [(8, 8), (11, 19), (19, 19)])
def test_steps_of_many_rows(h: Heads, rows: int, most: int, device: torch.device) -> None:
    """Several systems of 8 rows, the last one with fewer, behind as many accepted ones."""
    dtype, counts = torch.float32, [0, 3, most, 9 if most > 8 else 8]
    p = parameters(h, 4, dtype, device)
    kept, slots = begun(h, p, [1, 7, 40, 13], counts, most, dtype, device)
    x, live = inputs(h, rows * 4, dtype, device, 9), torch.ones(rows * 4, dtype=torch.bool, device=device)
    at = (torch.tensor([1, 7, 40, 13])[:, None] + torch.arange(rows)).flatten().to(device)
    wanted_kept = copy_of(kept)
    for _ in range(2):  # the second time from what the first has kept
        wanted = reference.gated_delta_step(x, p, wanted_kept, slots, at, live)
        close(gated_delta_step(x, p, kept, slots, at, live), wanted, dtype)
        for name in ("state", "rows", "decays"):
            close(getattr(kept, name), getattr(wanted_kept, name), dtype)
        for of in (kept, wanted_kept):
            of.accepted[slots] = rows
        at = at + rows


def test_a_verified_row_is_that_of_a_plain_step(device: torch.device) -> None:
    """Three steps of one row, and one of three, but for rounding in fp32; behind one more it is another."""
    h = HEADS[0]
    p = parameters(h, 4, torch.float32, device)
    kept, slots = begun(h, p, [9], [2], 3, torch.float32, device)
    x = inputs(h, 3, torch.float32, device, 9)
    alone, live = copy_of(kept), torch.ones(3, dtype=torch.bool, device=device)
    at = torch.arange(9, 12, device=device)
    together = gated_delta_step(x, p, kept, slots, at, live)
    for i in range(3):
        row = slice(i, i + 1)
        one = DeltaInput(x.qkv[row], x.gates[row], x.z[row])
        close(gated_delta_step(one, p, alone, slots, at[row], live[row]), together[row], torch.float32)
        alone.accepted[slots] = 1
    with pytest.raises(AssertionError):
        close(gated_delta_step(one, p, alone, slots, at[row], live[row]), together[row], torch.float32)


@pytest.mark.parametrize("mistake", ["count", "conv", "place"])
def test_mistakes_are_caught(mistake: str, device: torch.device) -> None:
    """An accepted row too few, a row of the convolution lost, value heads with another's key."""
    h = HEADS[1]
    p = parameters(h, 4, torch.float32, device)
    kept, slots = begun(h, p, [11, 30], [2, 1], 3, torch.float32, device)
    x, at, live = inputs(h, 2, torch.float32, device, 9), torch.tensor([11, 30], device=device), slots > 0
    wanted = reference.gated_delta_step(x, p, copy_of(kept), slots, at, live)
    if mistake == "count":
        kept.accepted[slots] -= 1
    elif mistake == "conv":
        kept.qkv[slots[0], 8 % kept.qkv.shape[1]] = 0
    else:
        p = replace(p, first=0)
    with pytest.raises(AssertionError):
        close(gated_delta_step(x, p, kept, slots, at, live), wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", HEADS, ids=str)
@pytest.mark.parametrize("conv", [4, 3])
def test_prefill(h: Heads, conv: int, dtype: torch.dtype, device: torch.device) -> None:
    """Chunks below and above 64 rows, of fewer rows than the convolution reads, at the beginning and behind others."""
    lengths, positions = [1, 2, 64, 150, 65], [0, 1, 0, 70, 2]
    p = parameters(h, conv, dtype, device)
    kept, slots = begun(h, p, positions, [0] * 5, 1, dtype, device)
    x = inputs(h, sum(lengths), dtype, device, 9)
    cu_q = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    at = torch.cat([torch.arange(b, b + n) for b, n in zip(positions, lengths, strict=True)]).to(device)
    wanted_kept = copy_of(kept)
    wanted = reference.gated_delta_prefill(x, p, wanted_kept, slots, at, cu_q)
    found = gated_delta_prefill(x, p, kept, slots, at, cu_q)
    assert found.dtype == dtype
    for ours, theirs in ((found, wanted), (kept.state[slots], wanted_kept.state[slots])):
        assert off(ours, theirs) < {torch.float32: 2**-16, torch.float16: 2**-8, torch.bfloat16: 2**-5}[dtype]
    assert kept.state.isnan().flatten(1).all(1).tolist() == [True, True, *[False] * 5, True]
    torch.testing.assert_close(kept.qkv, wanted_kept.qkv, atol=0, rtol=0, equal_nan=True)


def test_nothing_is_kept_of_padding(device: torch.device) -> None:
    """A sequence without a slot behind another, and an empty one: the other's numbers stay as they are."""
    h = HEADS[1]
    p = parameters(h, 4, torch.float32, device)
    kept, slots = begun(h, p, [70], [0], 1, torch.float32, device)
    alone, x = copy_of(kept), inputs(h, 128, torch.float32, device, 9)
    at = torch.cat((torch.arange(70, 140), torch.zeros(58, dtype=torch.int64))).to(device)
    padded, cu_q = torch.tensor([int(slots), -1, -1]).to(device), torch.tensor([0, 70, 128, 128]).int().to(device)
    for run, bitwise in ((reference.gated_delta_prefill, False), (gated_delta_prefill, True)):
        mine, others = copy_of(kept), copy_of(alone)
        found = run(x, p, mine, padded, at, cu_q)
        assert found.isfinite().all()
        first = DeltaInput(x.qkv[:70], x.gates[:70], x.z[:70])
        wanted = run(first, p, others, slots, at, cu_q[:2])
        for ours, theirs in ((found[:70], wanted), (mine.state, others.state), (mine.qkv, others.qkv)):
            tolerance = 0.0 if bitwise else 1e-5  # sums of fp32 over 70 rows, in another order where there are others
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_hard_systems(device: torch.device) -> None:
    """Keys that are nearly the same, gates near 1 and no decay: the powers of such a system's matrix are huge."""
    h = Heads(1, 0, 1, 32, 32)
    p = replace(parameters(h, 2, torch.float32, device), a_log=torch.full((1,), -9.0, device=device))
    p.conv.copy_(torch.tensor([[0.0], [1.0]]))
    kept, slots = begun(h, p, [0], [0], 1, torch.float32, device)
    x = inputs(h, 128, torch.float32, device, 9)
    x.qkv[:, 32:64] = 3 + 0.1 * x.qkv[:, 32:64]
    x.gates[:, 0] = 9
    at, cu_q = torch.arange(128, device=device), torch.tensor([0, 128], device=device).int()
    wanted = reference.gated_delta_prefill(x, p, copy_of(kept), slots, at, cu_q)
    torch.testing.assert_close(gated_delta_prefill(x, p, kept, slots, at, cu_q), wanted, atol=1e-3, rtol=1e-3)


def test_a_state_that_is_not_handed_over_is_caught(device: torch.device) -> None:
    h = HEADS[0]
    p = parameters(h, 4, torch.float32, device)
    kept, slots = begun(h, p, [70], [0], 1, torch.float32, device)
    x, at = inputs(h, 70, torch.float32, device, 9), torch.arange(70, 140, device=device)
    cu_q = torch.tensor([0, 70], device=device).int()
    wanted = reference.gated_delta_prefill(x, p, copy_of(kept), slots, at, cu_q)
    kept.state.zero_()
    assert off(gated_delta_prefill(x, p, kept, slots, at, cu_q), wanted) > 2**-5


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
    kept = torch.cat((k, deltas), -1)
    torch.testing.assert_close(reference.with_rows(state, kept, g.cumsum(0)), after, atol=1e-9, rtol=0)
