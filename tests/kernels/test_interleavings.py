"""Ranks that run ahead of each other as far as their collectives let them: each launch gets what was sent for it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comm.emulated import addresses
from kernels import dispatch
from kernels.attention.reference import lse_combine
from kernels.dense.reference import rms_norm
from kernels.peers import (
    all_gather,
    all_reduce_norm,
    all_reduce_norm_long,
    all_reduce_norm_rows,
    exchange,
    merge_exchange,
    reduce_scatter,
)
from tests.kernels.interleaving import Streams
from tests.kernels.test_collectives import PIECES, Ranks, tables_of_groups
from tests.kernels.test_merge_exchange import SHAPES, parts_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on CPUs")

CPU = torch.device("cpu")
LAUNCHES = 4  # two turns, twice
SPINS = 1 << 30  # nobody has to give up

few = settings(max_examples=4)
generators = st.integers(0, 2**32 - 1).map(random.Random)


def starts_of(shares: list[int]) -> Tensor:
    return torch.tensor([0, *shares]).cumsum(0).int()


@few
@given(generators, st.integers(2, 3))
def test_all_gather(generator: random.Random, W: int) -> None:
    pieces = 2
    ranks, streams = Ranks(W, 2 * W * pieces * all_gather.SLICE_WORDS, CPU), Streams(W, all_gather)
    words = [generator.randint(1, 300) for _ in range(LAUNCHES)]
    sent = [torch.randint(-99, 99, (W, n), dtype=torch.int32) for n in words]
    got: list[list[Tensor]] = [[] for _ in sent]
    for r in range(W):
        with streams.of(r):
            for message, gathered in zip(sent, got, strict=True):
                x = message[r].contiguous()
                gathered.append(
                    all_gather.all_gather(
                        x, ranks.peers, ranks.counts[r][0], ranks.status[r], rank=r, pieces=pieces, spins=SPINS
                    )
                )
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    for message, gathered in zip(sent, got, strict=True):
        assert all(torch.equal(of_rank, message) for of_rank in gathered)


@few
@given(generators, st.integers(2, 3))
def test_reduce_scatter(generator: random.Random, W: int) -> None:
    pieces = 2
    ranks, streams = Ranks(W, 2 * W * pieces * reduce_scatter.SLICE_WORDS, CPU), Streams(W, reduce_scatter)
    sent = [torch.randint(-99, 99, (W, W, generator.randint(1, 300))).float() for _ in range(LAUNCHES)]
    got: list[list[Tensor]] = [[] for _ in sent]
    for r in range(W):
        with streams.of(r):
            for message, summed in zip(sent, got, strict=True):
                x = message[r].contiguous()
                summed.append(
                    reduce_scatter.reduce_scatter(
                        x, ranks.peers, ranks.counts[r][0], ranks.status[r], rank=r, pieces=pieces, spins=SPINS
                    )
                )
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    for message, summed in zip(sent, got, strict=True):
        assert torch.equal(torch.stack(summed), message.sum(0))


@pytest.mark.parametrize("apart", [False, True], ids=["at-once", "sent-before"])
@pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shots"])
@few
@given(generators, st.integers(2, 3))
def test_all_reduce_norm(two_shot: bool, apart: bool, generator: random.Random, W: int) -> None:
    """In one kernel, and where another one sends what this one adds up."""
    size, H, pieces = 8, 20, 6  # three slices a row
    ranks, streams = Ranks(W, (2 * W + 2) * pieces * size, CPU), Streams(W, all_reduce_norm)
    peers = torch.stack((ranks.peers, ranks.peers + 8 * 2 * W * pieces * size))
    squares = torch.zeros(W, pieces, dtype=torch.int64)
    weight = torch.randn(H)
    parts = [torch.randn(W, generator.randint(1, 2), H) for _ in range(LAUNCHES)]
    got: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
    for r in range(W):
        with streams.of(r):
            for part, results in zip(parts, got, strict=True):
                for phases in (1, 6) if apart else (7,):
                    result = all_reduce_norm.all_reduce_norm(
                        part[r], None, weight, 1e-5, peers, squares[r], ranks.counts[r][0], ranks.status[r],
                        rank=r, pieces=pieces, spins=SPINS, two_shot=two_shot, slice_words=size, phases=phases,
                    )  # fmt: skip
                results.append(result)
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    for part, results in zip(parts, got, strict=True):
        wanted = rms_norm(part.sum(0), weight, 1e-5)
        for y, total in results:
            torch.testing.assert_close(y, wanted[0], atol=1e-5, rtol=0)
            assert torch.equal(y, results[0][0]) and torch.equal(total, results[0][1]), "ranks differ"


@few
@given(generators, st.integers(2, 3))
def test_all_reduce_norm_of_rows(generator: random.Random, W: int) -> None:
    H, room, words = 6, 6, 8
    ranks, streams = Ranks(W, 4 * room * words, CPU), Streams(W, all_reduce_norm_rows)
    peers = torch.stack((ranks.peers, ranks.peers + 8 * 2 * room * words))
    weight = torch.randn(H)
    parts = [torch.randn(W, generator.randint(1, 4), H) for _ in range(LAUNCHES)]
    got: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
    for r in range(W):
        with streams.of(r):
            for part, results in zip(parts, got, strict=True):
                results.append(
                    all_reduce_norm_rows.all_reduce_norm_rows(
                        part[r], None, weight, 1e-5, peers, ranks.counts[r][0], ranks.status[r],
                        rank=r, rows=room, spins=SPINS, row_words=words,
                    )
                )  # fmt: skip
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    for part, results in zip(parts, got, strict=True):
        wanted = rms_norm(part.sum(0), weight, 1e-5)
        for y, total in results:
            torch.testing.assert_close(y, wanted[0], atol=1e-5, rtol=0)
            assert torch.equal(y, results[0][0]) and torch.equal(total, results[0][1]), "ranks differ"


@few
@given(generators, st.integers(2, 3), st.integers(1, 2))
def test_all_reduce_norm_of_long_chunks(generator: random.Random, W: int, group: int) -> None:
    """With more groups than boxes, and a last group that is not whole."""
    H, room = 6, W
    box = group * H * 4
    ranks, streams = Ranks(W, room * (box + 4) // 4, CPU), Streams(W, all_reduce_norm_long)
    peers = tables_of_groups(ranks, room, box)
    seen = torch.zeros(W, room, dtype=torch.int32)
    weight = torch.randn(H)
    parts = [torch.randn(W, generator.randint(1, 3 * room * group), H) for _ in range(LAUNCHES)]
    residuals = [None if i == 0 else torch.randn_like(part[0]) for i, part in enumerate(parts)]
    got: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
    for r in range(W):
        with streams.of(r):
            for part, residual, results in zip(parts, residuals, got, strict=True):
                results.append(
                    all_reduce_norm_long.all_reduce_norm_long(
                        part[r], residual, weight, 1e-5, peers, seen[r], ranks.counts[r][0], ranks.status[r],
                        rank=r, room=room, spins=SPINS, box=box,
                    )
                )  # fmt: skip
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    for part, residual, results in zip(parts, residuals, got, strict=True):
        wanted = rms_norm(part.sum(0), weight, 1e-5, residual)
        for y, total in results:
            torch.testing.assert_close(y, wanted[0], atol=1e-5, rtol=0)
            assert torch.equal(y, results[0][0]) and torch.equal(total, results[0][1]), "ranks differ"


@few
@given(generators, st.sampled_from([((0, 1), 2), ((0, 2), 4), ((0, 3), 6)]))
def test_emulated_all_reduce_norm_of_long_chunks(generator: random.Random, case: tuple[tuple[int, int], int]) -> None:
    """Two processes that emulate one rank each, of a world: sums are those of `tests.kernels.test_emulated_boxes`."""
    mine, world = case
    H, box, room = 6, 24, world
    ranks, streams = Ranks(2, room * (box + 4) // 4, CPU), Streams(2, all_reduce_norm_long)
    tables = tables_of_groups(ranks, room, box)
    shifts = (box, 0), (box, 0), (4, 0), (4, 0)  # a source has a box for each owner's turn, here one
    peers = [
        torch.tensor([
            addresses(world, mine[p], mine[1 - p], int(table[p]), int(table[1 - p]), *shift)
            for table, shift in zip(tables, shifts, strict=True)
        ])
        for p in range(2)
    ]  # fmt: skip
    seen, weight = torch.zeros(2, room, dtype=torch.int32), torch.ones(H)
    sent = [torch.randn(2, generator.randint(1, 3) * world, H) for _ in range(2)]
    got: list[list[Tensor]] = [[] for _ in sent]
    for p in range(2):
        with streams.of(p):
            for x, results in zip(sent, got, strict=True):
                found = all_reduce_norm_long.all_reduce_norm_long(
                    x[p], None, weight, 1e-5, peers[p], seen[p], ranks.counts[p][0], ranks.status[p],
                    rank=mine[p], room=room, spins=SPINS, box=box,
                )  # fmt: skip
                results.append(found[1])
    streams.run(generator)
    assert ranks.gave_up() == [0, 0]
    for x, results in zip(sent, got, strict=True):
        groups = x.view(2, -1, world, H)
        owned = [
            groups[p][:, mine[p]] + groups[1 - p][:, [to for to in range(world) if to != mine[1 - p]]].sum(1)
            for p in range(2)
        ]
        for p in range(2):
            wanted = owned[1 - p][:, None].repeat(1, world, 1)
            wanted[:, mine[p]] = owned[p]
            torch.testing.assert_close(results[p].view_as(wanted), wanted, atol=1e-5, rtol=0)


@few
@given(generators, st.sampled_from([[1, 2], [1, 1, 0], [1, 1, 1]]))
def test_exchange(generator: random.Random, shares: list[int]) -> None:
    W, D = len(shares), 4
    ranks, streams = Ranks(W, 2 * W * PIECES * exchange.PIECE_WORDS, CPU), Streams(W, exchange)
    rows = [generator.randint(1, 2) for _ in range(LAUNCHES)]
    outs = [torch.randn(W, n, sum(shares), D) for n in rows]
    lses = [torch.randn(W, n, sum(shares)) for n in rows]
    got: list[list[Tensor]] = [[] for _ in rows]
    starts = starts_of(shares)
    for r in range(W):
        with streams.of(r):
            for out, lse, results in zip(outs, lses, got, strict=True):
                result = torch.full((out.shape[1], shares[r], D), torch.nan)
                results.append(
                    exchange.exchange(
                        out[r], lse[r], result, starts, ranks.peers, (ranks.counts[r][0], ranks.counts[r][1]),
                        ranks.status[r], rank=r, lanes=max(shares), pieces=PIECES, spins=SPINS,
                    )
                )  # fmt: skip
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    for out, lse, results in zip(outs, lses, got, strict=True):
        wanted, _ = lse_combine(out, lse, out=None, out_lse=None)
        torch.testing.assert_close(torch.cat(results, 1), wanted, atol=2**-20, rtol=0)


@settings(few, max_examples=2)
@given(generators)
def test_merge_exchange(generator: random.Random) -> None:
    """Attention of each launch is that of the first, times a factor: the result is linear in the partial outputs."""
    shape = "plain"
    shares, D = SHAPES[shape]["shares"], SHAPES[shape]["dim"]
    W, starts = len(shares), starts_of(shares)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "on_gpu", lambda t: True)
        each = [parts_of(shape, r, 3, torch.float32, CPU) for r in range(W)]
    ranks, streams = Ranks(W, 2 * W * PIECES * exchange.PIECE_WORDS, CPU), Streams(W, merge_exchange)
    got: list[list[Tensor]] = [[] for _ in range(LAUNCHES)]
    for r, parts in enumerate(each):
        with streams.of(r):
            for launch, results in enumerate(got):
                factor = 2.0**launch
                result = torch.full((len(parts.out), shares[r], D), torch.nan)
                results.append(
                    merge_exchange.merge_exchange(
                        replace(parts, out=factor * parts.out, part=factor * parts.part), result, starts, ranks.peers,
                        (ranks.counts[r][0], ranks.counts[r][1]), ranks.status[r], rank=r, lanes=max(shares),
                        pieces=PIECES, spins=SPINS,
                    )
                )  # fmt: skip
    streams.run(generator)
    assert ranks.gave_up() == [0] * W
    found = [torch.cat(results, 1) for results in got]
    assert not found[0].isnan().any()
    for launch, result in enumerate(found):
        assert torch.equal(result, 2.0**launch * found[0])
