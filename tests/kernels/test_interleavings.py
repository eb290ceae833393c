"""Ranks that run ahead of each other as far as their collectives let them: each launch gets what was sent for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comm.emulated import peer_addresses
from kernels import dispatch
from kernels.attention.reference import merge_states
from kernels.peers import (
    all_gather,
    all_reduce_norm,
    all_reduce_norm_long,
    all_reduce_norm_rows,
    exchange,
    merge_states_exchange,
    reduce_scatter,
)
from tests.kernels.interleaving import Streams
from tests.kernels.peers import Exchange, SimulatedRanks, Sums, check_sums, emulated_sums, summed
from tests.kernels.test_merge_exchange import SHAPES, parts_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on CPUs")

CPU = torch.device("cpu")
LAUNCHES = 4  # two turns, twice
SPINS = 1 << 30  # nobody has to give up
T = TypeVar("T")

few = settings(max_examples=4)
generators = st.integers(0, 2**32 - 1).map(random.Random)


def interleaved(
    generator: random.Random,
    ranks: SimulatedRanks,
    module: ModuleType,
    launch: Callable[[int, int], T],
    launches: int = LAUNCHES,
) -> list[list[T]]:
    """What each of a rank's launches gives it, which `launch` makes by rank and number; by number, then rank."""
    streams = Streams(ranks.count, module)
    got: list[list[T]] = [[] for _ in range(launches)]
    for r in range(ranks.count):
        with streams.of(r):
            for number, results in enumerate(got):
                results.append(launch(r, number))
    streams.run(generator)
    assert ranks.timeouts() == [0] * ranks.count
    return got


@few
@given(generators, st.integers(2, 3))
def test_all_gather(generator: random.Random, W: int) -> None:
    ranks = SimulatedRanks(W, 4 * W * all_gather.SLICE_WORDS, CPU, SPINS)
    sent = [torch.randint(-99, 99, (W, generator.randint(1, 300)), dtype=torch.int32) for _ in range(LAUNCHES)]

    def launch(r: int, number: int) -> Tensor:
        return all_gather.all_gather(sent[number][r], *ranks.given(r), rank=r, pieces=2, spins=SPINS)

    for message, gathered in zip(sent, interleaved(generator, ranks, all_gather, launch), strict=True):
        assert all(torch.equal(received, message) for received in gathered)


@few
@given(generators, st.integers(2, 3))
def test_reduce_scatter(generator: random.Random, W: int) -> None:
    ranks = SimulatedRanks(W, 4 * W * reduce_scatter.SLICE_WORDS, CPU, SPINS)
    sent = [torch.randint(-99, 99, (W, W, generator.randint(1, 300))).float() for _ in range(LAUNCHES)]

    def launch(r: int, number: int) -> Tensor:
        return reduce_scatter.reduce_scatter(sent[number][r], *ranks.given(r), rank=r, pieces=2, spins=SPINS)

    for message, summed_rows in zip(sent, interleaved(generator, ranks, reduce_scatter, launch), strict=True):
        assert torch.equal(torch.stack(summed_rows), message.sum(0))


def check_interleaved(
    generator: random.Random, ranks: Sums, module: ModuleType, H: int, most: int, residual: bool = False,
    phases: tuple[int, ...] = (7,),
) -> None:  # fmt: skip
    """Sums of up to `most` rows; `phases`: those of each of a sum's launches."""
    weight = torch.randn(H)
    parts = [torch.randn(ranks.count, generator.randint(1, most), H) for _ in range(LAUNCHES)]
    residuals = [torch.randn_like(part[0]) if residual and i else None for i, part in enumerate(parts)]

    def launch(r: int, number: int) -> tuple[Tensor, Tensor]:
        return [ranks.run(r, parts[number][r], residuals[number], weight, phase) for phase in phases][-1]

    for part, rest, got in zip(parts, residuals, interleaved(generator, ranks, module, launch), strict=True):
        check_sums(got, part, rest, weight)


@pytest.mark.parametrize("phases", [(7,), (1, 6)], ids=["at-once", "sent-before"])
@pytest.mark.parametrize("algorithm", ["one shot", "two shots"], ids=["one-shot", "two-shots"])
@few
@given(generators, st.integers(2, 3))
def test_all_reduce_norm(algorithm: str, phases: tuple[int, ...], generator: random.Random, W: int) -> None:
    """In one kernel, and where another one sends what this one adds up; three slices a row."""
    ranks = Sums(algorithm, W, CPU, SPINS, pieces=6, size=8)
    check_interleaved(generator, ranks, all_reduce_norm, 20, most=2, phases=phases)


@few
@given(generators, st.integers(2, 3))
def test_all_reduce_norm_of_rows(generator: random.Random, W: int) -> None:
    check_interleaved(generator, Sums("rows", W, CPU, SPINS, pieces=6, size=8), all_reduce_norm_rows, 6, most=4)


@few
@given(generators, st.integers(2, 3), st.integers(1, 2))
def test_all_reduce_norm_of_long_chunks(generator: random.Random, W: int, group: int) -> None:
    """With more groups than boxes, and a last group that is not whole."""
    ranks = Sums("long", W, CPU, SPINS, pieces=W, size=24 * group)
    check_interleaved(generator, ranks, all_reduce_norm_long, 6, most=3 * W * group, residual=True)


@few
@given(generators, st.sampled_from([((0, 1), 2), ((0, 2), 4), ((0, 3), 6)]), st.booleans())
def test_emulated_all_reduce_norm_of_long_chunks(
    generator: random.Random, case: tuple[tuple[int, int], int], own: bool
) -> None:
    """Two processes each emulate one rank of a world; sums equal the ones in `tests.kernels.test_emulated_peers`."""
    mine, world = case
    H, row_words = 6, 24
    ranks = Sums("long", 2, CPU, SPINS, pieces=world, size=row_words)
    shifts = (row_words, 0), (row_words, 0), (4, 0), (4, 0)  # a source has a box for each owner's turn, here one
    peers = [
        torch.tensor([
            peer_addresses(world, mine[p], mine[1 - p], int(table[p]), int(table[1 - p]), *shift)
            for table, shift in zip(ranks.tables, shifts, strict=True)
        ])
        for p in range(2)
    ]  # fmt: skip
    weight, sent = torch.ones(H), [torch.randn(2, generator.randint(1, 3) * world, H) for _ in range(2)]

    def launch(p: int, number: int) -> Tensor:
        rest = ranks.own[p], ranks.counts[p][0], ranks.status[p]
        sizes = dict(rank=mine[p], pieces=world, size=row_words, spins=SPINS, emulated=own)
        return summed("long", sent[number][p], None, weight, peers[p], *rest, **sizes)[1]

    got = interleaved(generator, ranks, all_reduce_norm_long, launch, launches=len(sent))
    for x, results in zip(sent, got, strict=True):
        sums = [world * part for part in x] if own else emulated_sums([*x], mine, world)
        for found, wanted in zip(results, sums, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@few
@given(generators, st.sampled_from([[1, 2], [1, 1, 0], [1, 1, 1]]))
def test_exchange(generator: random.Random, shares: list[int]) -> None:
    W, ranks = len(shares), Exchange(shares, CPU, SPINS)
    sent = []
    for rows in (generator.randint(1, 2) for _ in range(LAUNCHES)):
        sent.append((torch.randn(W, rows, sum(shares), 4), torch.randn(W, rows, sum(shares))))

    def launch(r: int, number: int) -> Tensor:
        out, lse = (t[r] for t in sent[number])
        return ranks.run(r, (out, lse), out)

    for (out, lse), results in zip(sent, interleaved(generator, ranks, exchange, launch), strict=True):
        wanted, _ = merge_states(out, lse)
        torch.testing.assert_close(torch.cat(results, 1), wanted, atol=2**-20, rtol=0)


@settings(few, max_examples=2)
@given(generators)
def test_merge_exchange(generator: random.Random) -> None:
    """Attention of each launch is that of the first, times a factor: the result is linear in the partial outputs."""
    ranks = Exchange(SHAPES["plain"]["shares"], CPU, SPINS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "on_gpu", lambda t: True)
        each = [parts_of("plain", r, 3, torch.float32, CPU) for r in range(ranks.count)]

    def launch(r: int, number: int) -> Tensor:
        parts = replace(each[r], out=2.0**number * each[r].out, part=2.0**number * each[r].part)
        return ranks.run(r, (parts,), parts.out.flatten(0, 1), merge_states_exchange.merge_states_exchange)

    found = [torch.cat(results, 1) for results in interleaved(generator, ranks, merge_states_exchange, launch)]
    assert not found[0].isnan().any()
    for number, result in enumerate(found):
        assert torch.equal(result, 2.0**number * found[0])
