"""The kernels between GPUs, with ranks that share one device: each phase of a collective runs for all in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder as BUILDER

from comm.pending import PendingProjection, PendingSum
from kernels.attention.reference import lse_combine
from kernels.dense.reference import rms_norm
from kernels.moe import experts_sm90
from kernels.moe.experts import RoutedExperts
from kernels.peers.all_gather import SLICE_WORDS, all_gather
from kernels.peers.all_reduce_norm import all_reduce_norm
from kernels.peers.all_reduce_norm_long import all_reduce_norm_long
from kernels.peers.all_reduce_norm_rows import all_reduce_norm_rows
from kernels.peers.exchange import IN_GROUP, PIECE_WORDS, exchange
from kernels.peers.mailbox import SumTarget
from kernels.peers.reduce_scatter import reduce_scatter
from kernels.scaled import Matrix, quantised

PIECES = 64
# Triton's interpreter cuts bf16 off where it should round: bf16 is for GPUs.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


class Ranks:
    """What each rank holds: boxes, counters and a status."""

    def __init__(self, count: int, words: int, device: torch.device) -> None:
        self.count = count
        self.boxes = [torch.zeros(words, dtype=torch.int64, device=device) for _ in range(count)]
        self.peers = torch.tensor([b.data_ptr() for b in self.boxes], device=device)
        self.counts = [torch.zeros(2, 1, dtype=torch.int64, device=device) for _ in range(count)]
        self.status = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(count)]

    def gave_up(self) -> list[int]:
        return [int(s) for s in self.status]


def tables_of_groups(ranks: Ranks, room: int, box: int) -> Tensor:
    """Addresses of boxes and flags for sums of long chunks, in the ranks' boxes."""
    begins = 0, room * box, 2 * room * box, 2 * room * box + 4 * room
    return torch.stack([ranks.peers + begin for begin in begins])


def exchanged(
    ranks: Ranks, outs: list[Tensor], lses: list[Tensor], shares: list[int], waiting: range | None = None
) -> list[Tensor]:
    starts = torch.tensor([0, *shares]).cumsum(0).to(outs[0].device, torch.int32)
    results = []
    for push in (True, False):
        for r in range(ranks.count) if push or waiting is None else waiting:
            result = torch.full((len(outs[r]), shares[r], outs[r].shape[2]), torch.nan).to(outs[r])
            exchange(
                outs[r], lses[r], result, starts, ranks.peers, (ranks.counts[r][0], ranks.counts[r][1]),
                ranks.status[r], rank=r, lanes=max(shares), pieces=PIECES, spins=3, push=push, wait=not push,
            )  # fmt: skip
            results += [] if push else [result]
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares, N, D", [([2, 2], 3, 16), ([2, 2, 2, 1], 1, 6), ([1, 0, 0], 5, 32), ([3, 3], 2, 96)])
def test_exchange(shares: list[int], N: int, D: int, dtype: torch.dtype, device: torch.device) -> None:
    W, heads = len(shares), sum(shares)
    ranks = Ranks(W, 2 * W * PIECES * PIECE_WORDS, device)
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
        wanted, _ = lse_combine(torch.stack(outs), torch.stack(lses), out=None, out_lse=None)
        got = torch.cat(exchanged(ranks, outs, lses, shares), 1)
        # Rounded once to the dtype from fp32 sums of W terms of size 1, in another order than the reference's.
        tolerance = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
    assert ranks.gave_up() == [0] * W


def test_a_rank_that_does_not_come_is_named(device: torch.device) -> None:
    shares, out, lse = [1, 1, 1], torch.ones(2, 3, 4, device=device), torch.zeros(2, 3, device=device)
    ranks = Ranks(3, 2 * 3 * PIECES * PIECE_WORDS, device)
    exchanged(ranks, [out] * 3, [lse] * 3, shares)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    result = torch.zeros(2, 1, 4, device=device)
    for push, who in ((True, (0, 1)), (False, (0,))):  # rank 2 sends nothing
        for r in who:
            exchange(
                out, lse, result, starts, ranks.peers,
                (ranks.counts[r][0], ranks.counts[r][1]), ranks.status[r],
                rank=r, lanes=1, pieces=PIECES, spins=3, push=push, wait=not push,
            )  # fmt: skip
    assert ranks.gave_up() == [IN_GROUP + 3, 0, 0]
    assert result.isnan().all(), "what came of two ranks of three looks like an answer"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_sum_without_a_rank_is_none(two_shot: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Neither on the rank that gave up nor, of sums that it owns, on the others."""
    W, size, H = 2, 64, 40
    ranks = Ranks(W, (2 * W + 2) * PIECES * size, device)
    peers = torch.stack((ranks.peers, ranks.peers + 8 * 2 * W * PIECES * size))
    squares = torch.zeros(W, PIECES, dtype=torch.int64, device=device)
    x, weight = torch.ones(2, H, dtype=dtype, device=device), torch.ones(H, dtype=dtype, device=device)
    for turn, absent in enumerate((None, None, 1)):
        for phase in (1, 2, 4):
            got = [
                all_reduce_norm(
                    x, None, weight, 1e-5, peers, squares[r], ranks.counts[r][0], ranks.status[r],
                    rank=r, pieces=PIECES, spins=2, two_shot=two_shot, slice_words=size, phases=phase,
                )
                for r in range(W)
                if r != absent
            ]  # fmt: skip
        assert turn == 2 or all((total == W).all() for _, total in got)
    normed, total = got[0]
    assert ranks.gave_up() == [2, 0] and normed.isnan().all() and total.isnan().all()


def run_alone(collective: str, ranks: Ranks, spins: int, device: torch.device) -> Tensor:
    """What rank 0 of two gets where the other does not come; its status is that of `ranks`."""
    size, x = SLICE_WORDS, torch.ones(1, 2, 4, device=device)
    common = dict(rank=0, pieces=PIECES, spins=spins)
    if collective == "exchange":
        starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
        counts = ranks.counts[0][0], ranks.counts[0][1]
        result = torch.zeros(1, 1, 4, device=device)
        return exchange(x, x[..., 0], result, starts, ranks.peers, counts, ranks.status[0], lanes=1, **common)
    if collective == "all_gather":
        return all_gather(x, ranks.peers, ranks.counts[0][0], ranks.status[0], **common)[1]
    if collective == "reduce_scatter":
        return reduce_scatter(
            x.expand(2, 2, 4).contiguous(), ranks.peers, ranks.counts[0][0], ranks.status[0], **common
        )
    if collective == "rows":
        peers = torch.stack((ranks.peers, ranks.peers + 8 * 2 * PIECES * size))
        found = ranks.counts[0][0], ranks.status[0]
        return all_reduce_norm_rows(
            x[0], None, x[0, 0], 1e-5, peers, *found, rank=0, rows=PIECES, spins=spins, row_words=size
        )[1]
    if collective == "long":
        return all_reduce_norm_long(
            x[0], None, x[0, 0], 1e-5, tables_of_groups(ranks, 2, 64),
            torch.zeros(2, dtype=torch.int32, device=device), ranks.counts[0][0], ranks.status[0],
            rank=0, room=2, spins=spins, box=64,
        )[1]  # fmt: skip
    peers = torch.stack((ranks.peers, ranks.peers + 8 * 4 * PIECES * size))
    squares = torch.zeros(PIECES, dtype=torch.int64, device=device)
    return all_reduce_norm(
        x[0], None, x[0, 0], 1e-5, peers, squares, ranks.counts[0][0], ranks.status[0],
        two_shot=collective == "two shots", **common,
    )[1]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks are counted by Triton's interpreter")
@pytest.mark.parametrize(
    "collective", ["exchange", "all_gather", "reduce_scatter", "one shot", "two shots", "rows", "long"]
)
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
        ranks = Ranks(2, 6 * PIECES * max(SLICE_WORDS, PIECE_WORDS), device)
        ranks.status[0].fill_(before)
        looks.clear()
        missing = run_alone(collective, ranks, spins, device)
        found.append(sum(looks))
        assert missing.isnan().any() and ranks.gave_up()[0] != 0
    patient, once, broken = found
    assert patient >= once + 7 and broken == once


def test_a_nan_lse_surfaces(device: torch.device) -> None:
    ranks = Ranks(2, 2 * 2 * PIECES * PIECE_WORDS, device)
    outs = [torch.ones(1, 2, 4, device=device)] * 2
    lses = [torch.tensor([[0.0, torch.nan]], device=device), torch.zeros(1, 2, device=device)]
    first, second = exchanged(ranks, outs, lses, [1, 1])
    assert (first == 1).all() and second.isnan().all()


def check_sums(
    got: list[tuple[Tensor, Tensor]], parts: list[Tensor], residual: Tensor | None, weight: Tensor, terms: int
) -> None:
    """Each rank's rows and sums are the same, and those of the reference, for sums of up to so many terms."""
    dtype = weight.dtype
    wanted = rms_norm(torch.stack(parts).float().sum(0).to(dtype), weight, 1e-5, residual)
    # The reference rounds the sum once more before it adds the residual: a unit of values up to 8, or 16 for 8 terms.
    unit = {torch.float32: 0.0, torch.float16: 2**-6, torch.bfloat16: 2**-3}[dtype]
    for mine in got:
        torch.testing.assert_close(mine, wanted, atol=max(1e-5, unit * terms / 4), rtol=0)
        assert torch.equal(mine[0], got[0][0]) and torch.equal(mine[1], got[0][1]), "ranks differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("W, N, H", [(2, 3, 40), (4, 5, 64), (3, 1, 6)])
def test_all_reduce_norm(W: int, N: int, H: int, two_shot: bool, dtype: torch.dtype, device: torch.device) -> None:
    size = 64  # words of a slice; a row is one slice, so that no program of a rank waits for another
    ranks = Ranks(W, (2 * W + 2) * PIECES * size, device)
    peers = torch.stack((ranks.peers, ranks.peers + 8 * 2 * W * PIECES * size))  # sums lie behind the parts
    squares = torch.zeros(W, PIECES, dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(H, generator=generator).to(device, dtype)
    for message in range(4):
        parts = [torch.randn(N, H, generator=generator).to(device, dtype) for _ in range(W)]
        residual = torch.randn(N, H, generator=generator).to(device, dtype) if message else None
        got: list[tuple[Tensor, Tensor]] = []
        for phase in (1, 2, 4):
            got = [
                all_reduce_norm(
                    parts[r], residual, weight, 1e-5, peers, squares[r], ranks.counts[r][0], ranks.status[r],
                    rank=r, pieces=PIECES, spins=2, two_shot=two_shot, slice_words=size, phases=phase,
                )
                for r in range(W)
            ]  # fmt: skip
        check_sums(got, parts, residual, weight, terms=4)
    assert ranks.gave_up() == [0] * W


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W, N, H", [(2, 3, 40), (4, 8, 64), (3, 1, 6), (8, 23, 2050)])
def test_all_reduce_norm_of_rows(W: int, N: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
    """With fewer rows than owners, other widths from turn to turn, and without a residual."""
    room, words = 24, 2050
    ranks = Ranks(W, 2 * 2 * room * words, device)
    peers = torch.stack((ranks.peers, ranks.peers + 8 * 2 * room * words))
    generator = torch.Generator().manual_seed(0)
    for message in range(4):
        rows, width = (N, H) if message % 2 == 0 else (max(1, N // 2), max(2, H // 4 * 2))
        weight = torch.randn(width, generator=generator).to(device, dtype)
        parts = [torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(W)]
        residual = torch.randn(rows, width, generator=generator).to(device, dtype) if message else None
        got: list[tuple[Tensor, Tensor]] = []
        for phase in (1, 2, 4):
            got = [
                all_reduce_norm_rows(
                    parts[r], residual, weight, 1e-5, peers, ranks.counts[r][0], ranks.status[r],
                    rank=r, rows=room, spins=2, row_words=words, phases=phase,
                )
                for r in range(W)
            ]  # fmt: skip
        check_sums(got, parts, residual, weight, terms=8)
    assert ranks.gave_up() == [0] * W


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("W, N, H", [(2, 31, 3584), (3, 20, 510), (4, 23, 8192), (8, 64, 130)])
def test_all_reduce_norm_of_long_chunks(W: int, N: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
    """Ranks on streams of one GPU, where all programs have a place at once; boxes are used again and again."""
    room, box = 2 * W, 32 << 10
    ranks = Ranks(W, room * (box + 4) // 4, device)
    tables = tables_of_groups(ranks, room, box)
    seen = [torch.zeros(room, dtype=torch.int32, device=device) for _ in range(W)]  # aligned alike: one kernel
    streams = [torch.cuda.Stream() for _ in range(W)]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(H, generator=generator).to(device, dtype)
    for message in range(4):
        rows = N if message % 2 == 0 else N // 2
        parts = [torch.randn(rows, H, generator=generator).to(device, dtype) for _ in range(W)]
        residual = torch.randn(rows, H, generator=generator).to(device, dtype) if message else None
        got = []
        torch.cuda.synchronize()
        for r, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append(
                    all_reduce_norm_long(
                        parts[r], residual, weight, 1e-5, tables, seen[r], ranks.counts[r][0], ranks.status[r],
                        rank=r, room=room, spins=1 << 22, box=box,
                    )
                )  # fmt: skip
        torch.cuda.synchronize()
        check_sums(got, parts, residual, weight, terms=8)
    assert ranks.gave_up() == [0] * W


def check_what_is_sent(summands: list[PendingSum], two_shot: bool, device: torch.device) -> None:
    """Boxes after each rank's `send` hold what they hold after the first phase of a sum of what `make` gives."""
    W, size, pieces = len(summands), 128, 512
    squares = torch.zeros(pieces, dtype=torch.int64, device=device)
    two, one = (Ranks(W, (2 * W + 2) * pieces * size, device) for _ in range(2))
    tables = torch.stack((two.peers, two.peers + 8 * 2 * W * pieces * size))
    rows = summands[0].compute()
    for r, summand in enumerate(summands):
        assert summand.can_push(two_shot)
        common = dict(rank=r, pieces=pieces, slice_words=size, two_shot=two_shot)
        summand.push(SumTarget(one.peers, one.counts[r][0], **common))
        all_reduce_norm(
            summand.compute(), None, torch.ones_like(rows[0]), 1e-5, tables, squares, two.counts[r][0], two.status[r],
            spins=2, phases=1, **common,
        )  # fmt: skip
    words = -(-rows.shape[1] * rows.itemsize // 4)
    tags = sum(int((boxes >> 32).sum()) for boxes in two.boxes)
    assert tags == W * len(rows) * words * (1 if two_shot else W)  # all of the first turn
    for sent, wanted in zip(one.boxes, two.boxes, strict=True):
        assert torch.equal(sent, wanted)


def random_tensors(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(device, dtype)


def projections(
    W: int, N: int, H: int, K: int, biased: bool, dtype: torch.dtype, device: torch.device, few: bool = False
) -> list[PendingSum]:
    """Creates projections of W ranks; `few`: of weights in e4m3."""
    random = random_tensors(dtype, device)

    def weight() -> Matrix:
        return quantised(random(H, K)) if few else random(H, K)

    return [PendingProjection(random(N, K), weight(), random(H) if biased else None) for _ in range(W)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W, H, K, biased", [(2, 200, 40, True), (3, 6, 1100, False), (8, 258, 16, True)])
def test_what_a_projection_of_one_row_sends(
    W: int, H: int, K: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check_what_is_sent(projections(W, 1, H, K, biased, dtype, device), False, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "W, N, H, K, biased",
    [(8, 2, 66, 64, True), (3, 5, 510, 528, False), (8, 8, 3584, 448, True), (2, 31, 130, 2368, False)],
)
def test_what_projections_on_hopper_send(
    W: int, N: int, H: int, K: int, biased: bool, few: bool, two_shot: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check_what_is_sent(projections(W, N, H, K, biased, dtype, device, few), two_shot, device)


def experts(
    W: int, N: int, k: int, E: int, H: int, F: int, addend: bool, dtype: torch.dtype, device: torch.device
) -> list[PendingSum]:
    """E experts a rank, of which the last rank's get no token."""
    random = random_tensors(dtype, device)
    found: list[PendingSum] = []
    for r in range(W):
        x, scores = random(N, H), random(N, k).float()
        ids = torch.rand(N, (W - 1) * E, device=device).argsort(1)[:, :k].int().contiguous()
        summand = random(N, H) if addend else None
        found.append(RoutedExperts(x, ids, scores, random(E, 2 * F, H), random(E, H, F), r * E, addend=summand))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize(
    "W, N, k, E, H, F, addend", [(2, 1, 3, 4, 300, 8, True), (3, 2, 1, 1, 34, 5, False), (3, 17, 2, 3, 258, 16, True)]
)
def test_what_experts_send(
    W: int,
    N: int,
    k: int,
    E: int,
    H: int,
    F: int,
    addend: bool,
    two_shot: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    check_what_is_sent(experts(W, N, k, E, H, F, addend, dtype, device), two_shot, device)


@pytest.mark.gpu
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize(
    "W, N, k, E, H, F, addend",
    [(3, 8, 4, 4, 2880, 360, True), (2, 1, 4, 8, 264, 704, False), (8, 5, 6, 16, 1032, 512, True)],
)
def test_what_wide_experts_on_hopper_send(
    W: int, N: int, k: int, E: int, H: int, F: int, addend: bool, two_shot: bool, device: torch.device
) -> None:
    found = experts(W, N, k, E, H, F, addend, torch.bfloat16, device)
    assert all(experts_sm90.fits(one.x, one.gate_up, one.down) for one in found if isinstance(one, RoutedExperts))
    check_what_is_sent(found, two_shot, device)


def test_all_gather(device: torch.device) -> None:
    W, pieces = 3, 4
    ranks = Ranks(W, 2 * W * pieces * SLICE_WORDS, device)
    for shape, dtype in (
        ((3, 50), torch.float64),
        ((1,), torch.int32),
        ((5, 2, 100), torch.int32),
        ((4,), torch.bfloat16),
    ):
        xs = [torch.arange(r, r + torch.Size(shape).numel()).view(shape).to(device, dtype) for r in range(W)]
        for beside in (False, True) if xs[0][0].numel() * dtype.itemsize % 4 == 0 else (False,):
            for phase in (1, 4):
                got = [
                    all_gather(
                        xs[r],
                        ranks.peers,
                        ranks.counts[r][0],
                        ranks.status[r],
                        rank=r,
                        pieces=pieces,
                        spins=2,
                        beside=beside,
                        phases=phase,
                    )
                    for r in range(W)
                ]
            assert all(torch.equal(g, torch.stack(xs, int(beside))) and g.is_contiguous() for g in got)
    assert ranks.gave_up() == [0] * W


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("W, shape", [(2, (3, 50)), (3, (1, 600)), (5, (7, 100)), (8, (2,))])
def test_reduce_scatter(W: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    ranks = Ranks(W, 2 * W * PIECES * SLICE_WORDS, device)
    generator = torch.Generator().manual_seed(0)
    # fp32 sums of W terms of size 1 in another order, rounded once; sums are below 32.
    tolerance = {torch.float32: 2**-18, torch.float16: 2**-6, torch.bfloat16: 2**-3}[dtype]
    for _ in range(3):  # two turns, then the first one's boxes again
        parts = [torch.randn(W, *shape, generator=generator).to(device, dtype) for _ in range(W)]
        for phase in (1, 4):
            got = [
                reduce_scatter(
                    parts[r], ranks.peers, ranks.counts[r][0], ranks.status[r], rank=r, pieces=PIECES, spins=2,
                    phases=phase,
                )
                for r in range(W)
            ]  # fmt: skip
        wanted = torch.stack(parts).float().sum(0).to(dtype)
        torch.testing.assert_close(torch.stack(got), wanted, atol=tolerance, rtol=0)
        with pytest.raises(AssertionError):  # a planted error: another rank's rows
            torch.testing.assert_close(torch.stack(got), wanted.roll(1, 0), atol=tolerance, rtol=0)
    assert ranks.gave_up() == [0] * W
