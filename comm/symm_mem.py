"""Communicator between GPUs of one host that store into each other's memory: one small kernel per collective.

A decode step sends kilobytes, for which a library call costs more than the transfer. The kernels behind this class
store tagged words (`kernels.peers.mailbox`) into torch's symmetric memory, without multicast, and fuse the operation
that follows: combine, add, normalise. The sums of long chunks do the same with flags in place of tags. Other messages
too large for their boxes, mostly of prefill, go over NCCL.

Each collective has its own boxes, whose uses are ordered on every rank: the exchange may run on another stream than
the rest, but no collective on two streams. Sums of long chunks need all of the GPU (`alone`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from comm.pending import PendingSum, computed
from comm.torch_dist import TorchDistCommunicator
from kernels.attention.split_kv import PartialAttention, UnmergedAttention
from kernels.peers import all_gather, all_reduce_norm, exchange, mailbox, reduce_scatter
from kernels.peers.all_reduce_norm_long import BOX, all_reduce_norm_long, fits, rows_of_group
from kernels.peers.all_reduce_norm_rows import ROW_WORDS, all_reduce_norm_rows
from kernels.peers.mailbox import SumTarget
from kernels.peers.merge_exchange import merge_exchange

EXCHANGE_PIECES = 1024  # tokens x heads that a rank owns
ONE_SHOT_PIECES = 256  # rows x slices: 256 KiB
TWO_SHOT_PIECES = 512  # programs that wait for each other: all of them must be on the GPU at once
ROWS = 256  # of sums whose programs take a row each
GROUPS = 1024  # of rows of long chunks, 32 KiB each, that have boxes: 32 MiB of parts, and of sums
ONE_SHOT_SENT = 256 << 10  # bytes of the rows times ranks; above, two shots cost less (benchmarks/LOG.md)
GATHER_PIECES = 512  # slices: 512 KiB
SCATTER_PIECES = 512  # slices of a rank's rows: 512 KiB
LOOK_S = 3e-7  # least seconds of one poll of a box
WORD = 8  # bytes of a word with its tag
SLICE = all_reduce_norm.SLICE_WORDS * WORD
# Bytes of one source's boxes, by collective.
SOURCE = {
    "exchange": EXCHANGE_PIECES * exchange.PIECE_WORDS * WORD,
    "one_shot": ONE_SHOT_PIECES * SLICE,
    "two_shot": TWO_SHOT_PIECES * SLICE,
    "sums": TWO_SHOT_PIECES * SLICE,
    "gather": GATHER_PIECES * all_gather.SLICE_WORDS * WORD,
    "scatter": SCATTER_PIECES * reduce_scatter.SLICE_WORDS * WORD,
}
ROW = ROW_WORDS * WORD


class SymmMemCommunicator(TorchDistCommunicator):
    """`TorchDistCommunicator` over NCCL, with the small collectives of decode steps in our own kernels.

    Args:
        kvp_groups, device, timeout: see `TorchDistCommunicator`; all ranks on one host, with peer access.

    Raises:
        RuntimeError: symmetric memory cannot be set up.
    """

    sums_at_once = True

    def __init__(self, kvp_groups: Sequence[Sequence[int]], device: torch.device | str, timeout: timedelta) -> None:
        super().__init__(kvp_groups, device, timeout)
        self._spins = int(min(timeout.total_seconds() / LOOK_S, 2**31 - 1))
        sources = dict.fromkeys(SOURCE, self.world_size) | {"exchange": len(self.kvp_group), "sums": 1}
        # Double-buffered: two turns of each, one behind the other.
        sizes = {name: 2 * sources[name] * SOURCE[name] for name in SOURCE}
        sizes |= dict.fromkeys(("rows", "row_sums"), 2 * self._rows * ROW)
        sizes |= dict.fromkeys(("long", "long_sums"), self._long * BOX)
        sizes |= dict.fromkeys(("long_flags", "long_sum_flags"), GROUPS * 4)
        *begins, size = accumulate(sizes.values(), initial=0)
        try:
            self._boxes = symm_mem.empty(size // WORD, dtype=torch.int64, device=self.device)
            handle = symm_mem.rendezvous(self._boxes, _world())
        except RuntimeError as error:
            raise RuntimeError(
                f"the GPUs of this host cannot share {size} bytes of memory ({error}): use comm.backend=nccl"
            ) from error
        at = self._addresses(handle.buffer_ptrs, dict(zip(sizes, begins, strict=True)))
        tables = {name: torch.tensor(table, dtype=torch.int64, device=self.device) for name, table in at.items()}
        self._peers = {name: tables[name] for name in ("exchange", "gather", "scatter")}
        self._peers |= {
            "one_shot": tables["one_shot"][None],
            "two_shot": torch.stack((tables["two_shot"], tables["sums"])),
            "rows": torch.stack((tables["rows"], tables["row_sums"])),
            "long": torch.stack([tables[f"long{name}"] for name in ("", "_sums", "_flags", "_sum_flags")]),
        }
        names = "sent", "received", "one_shot", "two_shot", "rows", "long", "gather", "scatter"
        self._counts = {name: torch.zeros(1, dtype=torch.int64, device=self.device) for name in names}
        self._squares = {
            name: torch.zeros(pieces, dtype=torch.int64, device=self.device)
            for name, pieces in (("one_shot", ONE_SHOT_PIECES), ("two_shot", TWO_SHOT_PIECES))
        }
        self._seen = torch.zeros(self._long, dtype=torch.int32, device=self.device)
        self._status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._aside = torch.cuda.Stream(self.device)
        self.reset()

    @property
    def _rows(self) -> int:
        """Most rows that have boxes of their own, as many for each owner."""
        return ROWS // self.world_size * self.world_size

    @property
    def _long(self) -> int:
        """Groups of rows of long chunks that have boxes, as many for each owner."""
        return GROUPS // self.world_size * self.world_size

    def _addresses(self, memory: Sequence[int], begins: Mapping[str, int]) -> dict[str, list[int]]:
        """Returns the box address of each rank by collective, given its offset (`begins`) in a process's `memory`."""
        ranks = {name: range(self.world_size) for name in begins} | {"exchange": self.kvp_group}
        return {name: [memory[r] + begin for r in ranks[name]] for name, begin in begins.items()}

    def reset(self) -> None:
        """Empties all boxes after a step that some rank did not finish; a collective; no other may be in flight."""
        torch.cuda.synchronize(self.device)
        self.barrier()
        for tensor in (self._boxes, self._seen, self._status, *self._counts.values(), *self._squares.values()):
            tensor.zero_()
        torch.cuda.synchronize(self.device)
        self.barrier()

    def check(self, wait: bool = True) -> None:
        with torch.cuda.stream(None if wait else self._aside):
            missing = int(self._status) - 1
        if missing >= 0:
            peer = missing if missing < exchange.IN_GROUP else self.kvp_group[missing - exchange.IN_GROUP]
            raise RuntimeError(
                f"rank {self.rank} waited {self._timeout.total_seconds():.0f} s (comm.timeout_s) for rank {peer} "
                "in a collective: it failed, hangs or is slower than that"
            )

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gathered_in_boxes(x) if self._gathers_in_boxes(x) else super().all_gather(x)

    def gather_rows(self, x: Tensor) -> Tensor:
        if self._gathers_in_boxes(x) and x[0].numel() * x.element_size() % 4 == 0:
            return self._gathered_in_boxes(x, beside=True)
        return super().gather_rows(x)

    def _gathers_in_boxes(self, x: Tensor) -> bool:
        size = x.numel() * x.element_size()
        return self.world_size > 1 and size % 4 == 0 and 0 < size <= GATHER_PIECES * all_gather.SLICE_WORDS * 4

    def _gathered_in_boxes(self, x: Tensor, beside: bool = False) -> Tensor:
        return all_gather.all_gather(
            x.contiguous(), self._peers["gather"], self._counts["gather"], self._status,
            rank=self.rank, pieces=GATHER_PIECES, spins=self._spins, beside=beside,
        )  # fmt: skip

    def reduce_scatter(self, x: Tensor) -> Tensor:
        size = x[0].numel() * x.element_size()
        fit = 0 < size <= SCATTER_PIECES * reduce_scatter.SLICE_WORDS * 4 and size % 4 == 0
        if self.world_size == 1 or not fit or x.dtype not in mailbox.DTYPES:
            return super().reduce_scatter(x)
        return reduce_scatter.reduce_scatter(
            x, self._peers["scatter"], self._counts["scatter"], self._status,
            rank=self.rank, pieces=SCATTER_PIECES, spins=self._spins,
        )  # fmt: skip

    def exchange(self, out: Tensor, lse: Tensor, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        N, _, D = out.shape
        lanes = max(shares)
        whole = not any(size * out.element_size() % 4 for size in (*out.stride()[:2], out.storage_offset()))  # words
        if out.stride(2) != 1 or not whole or not self._boxes_take(N, D, out.dtype, shares):
            return super().exchange(out, lse, shares, result)
        self._check_partials(out, lse, shares)
        return exchange.exchange(
            out, lse, self._result(out, N, shares, result), self._starts_of(shares), self._peers["exchange"],
            (self._counts["sent"], self._counts["received"]), self._status,
            rank=self.kvp_rank, lanes=lanes, pieces=EXCHANGE_PIECES, spins=self._spins,
        )  # fmt: skip

    def merge_exchange(self, partial: PartialAttention, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        N, D, dtype = partial.lse.shape[:-1].numel(), partial.out.shape[-1], partial.out.dtype
        if not isinstance(partial, UnmergedAttention):
            return self.exchange(*partial.merge(), shares, result)
        if not self._boxes_take(N, D, dtype, shares):
            return super().merge_exchange(partial, shares, result)
        return merge_exchange(
            partial, self._result(partial.out, N, shares, result), self._starts_of(shares),
            self._peers["exchange"], (self._counts["sent"], self._counts["received"]), self._status,
            rank=self.kvp_rank, lanes=max(shares), pieces=EXCHANGE_PIECES, spins=self._spins,
        )  # fmt: skip

    def takes_sms(self, N: int, D: int, dtype: torch.dtype, shares: Sequence[int]) -> bool:
        return not self._boxes_take(N, D, dtype, shares)

    def _result(self, out: Tensor, N: int, shares: Sequence[int], result: Tensor | None) -> Tensor:
        return out.new_empty(N, shares[self.kvp_rank], out.shape[-1]) if result is None else result

    def _boxes_take(self, N: int, D: int, dtype: torch.dtype, shares: Sequence[int]) -> bool:
        """Returns whether the partials of N tokens, D values per head, fit the boxes of the exchange."""
        words, rest = divmod(D * dtype.itemsize, 4)
        fit = rest == 0 and words < exchange.PIECE_WORDS and 0 < N * max(shares) <= EXCHANGE_PIECES
        return fit and dtype in mailbox.DTYPES and len(self.kvp_group) > 1

    def all_reduce_norm(
        self, x: Tensor | PendingSum, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows = x if isinstance(x, Tensor) else residual  # has the shape and dtype of the sum
        way = None if rows is None else self._way(rows)
        if rows is None or way is None:
            return super().all_reduce_norm(x, residual, weight, eps)
        if way == "rows":
            return all_reduce_norm_rows(
                computed(x), residual, weight, eps, self._peers[way], self._counts[way], self._status,
                rank=self.rank, rows=self._rows, spins=self._spins,
            )  # fmt: skip
        if way == "long":
            return all_reduce_norm_long(
                computed(x), residual, weight, eps, self._peers[way], self._seen, self._counts[way], self._status,
                rank=self.rank, room=self._long, spins=self._spins,
            )  # fmt: skip
        phases, two_shot, pieces = 7, way == "two_shot", len(self._squares[way])
        if not isinstance(x, Tensor):
            if x.can_push(two_shot):
                boxes = self._peers[way][0], self._counts[way], self.rank, pieces, all_reduce_norm.SLICE_WORDS
                x.push(SumTarget(*boxes, two_shot))
                phases = 6
            else:
                rows = x.compute()
        return all_reduce_norm.all_reduce_norm(
            rows, residual, weight, eps, self._peers[way], self._squares[way], self._counts[way], self._status,
            rank=self.rank, pieces=pieces, spins=self._spins, two_shot=two_shot, phases=phases,
        )  # fmt: skip

    def _way(self, x: Tensor) -> str | None:
        """Chooses the algorithm that adds rows up: "one_shot", "two_shot", "rows", "long", or None for NCCL."""
        size = x.numel() * x.element_size()
        row, rest = divmod(x.shape[1] * x.element_size(), 4)
        pieces = len(x) * -(-row // all_reduce_norm.SLICE_WORDS)
        if self.world_size == 1 or pieces == 0 or rest or x.dtype not in mailbox.DTYPES:
            return None
        if pieces > TWO_SHOT_PIECES:
            if row <= ROW_WORDS and len(x) <= self._rows and self._spreads(len(x), True):
                return "rows"
            if not (self.alone and fits(x, self._long)):
                return None
            groups, rest = divmod(len(x), rows_of_group(x.shape[1], x.element_size()))
            return "long" if self._spreads(groups + (rest > 0), rest == 0) else None
        spreads = self._spreads(pieces, row % all_reduce_norm.SLICE_WORDS == 0)
        if pieces <= ONE_SHOT_PIECES and (size * self.world_size <= ONE_SHOT_SENT or not spreads):
            return "one_shot"
        return "two_shot" if spreads else None

    def _spreads(self, pieces: int, alike: bool) -> bool:
        """Returns whether owners can share these pieces of rows, or rows; `alike`: all have one size."""
        return True

    def close(self) -> None:
        if self._gloo is not None:  # peers may still read this rank's boxes
            torch.cuda.synchronize(self.device)
            self.barrier()
        super().close()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
