"""The kernels between GPUs by the tables of two processes that emulate ranks of a larger world (comm/emulated.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comm.emulated import addresses
from kernels.attention.reference import lse_combine
from kernels.dense.reference import rms_norm
from kernels.peers.all_gather import SLICE_WORDS, all_gather
from kernels.peers.all_reduce_norm import all_reduce_norm
from kernels.peers.all_reduce_norm_rows import all_reduce_norm_rows
from kernels.peers.exchange import PIECE_WORDS, exchange

PIECES = 32
WORD = 8


class Played:
    """Boxes of two processes on one device, and each one's table of them."""

    def __init__(self, ranks: tuple[int, int], world: int, words: int, pieces_too: bool, device: torch.device) -> None:
        self.ranks, self.world = ranks, world
        self.boxes = [torch.zeros(2 * world * PIECES * words, dtype=torch.int64, device=device) for _ in range(2)]
        sizes = PIECES * words * WORD, words * WORD if pieces_too else 0
        self.peers = [self.table(self.boxes, sizes, process) for process in range(2)]
        self.counts = [torch.zeros(2, 1, dtype=torch.int64, device=device) for _ in range(2)]
        self.status = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]

    def table(self, boxes: list[Tensor], sizes: tuple[int, int], process: int) -> Tensor:
        mine, theirs = self.ranks[process], self.ranks[1 - process]
        own, other = boxes[process].data_ptr(), boxes[1 - process].data_ptr()
        return torch.tensor(addresses(self.world, mine, theirs, own, other, *sizes), device=boxes[0].device)


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
                    outs[p], lses[p], result, starts, played.peers[p], (played.counts[p][0], played.counts[p][1]),
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
            wanted, _ = lse_combine(torch.stack(parts), torch.stack(logs), out=None, out_lse=None)
            # fp32 sums of up to eight terms of size 1, in another order.
            torch.testing.assert_close(result, wanted, atol=2**-19, rtol=0)
    assert [int(s) for s in played.status] == [0, 0]


@pytest.mark.parametrize("way", ["one shot", "two shots", "rows"])
@pytest.mark.parametrize("ranks, world", [((0, 1), 2), ((0, 4), 8), ((0, 3), 6)])
def test_sums_of_rows(ranks: tuple[int, int], world: int, way: str, device: torch.device) -> None:
    N, H, size = 2 * world, 40, 64  # a row is one piece: each rank owns two of them
    two_shot = way == "two shots"
    played = Played(ranks, world, size, two_shot, device)
    room = PIECES // world * world
    of_rows = [played.table(played.boxes, (room // world * size * WORD, 0), p) for p in range(2)]
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
                of_sums = played.table(sums, (size * WORD, 0), p)
                found = played.counts[p][0], played.status[p]
                if way == "rows":
                    one = all_reduce_norm_rows(
                        x[p], None, weight, 1e-5, torch.stack((of_rows[p], of_sums)), *found,
                        rank=ranks[p], rows=room, spins=3, row_words=size, phases=phase,
                    )  # fmt: skip
                else:
                    one = all_reduce_norm(
                        x[p], None, weight, 1e-5, torch.stack((played.peers[p], of_sums)), squares[p], *found,
                        rank=ranks[p], pieces=PIECES, spins=3, two_shot=two_shot, slice_words=size, phases=phase,
                    )  # fmt: skip
                got.append(one)
        wanted = [x[p] + (world - 1) * x[1 - p] for p in range(2)]
        if (
            way != "one shot"
        ):  # of every `world` rows, an owner adds its own to all but the other's own, and sends that to all
            of_owner = []
            for p in range(2):
                from_other = [to for to in range(world) if to != ranks[1 - p]]
                rows = x[1 - p].view(2, world, H)[:, from_other]
                of_owner.append(x[p].view(2, world, H)[:, ranks[p]] + rows.sum(1))
            wanted = []
            for p in range(2):
                rows = of_owner[1 - p][:, None].repeat(1, world, 1)
                rows[:, ranks[p]] = of_owner[p]
                wanted.append(rows.view(N, H))
        for (y, total), right in zip(got, wanted, strict=True):
            # fp32 sums of up to eight terms of size 1 in another order, and their square root.
            torch.testing.assert_close(total, right, atol=2**-18, rtol=0)
            torch.testing.assert_close(y, rms_norm(right, weight, 1e-5)[0], atol=2**-18, rtol=0)
    assert [int(s) for s in played.status] == [0, 0]


def test_gathers(device: torch.device) -> None:
    played = Played((0, 2), 4, SLICE_WORDS, False, device)
    x = [torch.arange(7, device=device, dtype=torch.int32) + 100 * p for p in range(2)]
    for phase in (1, 4):
        got = [
            all_gather(
                x[p], played.peers[p], played.counts[p][0], played.status[p], rank=(0, 2)[p], pieces=PIECES, spins=3,
                phases=phase,
            )
            for p in range(2)
        ]  # fmt: skip
    for p, ranks in enumerate(got):
        mine = (0, 2)[p]
        assert all(torch.equal(of_rank, x[p if r == mine else 1 - p]) for r, of_rank in enumerate(ranks))
