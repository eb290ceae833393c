"""The kernels between GPUs, with ranks that share one device: each phase of a collective runs for all in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder as BUILDER

from comm.partial import PartialProjection, PartialSum
from kernels.attention.reference import merge_states
from kernels.moe import experts_sm90
from kernels.moe.experts import RoutedExperts
from kernels.peers.all_gather import SLICE_WORDS, all_gather
from kernels.peers.exchange import GROUP_RANK_OFFSET
from kernels.peers.ll_protocol import SumTarget
from kernels.peers.reduce_scatter import reduce_scatter
from kernels.scaled import Matrix, quantize_fp8
from tests.kernels.peers import PIECES, Exchange, SimulatedRanks, Sums, check_sums

# Triton's interpreter cuts bf16 off where it should round: bf16 is for GPUs.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def exchanged(ranks: Exchange, outs: list[Tensor], lses: list[Tensor]) -> list[Tensor]:
    for push in (True, False):
        got = [
            ranks.run(r, parts, parts[0], push=push, wait=not push)
            for r, parts in enumerate(zip(outs, lses, strict=True))
        ]
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares, N, D", [([2, 2], 3, 16), ([2, 2, 2, 1], 1, 6), ([1, 0, 0], 5, 32), ([3, 3], 2, 96)])
def test_exchange(shares: list[int], N: int, D: int, dtype: torch.dtype, device: torch.device) -> None:
    W, heads, ranks = len(shares), sum(shares), Exchange(shares, device)
    generator = torch.Generator().manual_seed(0)
    for message in range(4):  # two tags take turns: the third and fourth overwrite the first two
        outs = [torch.randn(N, heads, D, generator=generator).to(device, dtype) for _ in range(W)]
        lses = [torch.randn(N, heads, generator=generator).to(device) for _ in range(W)]
        if message == 1:  # an empty shard's output counts for nothing
            outs[0][:] = torch.nan
            lses[0][:] = -torch.inf
        if message == 2:
            for lse in lses:
                lse[0] = -torch.inf
        wanted, _ = merge_states(torch.stack(outs), torch.stack(lses), out=None, out_lse=None)
        got = torch.cat(exchanged(ranks, outs, lses), 1)
        # Rounded once to the dtype from fp32 sums of W terms of size 1, in another order than the reference's.
        tolerance = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
    assert ranks.timeouts() == [0] * W


def test_a_rank_that_does_not_come_is_named(device: torch.device) -> None:
    parts, ranks = (torch.ones(2, 3, 4, device=device), torch.zeros(2, 3, device=device)), Exchange([1, 1, 1], device)
    exchanged(ranks, *([part] * 3 for part in parts))
    for r in (0, 1):  # rank 2 sends nothing
        ranks.run(r, parts, parts[0], push=True, wait=False)
    result = ranks.run(0, parts, parts[0], push=False, wait=True)
    assert ranks.timeouts() == [GROUP_RANK_OFFSET + 3, 0, 0]
    assert result.isnan().all(), "what came of two ranks of three looks like an answer"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["one shot", "two shots"])
def test_a_sum_without_a_rank_is_none(algorithm: str, dtype: torch.dtype, device: torch.device) -> None:
    """Neither on the rank that gave up nor, of sums that it owns, on the others."""
    ranks = Sums(algorithm, 2, device)
    x, weight = torch.ones(2, 40, dtype=dtype, device=device), torch.ones(40, dtype=dtype, device=device)
    for _ in range(2):
        assert all((total == 2).all() for _, total in ranks.run_phases([x, x], None, weight))
    ((normed, total),) = ranks.run_phases([x], None, weight)
    assert ranks.timeouts() == [2, 0] and normed.isnan().all() and total.isnan().all()


def run_alone(collective: str, spins: int, before: int, device: torch.device) -> tuple[Tensor, int]:
    """What rank 0 of two gets where the other does not come, and its status; `before`: its status until then."""
    x = torch.ones(2, 2, 4, device=device)
    ranks: SimulatedRanks
    if collective == "exchange":
        ranks = Exchange([1, 1], device, spins)
    elif collective in ("gather", "scatter"):
        ranks = SimulatedRanks(2, 4 * PIECES * SLICE_WORDS, device, spins)
    else:
        size = 64 if collective == "long" else SLICE_WORDS
        ranks = Sums(collective, 2, device, spins, pieces=2 if collective == "long" else PIECES, size=size)
    ranks.status[0].fill_(before)
    if isinstance(ranks, Exchange):
        got = ranks.run(0, (x[:1], x[:1, ..., 0]), x[:1])
    elif isinstance(ranks, Sums):
        got = ranks.run(0, x[0], None, x[0, 0])[1]
    else:
        op = all_gather if collective == "gather" else reduce_scatter
        got = op(x, *ranks.given(0), rank=0, pieces=PIECES, spins=spins)
    return got, ranks.timeouts()[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks are counted by Triton's interpreter")
@pytest.mark.parametrize("collective", ["exchange", "gather", "scatter", "one shot", "two shots", "rows", "long"])
def test_a_wait_in_vain_ends_and_the_next_is_short(
    collective: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after so many looks, as NaN and with a status; from then on a look has to do."""
    looks = []
    load = BUILDER.create_masked_load

    def counted(*args: Any) -> Any:
        looks.append(args[-1])  # whether it is a look at a box
        return load(*args)

    monkeypatch.setattr(BUILDER, "create_masked_load", counted)
    found = []
    for spins, before in ((7, 0), (0, 0), (7, 2)):
        looks.clear()
        missing, status = run_alone(collective, spins, before, device)
        found.append(sum(looks))
        assert missing.isnan().any() and status != 0
    patient, once, broken = found
    assert patient >= once + 7 and broken == once


def test_a_nan_lse_surfaces(device: torch.device) -> None:
    outs = [torch.ones(1, 2, 4, device=device)] * 2
    lses = [torch.tensor([[0.0, torch.nan]], device=device), torch.zeros(1, 2, device=device)]
    first, second = exchanged(Exchange([1, 1], device), outs, lses)
    assert (first == 1).all() and second.isnan().all()


def random_tensors(dtype: torch.dtype, device: torch.device, power: float = 0.0) -> Callable[..., Tensor]:
    """Numbers of size 1, or smaller by a power of the number of columns."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).div(shape[-1] ** power).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "algorithm, W, N, H",
    [
        *product(["one shot", "two shots"], [2], [3], [40]), *product(["one shot", "two shots"], [4], [5], [64]),
        *product(["one shot", "two shots"], [3], [1], [6]),
        ("rows", 2, 3, 40), ("rows", 4, 8, 64), ("rows", 3, 1, 6), ("rows", 8, 23, 2050),
    ],
)  # fmt: skip
def test_sums(algorithm: str, W: int, N: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row is one slice, so that no program of a rank waits for another; by rows, other widths from turn to turn."""
    ranks = Sums(algorithm, W, device, pieces=24, size=2050) if algorithm == "rows" else Sums(algorithm, W, device)
    random = random_tensors(dtype, device)
    for message in range(4):
        rows, width = (max(1, N // 2), max(2, H // 4 * 2)) if algorithm == "rows" and message % 2 else (N, H)
        weight, parts = random(width), random(W, rows, width)
        residual = random(rows, width) if message else None
        check_sums(ranks.run_phases([*parts], residual, weight), parts, residual, weight, terms=8 if W > 4 else 4)
    assert ranks.timeouts() == [0] * W


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("W, N, H", [(2, 31, 3584), (3, 20, 510), (4, 23, 8192), (8, 64, 130)])
def test_sums_of_long_chunks(W: int, N: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
    """Ranks on streams of one GPU, where all programs have a place at once; boxes are used again and again."""
    ranks = Sums("long", W, device, spins=1 << 22, pieces=2 * W, size=32 << 10)
    streams = [torch.cuda.Stream() for _ in range(W)]
    random = random_tensors(dtype, device)
    weight = random(H)
    for message in range(4):
        parts = random(W, N if message % 2 == 0 else N // 2, H)
        residual = random(*parts.shape[1:]) if message else None
        own = [part.clone() for part in parts]  # aligned alike: no rank compiles a kernel while another waits for it
        got = []
        torch.cuda.synchronize()
        for r, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append(ranks.run(r, own[r], residual, weight))
        torch.cuda.synchronize()
        check_sums(got, parts, residual, weight, terms=8)
    assert ranks.timeouts() == [0] * W


def check_what_is_sent(summands: list[PartialSum], two_shot: bool, device: torch.device) -> None:
    """Boxes after each rank's `send` hold what they hold after the first phase of a sum of what `make` gives."""
    W, size, pieces = len(summands), 128, 512
    algorithm = "two shots" if two_shot else "one shot"
    two, one = (Sums(algorithm, W, device, pieces=pieces, size=size) for _ in range(2))
    rows = summands[0].compute()
    for r, summand in enumerate(summands):
        assert summand.can_push(two_shot)
        summand.push(SumTarget(one.peers, one.counts[r][0], r, pieces, size, two_shot))
        two.run(r, summand.compute(), None, torch.ones_like(rows[0]), phases=1)
    words = -(-rows.shape[1] * rows.itemsize // 4)
    tags = sum(int((boxes >> 32).sum()) for boxes in two.ll_buffers)
    assert tags == W * len(rows) * words * (1 if two_shot else W)  # all of the first turn
    for sent, wanted in zip(one.ll_buffers, two.ll_buffers, strict=True):
        assert torch.equal(sent, wanted)


def projections(
    W: int, N: int, H: int, K: int, biased: bool, dtype: torch.dtype, device: torch.device, few: bool = False
) -> list[PartialSum]:
    """Creates projections of W ranks; `few`: of weights in e4m3."""
    random = random_tensors(dtype, device, 0.5)

    def weight() -> Matrix:
        return quantize_fp8(random(H, K)) if few else random(H, K)

    return [PartialProjection(random(N, K), weight(), random(H) if biased else None) for _ in range(W)]


def experts(
    W: int, N: int, k: int, E: int, H: int, F: int, addend: bool, dtype: torch.dtype, device: torch.device,
    on_hopper: bool = False,
) -> list[PartialSum]:  # fmt: skip
    """E experts a rank, of which the last rank's get no token."""
    random = random_tensors(dtype, device, 0.5)
    found: list[PartialSum] = []
    for r in range(W):
        x, scores = random(N, H), random(N, k).float()
        ids = torch.rand(N, (W - 1) * E, device=device).argsort(1)[:, :k].int().contiguous()
        summand = random(N, H) if addend else None
        one = RoutedExperts(x, ids, scores, random(E, 2 * F, H), random(E, H, F), r * E, addend=summand)
        assert not on_hopper or experts_sm90.fits(one.x, one.gate_up, one.down)
        found.append(one)
    return found


GPU, BELOW_FP32 = pytest.mark.gpu, (torch.float16, torch.bfloat16)
# Whose rows are summed, their sizes, whether in two shots, and the dtype.
SENT = [
    *(  # one row of each rank: in one shot
        pytest.param(projections, (W, 1, H, K, biased), False, dtype, marks=[GPU] * (dtype == torch.bfloat16))
        for W, H, K, biased in ((2, 200, 40, True), (3, 6, 1100, False), (8, 258, 16, True))
        for dtype in (torch.float32, *BELOW_FP32)
    ),
    *(
        pytest.param(experts, sizes, two_shot, dtype, marks=[GPU] * (dtype == torch.bfloat16))
        for sizes in ((2, 1, 3, 4, 300, 8, True), (3, 2, 1, 1, 34, 5, False), (3, 17, 2, 3, 258, 16, True))
        for two_shot in (False, True)
        for dtype in (torch.float32, *BELOW_FP32)
    ),
    *(
        pytest.param(partial(projections, few=few), sizes, two_shot, dtype, marks=GPU)
        for sizes in ((8, 2, 66, 64, True), (3, 5, 510, 528, False), (8, 8, 3584, 448, True), (2, 31, 130, 2368, False))
        for few, two_shot, dtype in product((False, True), (False, True), BELOW_FP32)
    ),
    *(
        pytest.param(partial(experts, on_hopper=True), sizes, two_shot, torch.bfloat16, marks=GPU)
        for sizes in ((3, 8, 4, 4, 2880, 360, True), (2, 1, 4, 8, 264, 704, False), (8, 5, 6, 16, 1032, 512, True))
        for two_shot in (False, True)
    ),
]


@pytest.mark.parametrize("make, sizes, two_shot, dtype", SENT)
def test_what_is_sent(
    make: Callable[..., list[PartialSum]], sizes: tuple[Any, ...], two_shot: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    check_what_is_sent(make(*sizes, dtype=dtype, device=device), two_shot, device)


@pytest.mark.parametrize(
    "shape, dtype",
    [((3, 50), torch.float64), ((1,), torch.int32), ((5, 2, 100), torch.int32), ((4,), torch.bfloat16)],
)
def test_all_gather(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    W, pieces = 3, 4
    ranks = SimulatedRanks(W, 2 * W * pieces * SLICE_WORDS, device)
    xs = [torch.arange(r, r + torch.Size(shape).numel()).view(shape).to(device, dtype) for r in range(W)]
    for beside in (False, True) if xs[0][0].numel() * dtype.itemsize % 4 == 0 else (False,):
        for phases in (1, 4):
            options = dict(pieces=pieces, spins=2, interleave=beside, phases=phases)
            got = [all_gather(x, *ranks.given(r), rank=r, **options) for r, x in enumerate(xs)]
        assert all(torch.equal(g, torch.stack(xs, int(beside))) and g.is_contiguous() for g in got)
    assert ranks.timeouts() == [0] * W


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W, shape", [(2, (3, 50)), (3, (1, 600)), (5, (7, 100)), (8, (2,))])
def test_reduce_scatter(W: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    ranks = SimulatedRanks(W, 2 * W * PIECES * SLICE_WORDS, device)
    generator = torch.Generator().manual_seed(0)
    # fp32 sums of W terms of size 1 in another order, rounded once; sums are below 32.
    tolerance = {torch.float32: 2**-18, torch.float16: 2**-6, torch.bfloat16: 2**-3}[dtype]
    for _ in range(3):  # two turns, then the first one's boxes again
        parts = [torch.randn(W, *shape, generator=generator).to(device, dtype) for _ in range(W)]
        for phases in (1, 4):
            options = dict(pieces=PIECES, spins=2, phases=phases)
            got = [reduce_scatter(part, *ranks.given(r), rank=r, **options) for r, part in enumerate(parts)]
        wanted = torch.stack(parts).float().sum(0).to(dtype)
        torch.testing.assert_close(torch.stack(got), wanted, atol=tolerance, rtol=0)
        with pytest.raises(AssertionError):  # a planted error: another rank's rows
            torch.testing.assert_close(torch.stack(got), wanted.roll(1, 0), atol=tolerance, rtol=0)
    assert ranks.timeouts() == [0] * W
