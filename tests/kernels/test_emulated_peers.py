"""The kernels between GPUs by the tables of two processes that emulate ranks of a larger world (comm/emulated.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comm.emulated import peer_addresses
from kernels.attention.reference import merge_states
from kernels.dense.reference import rms_norm
from kernels.peers.exchange import PIECE_WORDS, exchange
from tests.kernels.peers import SimulatedRanks, emulated_sums, summed

PIECES = 32
WORD = 8


class Played(SimulatedRanks):
    """Boxes of two processes on one device, and each one's table of them."""

    def __init__(self, ranks: tuple[int, int], world: int, words: int, pieces_too: bool, device: torch.device) -> None:
        super().__init__(2, 2 * world * PIECES * words, device)
        self.ranks, self.world = ranks, world
        sizes = PIECES * words * WORD, words * WORD if pieces_too else 0
        self.tables = [self.table(self.ll_buffers, sizes, process) for process in range(2)]

    def table(self, ll_buffers: list[Tensor], sizes: tuple[int, int], process: int) -> Tensor:
        mine, theirs = self.ranks[process], self.ranks[1 - process]
        own, other = ll_buffers[process].data_ptr(), ll_buffers[1 - process].data_ptr()
        return torch.tensor(peer_addresses(self.world, mine, theirs, own, other, *sizes), device=ll_buffers[0].device)


@pytest.mark.parametrize("ranks, world", [((0, 1), 2), ((0, 4), 8), ((0, 0), 4), ((1, 1), 4), ((2, 0), 5)])
def test_the_exchange_takes_what_the_other_sends_to_anyone_else(
    ranks: tuple[int, int], world: int, device: torch.device
) -> None:
    N, D, heads = 3, 16, 2 * world - 1
    shares = [2] * (world - 1) + [1]
    starts = torch.tensor([0, *shares]).cumsum(0).to(device, torch.int32)
    played = Played(ranks, world, PIECE_WORDS, False, device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        outs = [torch.randn(N, heads, D, generator=generator).to(device) for _ in range(2)]
        lses = [torch.randn(N, heads, generator=generator).to(device) for _ in range(2)]
        results = []
        for push in (True, False):
            for p in range(2):
                result = torch.empty(N, shares[ranks[p]], D, device=device)
                exchange(
                    outs[p], lses[p], result, starts, played.tables[p], (played.counts[p][0], played.counts[p][1]),
                    played.status[p], rank=ranks[p], lanes=2, pieces=PIECES, spins=3, push=push, wait=not push,
                )  # fmt: skip
                results += [] if push else [result]
        for p, result in enumerate(results):
            mine, theirs = ranks[p], ranks[1 - p]
            parts, logs = [], []
            for source in range(world):  # as from `source`: what the other sent to it, or to this rank
                sender, to = (p, mine) if source == mine else (1 - p, mine if source == theirs else source)
                run = slice(int(starts[to]), int(starts[to]) + shares[mine])
                part, log = outs[sender][:, run], lses[sender][:, run]
                if shares[to] < shares[mine]:  # a lane that the destination has not: empty
                    part = torch.cat((part[:, :1], torch.zeros(N, 1, D, device=device)), 1)
                    log = torch.cat((log[:, :1], torch.full((N, 1), -torch.inf, device=device)), 1)
                parts.append(part)
                logs.append(log)
            wanted, _ = merge_states(torch.stack(parts), torch.stack(logs), out=None, out_lse=None)
            # fp32 sums of up to eight terms of size 1, in another order.
            torch.testing.assert_close(result, wanted, atol=2**-19, rtol=0)
    assert played.timeouts() == [0, 0]


@pytest.mark.parametrize("algorithm, own", [("one shot", False), ("two shots", False), ("rows", False), ("rows", True)])
@pytest.mark.parametrize("ranks, world", [((0, 1), 2), ((0, 4), 8), ((0, 3), 6)])
def test_sums_of_rows(ranks: tuple[int, int], world: int, algorithm: str, own: bool, device: torch.device) -> None:
    N, H, size = 2 * world, 40, 64  # a row is one piece: each rank owns two of them
    two_shot = algorithm == "two shots"
    played = Played(ranks, world, size, two_shot, device)
    room = PIECES // world * world
    row_sums = [played.table(played.ll_buffers, (room // world * size * WORD, 0), p) for p in range(2)]
    sums = [torch.zeros(2 * PIECES * size, dtype=torch.int64, device=device) for _ in range(2)]
    squares = torch.zeros(2, PIECES, dtype=torch.int64, device=device)
    weight = torch.ones(H, device=device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = [torch.randn(N, H, generator=generator).to(device) for _ in range(2)]
        got = []
        for phase in (1, 2, 4):
            got = []
            for p in range(2):
                sums_table = played.table(sums, (size * WORD, 0), p)
                found = played.counts[p][0], played.status[p]
                tables = torch.stack((row_sums[p] if algorithm == "rows" else played.tables[p], sums_table))
                sizes = dict(
                    rank=ranks[p],
                    pieces=room if algorithm == "rows" else PIECES,
                    size=size,
                    spins=3,
                    phases=phase,
                    emulated=own,
                )
                got.append(summed(algorithm, x[p], None, weight, tables, squares[p], *found, **sizes))
        wanted = emulated_sums(x, ranks, world)
        if algorithm == "one shot":
            wanted = [x[p] + (world - 1) * x[1 - p] for p in range(2)]
        elif own:
            wanted = [world * part for part in x]
        for (y, total), right in zip(got, wanted, strict=True):
            # fp32 sums of up to eight terms of size 1 in another order, and their square root.
            torch.testing.assert_close(total, right, atol=2**-18, rtol=0)
            torch.testing.assert_close(y, rms_norm(right, weight, 1e-5)[0], atol=2**-18, rtol=0)
    assert played.timeouts() == [0, 0]
