"""Emulates two ranks of a larger world on one or two GPUs, to time its steps without the hardware.

Each of two processes emulates one rank of W: it holds that rank's weights and KV, runs its kernels, and sends its
messages. All messages to other ranks go to the other process, which receives them as if from the absent ranks: every LL
buffer that a kernel polls is filled once per epoch, and each direction of a GPU's link carries as many bytes as with W
ranks. A single process sends to itself, and no link is crossed.

A message to rank `to` arrives as if from rank `to`; messages between the two emulated ranks keep their sender. So two
processes that emulate two ranks compute exactly what two ranks compute.

The owner of every W-th row hence adds up W different rows, and all of these get one sum. From some 37 rows on, where
owners reduce whole rows, a rank takes its own row W times in place of what it receives: otherwise W rows would have one
hidden state, select the same experts, and read too few. Slices of fewer rows stay mixed: with hidden size 2048 and
eight ranks two rows have one state.

Output tokens are meaningless. Most of the vocabulary is on no process, and tokens without a row have zero embeddings,
so benchmarks draw from rank 0's share (`benchmarks.ranks.synthetic.vocab_held`). Times lack two effects of W GPUs: more
ranks to wait for, and a busier switch. Where slices of rows do not divide evenly among owners, or differ in size
(hidden size 2880), they are reduced in one shot, or by NCCL if there are too many; messages that exceed the LL buffers
go over NCCL, too. The bytes are the same. Decode steps of 1 to 8 and 32 rows send no such messages. In mode dp the rows
gathered from absent ranks repeat the rows of the two processes, so they select fewer experts than W ranks' rows would:
MoE steps are too short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from comm.base import T
from comm.symm_mem import ROW_BYTES, SLICE_BYTES, SOURCE_BYTES, SymmMemCommunicator
from comm.torch_dist import ProcessGroups, TorchDistCommunicator
from kernels.peers.all_reduce_norm_long import BUFFER_BYTES

PROCESSES = 2  # at most
MIN_SEPARATE_BYTES = 16 << 20  # from here on, one message per rank is faster than copying them into one


def is_emulated(ranks: int) -> bool:
    """Returns whether GPUs emulate the ranks: there are GPUs, but fewer than ranks."""
    return 0 < torch.cuda.device_count() < ranks


def emulating_processes() -> int:
    """Counts the processes that emulate ranks on this host."""
    return min(PROCESSES, torch.cuda.device_count())


def rank_of(process: int, processes: int, world_size: int) -> int:
    """Returns the rank that a process emulates: the first of all, or the first of the second half."""
    return process * (world_size // processes)


def peer_addresses(
    ranks: int, mine: int, theirs: int, local_base: int, peer_base: int, source_bytes: int, piece_bytes: int = 0
) -> list[int]:
    """Returns the LL buffer address per destination rank, for rank `mine` and another process that emulates `theirs`.

    A kernel writes into the buffer of source `mine` at the address of rank `to`. All addresses except `mine` point
    to the other process. Entry `to` is shifted so that the write lands where that process expects source `to`; entry
    `theirs`, where it expects source `mine`.

    Args:
        local_base, peer_base: addresses of this process's buffers and of the other's.
        source_bytes: stride between the buffers of two sources.
        piece_bytes: stride between pieces if destinations own them (rank r owns every `ranks`-th); the write goes to
            the pieces of `theirs`. 0: pieces have no owner.
    """
    return [
        local_base if to == mine else peer_base + (source - mine) * source_bytes + (theirs - to) * piece_bytes
        for to, source in enumerate(mine if to == theirs else to for to in range(ranks))
    ]


class EmulatedTransport(TorchDistCommunicator):
    """`TorchDistCommunicator` for a process that emulates one of the W ranks in `kvp_groups`.

    `all_gather_object` returns the emulated rank's object for every absent rank in its half of the world.
    """

    def _rank_and_world_size(self, kvp_groups: Sequence[Sequence[int]]) -> tuple[int, int]:
        world_size, self._process, self._processes = sum(map(len, kvp_groups)), dist.get_rank(), dist.get_world_size()
        assert self._processes <= min(PROCESSES, world_size), f"{self._processes} processes for {world_size} ranks"
        self._peer_process = self._processes - 1 - self._process
        return rank_of(self._process, self._processes, world_size), world_size

    def _create_groups(self, world: dist.ProcessGroup, kvp_groups: Sequence[Sequence[int]]) -> ProcessGroups:
        self._peer_rank = rank_of(self._peer_process, self._processes, self.world_size)
        self._peer_kvp_rank = next(
            list(group).index(self._peer_rank) for group in kvp_groups if self._peer_rank in group
        )
        return ProcessGroups(world, None)

    def _swap(self, x: Tensor, received: Tensor | None = None) -> Tensor:
        # Contiguous, the same shape in both processes.
        received, sizes = torch.empty_like(x) if received is None else received, [0] * self._processes
        sizes[self._peer_process] = x.numel()
        dist.all_to_all_single(received.view(-1), x.view(-1), sizes, sizes, group=self._groups.world)
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds W - 1 times the peer's tensor; a second message makes up for a ring's bytes, 2 (W - 1) / W."""
        other, W = self._swap(x), self.world_size
        if rest := x.numel() * (W - 2) // W:
            self._swap(x.view(-1)[:rest])
        return x.add_(other, alpha=W - 1)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gather(x, self.world_size, self.rank)

    def gather_in_group(self, x: Tensor) -> Tensor:
        return self._gather(x, len(self.kvp_group), self.kvp_rank)

    def _gather(self, x: Tensor, ranks: int, mine: int) -> Tensor:
        out = x.new_empty(ranks, *x.shape)
        if x.nbytes > MIN_SEPARATE_BYTES:
            x = x.contiguous()
            for row in range(ranks):
                if row != mine:
                    self._swap(x, out[row])
        elif ranks > 1:
            self._swap(x.expand(ranks - 1, *x.shape).contiguous(), out[1:])
            out[0].copy_(out[1])  # so that only row `mine` is this rank's
        out[mine].copy_(x)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._swap_parts(x.contiguous(), self.rank, self._peer_rank).sum(0)

    def all_to_all(self, send: Tensor) -> Tensor:
        return self._swap_parts(send, self.kvp_rank, self._peer_kvp_rank)

    def _swap_parts(self, send: Tensor, mine: int, theirs: int) -> Tensor:
        # Keeps part `mine` and swaps the others, as `peer_addresses` does, without copies: W GPUs make none either.
        # One of the two emulated ranks is the first of its group, so both see the same runs of parts between them.
        received = torch.empty_like(send)
        received[mine] = send[mine]
        if mine == theirs:
            if len(send) > 1:
                self._swap(send[1:], received[1:])
            return received
        last = max(mine, theirs)
        runs = [run for run in (slice(theirs, theirs + 1), slice(1, last), slice(last + 1, None)) if len(send[run])]
        group = self._groups.world
        operations = [dist.P2POp(dist.isend, send[run], self._peer_process, group) for run in runs]
        operations += [dist.P2POp(dist.irecv, received[run], self._peer_process, group) for run in runs]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def all_gather_object(self, obj: T) -> list[T]:
        gathered = super().all_gather_object(obj)
        half = self.world_size // self._processes
        return [gathered[min(rank // half, self._processes - 1)] for rank in range(self.world_size)]


class EmulatedCommunicator(SymmMemCommunicator, EmulatedTransport):
    """`SymmMemCommunicator` whose peer addresses all point to one of the real processes."""

    def _addresses(self, buffer_ptrs: Sequence[int], offsets: Mapping[str, int]) -> dict[str, list[int]]:
        local_base, peer_base = buffer_ptrs[self._process], buffer_ptrs[self._peer_process]
        group_ranks = dict.fromkeys(offsets, (self.world_size, self.rank, self._peer_rank))
        group_ranks["exchange"] = len(self.kvp_group), self.kvp_rank, self._peer_kvp_rank
        # A rank owns one of every W pieces and sends its sum to all ranks, here to the pieces that they own.
        sizes = {name: (SOURCE_BYTES[name], 0) for name in SOURCE_BYTES}
        sizes |= {"two_shot": (SOURCE_BYTES["two_shot"], SLICE_BYTES), "sums": (SLICE_BYTES, 0)}
        sizes |= {"rows": (self._max_rows // self.world_size * ROW_BYTES, 0), "row_sums": (ROW_BYTES, 0)}
        groups = self._max_row_groups // self.world_size
        sizes |= {"long": (groups * BUFFER_BYTES, 0), "long_sums": (BUFFER_BYTES, 0)}
        sizes |= {"long_flags": (groups * 4, 0), "long_sum_flags": (4, 0)}
        return {
            name: peer_addresses(*group_ranks[name], local_base + begin, peer_base + begin, *sizes[name])
            for name, begin in offsets.items()
        }

    @property
    def _is_emulated(self) -> bool:  # type: ignore[override]
        return self._processes < self.world_size

    def _divides(self, pieces: int, equal_sizes: bool) -> bool:
        # Else a rank would wait for a piece that the emulated rank does not own, or for words beyond a shorter piece.
        return equal_sizes and pieces % self.world_size == 0
