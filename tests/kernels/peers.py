"""Ranks on one device, with what inter-GPU kernels need of each: LL buffers, counters and a status."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.dense.reference import rms_norm
from kernels.peers.all_reduce_norm import all_reduce_norm
from kernels.peers.all_reduce_norm_long import all_reduce_norm_long
from kernels.peers.all_reduce_norm_rows import all_reduce_norm_rows
from kernels.peers.exchange import PIECE_WORDS, exchange

PIECES = 64
Sum = tuple[Tensor, Tensor]  # normalized, and before the norm


class SimulatedRanks:
    """The LL buffers of one collective.

    Args:
        words: int64 words of a rank's buffer.
        spins: polls before a rank gives up.
    """

    def __init__(self, count: int, words: int, device: torch.device, spins: int = 3) -> None:
        self.count, self.spins = count, spins
        self.ll_buffers = [torch.zeros(words, dtype=torch.int64, device=device) for _ in range(count)]
        self.peers = torch.tensor([b.data_ptr() for b in self.ll_buffers], device=device)
        self.counts = [torch.zeros(2, 1, dtype=torch.int64, device=device) for _ in range(count)]
        self.status = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(count)]

    def timeouts(self) -> list[int]:
        return [int(s) for s in self.status]

    def given(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a rank's peers, count and status, for collectives with one count."""
        return self.peers, self.counts[rank][0], self.status[rank]


class Exchange(SimulatedRanks):
    """An exchange of heads by `shares`."""

    def __init__(self, shares: list[int], device: torch.device, spins: int = 3) -> None:
        W = len(shares)
        super().__init__(W, 2 * W * PIECES * PIECE_WORDS, device, spins)
        self.shares, self.starts = shares, torch.tensor([0, *shares]).cumsum(0).to(device, torch.int32)

    def run(self, rank: int, parts: tuple[Any, ...], like: Tensor, op: Any = exchange, **phase: bool) -> Tensor:
        """Returns a rank's heads [N, share, D] of all ranks' partials, with the dtype and rows of `like`."""
        result = torch.full((len(like), self.shares[rank], like.shape[2]), torch.nan).to(like)
        counts = self.counts[rank][0], self.counts[rank][1]
        options = dict(rank=rank, lanes=max(self.shares), pieces=PIECES, spins=self.spins)
        found: Tensor = op(*parts, result, self.starts, self.peers, counts, self.status[rank], **options, **phase)
        return found


class Sums(SimulatedRanks):
    """All-reduces of rows by one of the algorithms of `summed`."""

    def __init__(
        self, algorithm: str, count: int, device: torch.device, spins: int = 3, pieces: int = PIECES, size: int = 64
    ) -> None:
        words = {"rows": 4 * pieces * size, "long": pieces * (size + 4) // 4}
        super().__init__(count, words.get(algorithm, (2 * count + 2) * pieces * size), device, spins)
        self.algorithm, self.pieces, self.size = algorithm, pieces, size
        # Offsets of the buffers of sums, after those of partials; for long chunks the flags of both come last.
        begins = {
            "rows": (0, 16 * pieces * size),
            "long": (0, pieces * size, 2 * pieces * size, 2 * pieces * size + 4 * pieces),
        }
        self.tables = torch.stack([self.peers + b for b in begins.get(algorithm, (0, 16 * count * pieces * size))])
        kind = torch.int32 if algorithm == "long" else torch.int64
        self.own = [torch.zeros(pieces, dtype=kind, device=device) for _ in range(count)]

    def run(self, rank: int, x: Tensor, residual: Tensor | None, weight: Tensor, phases: int = 7) -> Sum:
        rest = self.own[rank], self.counts[rank][0], self.status[rank]
        sizes = dict(rank=rank, pieces=self.pieces, size=self.size, spins=self.spins, phases=phases)
        return summed(self.algorithm, x, residual, weight, self.tables, *rest, **sizes)

    def run_phases(self, parts: list[Tensor], residual: Tensor | None, weight: Tensor) -> list[Sum]:
        """Runs each phase on all ranks before the next one."""
        for phase in (1, 2, 4):
            got = [self.run(r, part, residual, weight, phase) for r, part in enumerate(parts)]
        return got


def summed(
    algorithm: str, x: Tensor, residual: Tensor | None, weight: Tensor, tables: Tensor, own: Tensor, count: Tensor,
    status: Tensor, *, rank: int, pieces: int, size: int, spins: int, phases: int = 7, emulated: bool = False,
) -> Sum:  # fmt: skip
    """Sums over ranks in one shot, in two shots, by rows (`pieces` of `size` words), or in long chunks (bytes)."""
    given = x, residual, weight, 1e-5, tables
    if algorithm == "long":
        return all_reduce_norm_long(
            *given, own, count, status, rank=rank, num_buffers=pieces, spins=spins, buffer_bytes=size, emulated=emulated
        )
    common = dict(rank=rank, spins=spins, phases=phases)
    if algorithm == "rows":
        return all_reduce_norm_rows(*given, count, status, rows=pieces, row_words=size, emulated=emulated, **common)
    shots = dict(pieces=pieces, slice_words=size, two_shot=algorithm == "two shots")
    return all_reduce_norm(*given, own, count, status, **shots, **common)


def check_sums(got: list[Sum], parts: Tensor, residual: Tensor | None, weight: Tensor, terms: int = 4) -> None:
    """Checks that all ranks have equal rows and sums, close to the reference for sums of up to `terms` terms."""
    dtype = weight.dtype
    wanted = rms_norm(parts.float().sum(0).to(dtype), weight, 1e-5, residual)
    # The reference rounds the sum once more before it adds the residual: an ulp of values up to 8, or 16 for 8 terms.
    unit = {torch.float32: 0.0, torch.float16: 2**-6, torch.bfloat16: 2**-3}[dtype]
    for mine in got:
        torch.testing.assert_close(mine, wanted, atol=max(1e-5, unit * terms / 4), rtol=0)
        assert torch.equal(mine[0], got[0][0]) and torch.equal(mine[1], got[0][1]), "ranks differ"


def emulated_sums(x: list[Tensor], ranks: tuple[int, int], world: int) -> list[Tensor]:
    """Emulates sums over a world with two processes, one rank each.

    Of every `world` rows, an owner adds its own to all but the other's, and sends that to all.
    """
    rows = [part.view(-1, world, part.shape[-1]) for part in x]
    owned, found = [], []
    for p in range(2):
        from_other = [to for to in range(world) if to != ranks[1 - p]]
        owned.append(rows[p][:, ranks[p]] + rows[1 - p][:, from_other].sum(1))
    for p in range(2):
        total = owned[1 - p][:, None].repeat(1, world, 1)
        total[:, ranks[p]] = owned[p]
        found.append(total.view_as(x[p]))
    return found


class ThreadRendezvous:
    """Gathers of ranks that are threads and run one at a time: they share the interpreter.

    Attributes:
        lock: held by the running rank.
    """

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.parts: list[Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        def gather(x: Tensor) -> Tensor:
            if x.is_cuda:
                torch.cuda.synchronize()
            self.parts[rank] = x.clone()
            self.lock.release()
            self.barrier.wait()
            found = torch.stack([part for part in self.parts if part is not None])
            self.barrier.wait()
            self.lock.acquire()
            return found

        return gather
