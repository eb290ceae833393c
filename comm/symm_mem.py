"""Communicator between GPUs of one host that store into each other's memory: one small kernel per collective.

A decode step sends kilobytes, for which an NCCL call costs more than the transfer. These kernels store tagged words
(NCCL's LL protocol: `kernels.peers.ll_protocol`) into torch's symmetric memory, without multicast, and fuse the
operation that follows: merge, add, normalize. All-reduces of long chunks use flags instead of tags. Other messages too
large for the LL buffers, mostly of prefill, go over NCCL.

Each collective has its own LL buffers and may run on one stream only; the exchange may use another stream than the
rest. All-reduces of long chunks need the whole GPU (`single_stream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from comm.partial import PartialSum, materialize
from comm.torch_dist import TorchDistCommunicator
from kernels.attention.split_kv import PartialAttention, UnmergedAttention
from kernels.peers import all_gather, all_reduce_norm, exchange, ll_protocol, reduce_scatter
from kernels.peers.all_reduce_norm_long import BUFFER_BYTES, all_reduce_norm_long, fits, rows_per_buffer
from kernels.peers.all_reduce_norm_rows import ROW_WORDS, all_reduce_norm_rows
from kernels.peers.ll_protocol import SumTarget
from kernels.peers.merge_states_exchange import merge_states_exchange

EXCHANGE_PIECES = 1024  # tokens x heads of a rank
ONE_SHOT_PIECES = 256  # rows x slices: 256 KiB
TWO_SHOT_PIECES = 512  # CTAs that wait for each other: all must be resident at once
MAX_ROWS = 256  # rows of an all-reduce with one CTA per row
MAX_ROW_GROUPS = 1024  # groups of rows of a long chunk, 32 KiB each: 32 MiB for summands, 32 MiB for sums
MAX_ONE_SHOT_BYTES = 256 << 10  # bytes of the rows times ranks; above, two shots are faster (benchmarks/LOG.md)
GATHER_PIECES = 512  # slices: 512 KiB
SCATTER_PIECES = 512  # slices of a rank's rows: 512 KiB
MIN_POLL_S = 3e-7  # shortest poll of an LL buffer
WORD_BYTES = 8  # a word with its tag
SLICE_BYTES = all_reduce_norm.SLICE_WORDS * WORD_BYTES
# Bytes of one source's LL buffer, by collective.
SOURCE_BYTES = {
    "exchange": EXCHANGE_PIECES * exchange.PIECE_WORDS * WORD_BYTES,
    "one_shot": ONE_SHOT_PIECES * SLICE_BYTES,
    "two_shot": TWO_SHOT_PIECES * SLICE_BYTES,
    "sums": TWO_SHOT_PIECES * SLICE_BYTES,
    "gather": GATHER_PIECES * all_gather.SLICE_WORDS * WORD_BYTES,
    "scatter": SCATTER_PIECES * reduce_scatter.SLICE_WORDS * WORD_BYTES,
}
ROW_BYTES = ROW_WORDS * WORD_BYTES


class SymmMemCommunicator(TorchDistCommunicator):
    """`TorchDistCommunicator` over NCCL, with kernels of this project for the small collectives of decode steps.

    Args:
        kvp_groups, device, timeout: see `TorchDistCommunicator`; all ranks on one host, with peer access.

    Raises:
        RuntimeError: symmetric memory cannot be set up.
    """

    fuses_all_reduce_norm = True
    _is_emulated = False  # whether some peers are absent

    def __init__(self, kvp_groups: Sequence[Sequence[int]], device: torch.device | str, timeout: timedelta) -> None:
        super().__init__(kvp_groups, device, timeout)
        self._spins = int(min(timeout.total_seconds() / MIN_POLL_S, 2**31 - 1))
        sources = dict.fromkeys(SOURCE_BYTES, self.world_size) | {"exchange": len(self.kvp_group), "sums": 1}
        # Double-buffered: two epochs of each, one after the other.
        sizes = {name: 2 * sources[name] * SOURCE_BYTES[name] for name in SOURCE_BYTES}
        sizes |= dict.fromkeys(("rows", "row_sums"), 2 * self._max_rows * ROW_BYTES)
        sizes |= dict.fromkeys(("long", "long_sums"), self._max_row_groups * BUFFER_BYTES)
        sizes |= dict.fromkeys(("long_flags", "long_sum_flags"), MAX_ROW_GROUPS * 4)
        *offsets, size = accumulate(sizes.values(), initial=0)
        try:
            self._ll_buffer = symm_mem.empty(size // WORD_BYTES, dtype=torch.int64, device=self.device)
            handle = symm_mem.rendezvous(self._ll_buffer, _world())
        except RuntimeError as error:
            raise RuntimeError(
                f"the GPUs of this host cannot share {size} bytes of memory ({error}): set comm.backend=nccl"
            ) from error
        addresses = self._addresses(handle.buffer_ptrs, dict(zip(sizes, offsets, strict=True)))
        tables = {name: torch.tensor(table, dtype=torch.int64, device=self.device) for name, table in addresses.items()}
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
        self._seen = torch.zeros(self._max_row_groups, dtype=torch.int32, device=self.device)
        self._status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._check_stream = torch.cuda.Stream(self.device)
        self.reset()

    @property
    def _max_rows(self) -> int:
        # A multiple of the ranks: every owner has the same number of rows.
        return MAX_ROWS // self.world_size * self.world_size

    @property
    def _max_row_groups(self) -> int:
        return MAX_ROW_GROUPS // self.world_size * self.world_size

    def _addresses(self, buffer_ptrs: Sequence[int], offsets: Mapping[str, int]) -> dict[str, list[int]]:
        # `offsets`: of each collective's buffer in a process's memory.
        ranks = {name: range(self.world_size) for name in offsets} | {"exchange": self.kvp_group}
        return {name: [buffer_ptrs[r] + begin for r in ranks[name]] for name, begin in offsets.items()}

    def reset(self) -> None:
        """Clears all LL buffers after a step that some rank did not finish: a collective, with no other in flight."""
        torch.cuda.synchronize(self.device)
        self.barrier()
        for tensor in (self._ll_buffer, self._seen, self._status, *self._counts.values(), *self._squares.values()):
            tensor.zero_()
        torch.cuda.synchronize(self.device)
        self.barrier()

    def check(self, wait: bool = True) -> None:
        with torch.cuda.stream(None if wait else self._check_stream):
            missing = int(self._status) - 1
        if missing >= 0:
            peer = (
                missing
                if missing < exchange.GROUP_RANK_OFFSET
                else self.kvp_group[missing - exchange.GROUP_RANK_OFFSET]
            )
            raise RuntimeError(
                f"rank {self.rank} waited {self._timeout.total_seconds():.0f} s (comm.timeout_s) for rank {peer} in a "
                "collective: that rank failed or hangs, or comm.timeout_s is too small"
            )

    def all_gather(self, x: Tensor) -> Tensor:
        return self._ll_all_gather(x) if self._gather_fits_ll_buffers(x) else super().all_gather(x)

    def gather_rows(self, x: Tensor) -> Tensor:
        if self._gather_fits_ll_buffers(x) and x[0].numel() * x.element_size() % 4 == 0:
            return self._ll_all_gather(x, interleave=True)
        return super().gather_rows(x)

    def _gather_fits_ll_buffers(self, x: Tensor) -> bool:
        size = x.numel() * x.element_size()
        return self.world_size > 1 and size % 4 == 0 and 0 < size <= GATHER_PIECES * all_gather.SLICE_WORDS * 4

    def _ll_all_gather(self, x: Tensor, interleave: bool = False) -> Tensor:
        return all_gather.all_gather(
            x.contiguous(), self._peers["gather"], self._counts["gather"], self._status,
            rank=self.rank, pieces=GATHER_PIECES, spins=self._spins, interleave=interleave,
        )  # fmt: skip

    def reduce_scatter(self, x: Tensor) -> Tensor:
        size = x[0].numel() * x.element_size()
        fit = 0 < size <= SCATTER_PIECES * reduce_scatter.SLICE_WORDS * 4 and size % 4 == 0
        if self.world_size == 1 or not fit or x.dtype not in ll_protocol.DTYPES:
            return super().reduce_scatter(x)
        return reduce_scatter.reduce_scatter(
            x, self._peers["scatter"], self._counts["scatter"], self._status,
            rank=self.rank, pieces=SCATTER_PIECES, spins=self._spins,
        )  # fmt: skip

    def exchange(self, out: Tensor, lse: Tensor, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        N, _, D = out.shape
        lanes = max(shares)
        # Whole 4-byte words.
        whole = not any(size * out.element_size() % 4 for size in (*out.stride()[:2], out.storage_offset()))
        if out.stride(2) != 1 or not whole or not self._fits_ll_buffers(N, D, out.dtype, shares):
            return super().exchange(out, lse, shares, result)
        self._check_partials(out, lse, shares)
        return exchange.exchange(
            out, lse, self._result(out, N, shares, result), self._head_offsets_of(shares), self._peers["exchange"],
            (self._counts["sent"], self._counts["received"]), self._status,
            rank=self.kvp_rank, lanes=lanes, pieces=EXCHANGE_PIECES, spins=self._spins,
        )  # fmt: skip

    def merge_states_exchange(
        self, partial: PartialAttention, shares: Sequence[int], result: Tensor | None = None
    ) -> Tensor:
        N, D, dtype = partial.lse.shape[:-1].numel(), partial.out.shape[-1], partial.out.dtype
        if not isinstance(partial, UnmergedAttention):
            return self.exchange(*partial.merge_states(), shares, result)
        if not self._fits_ll_buffers(N, D, dtype, shares):
            return super().merge_states_exchange(partial, shares, result)
        return merge_states_exchange(
            partial, self._result(partial.out, N, shares, result), self._head_offsets_of(shares),
            self._peers["exchange"], (self._counts["sent"], self._counts["received"]), self._status,
            rank=self.kvp_rank, lanes=max(shares), pieces=EXCHANGE_PIECES, spins=self._spins,
        )  # fmt: skip

    def takes_sms(self, N: int, D: int, dtype: torch.dtype, shares: Sequence[int]) -> bool:
        return not self._fits_ll_buffers(N, D, dtype, shares)

    def _result(self, out: Tensor, N: int, shares: Sequence[int], result: Tensor | None) -> Tensor:
        return out.new_empty(N, shares[self.kvp_rank], out.shape[-1]) if result is None else result

    def _fits_ll_buffers(self, N: int, D: int, dtype: torch.dtype, shares: Sequence[int]) -> bool:
        words, rest = divmod(D * dtype.itemsize, 4)
        fit = rest == 0 and words < exchange.PIECE_WORDS and 0 < N * max(shares) <= EXCHANGE_PIECES
        return fit and dtype in ll_protocol.DTYPES and len(self.kvp_group) > 1

    def all_reduce_norm(
        self, x: Tensor | PartialSum, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows = x if isinstance(x, Tensor) else residual  # has the shape and dtype of the sum
        algo = None if rows is None else self._sum_algo(rows)
        if rows is None or algo is None:
            return super().all_reduce_norm(x, residual, weight, eps)
        if algo == "rows":
            return all_reduce_norm_rows(
                materialize(x), residual, weight, eps, self._peers[algo], self._counts[algo], self._status,
                rank=self.rank, rows=self._max_rows, spins=self._spins, emulated=self._is_emulated,
            )  # fmt: skip
        if algo == "long":
            return all_reduce_norm_long(
                materialize(x), residual, weight, eps, self._peers[algo], self._seen, self._counts[algo], self._status,
                rank=self.rank, num_buffers=self._max_row_groups, spins=self._spins, emulated=self._is_emulated,
            )  # fmt: skip
        phases, two_shot, pieces = 7, algo == "two_shot", len(self._squares[algo])
        if not isinstance(x, Tensor):
            if x.can_push(two_shot):
                ll_buffers = self._peers[algo][0], self._counts[algo], self.rank, pieces, all_reduce_norm.SLICE_WORDS
                x.push(SumTarget(*ll_buffers, two_shot))
                phases = 6
            else:
                rows = x.compute()
        return all_reduce_norm.all_reduce_norm(
            rows, residual, weight, eps, self._peers[algo], self._squares[algo], self._counts[algo], self._status,
            rank=self.rank, pieces=pieces, spins=self._spins, two_shot=two_shot, phases=phases,
        )  # fmt: skip

    def _sum_algo(self, x: Tensor) -> str | None:
        """Selects the all-reduce algorithm: "one_shot", "two_shot", "rows", "long", or None for NCCL."""
        size = x.numel() * x.element_size()
        row, rest = divmod(x.shape[1] * x.element_size(), 4)
        pieces = len(x) * -(-row // all_reduce_norm.SLICE_WORDS)
        if self.world_size == 1 or pieces == 0 or rest or x.dtype not in ll_protocol.DTYPES:
            return None
        if pieces > TWO_SHOT_PIECES:
            if row <= ROW_WORDS and len(x) <= self._max_rows and self._divides(len(x), True):
                return "rows"
            if not (self.single_stream and fits(x, self._max_row_groups)):
                return None
            groups, rest = divmod(len(x), rows_per_buffer(x.shape[1], x.element_size()))
            return "long" if self._divides(groups + (rest > 0), rest == 0) else None
        spreads = self._divides(pieces, row % all_reduce_norm.SLICE_WORDS == 0)
        if pieces <= ONE_SHOT_PIECES and (size * self.world_size <= MAX_ONE_SHOT_BYTES or not spreads):
            return "one_shot"
        return "two_shot" if spreads else None

    def _divides(self, pieces: int, equal_sizes: bool) -> bool:
        # Whether owners can share these pieces, of one size if `equal_sizes`; emulated ranks restrict it.
        return True

    def close(self) -> None:
        if self._gloo is not None:  # peers may still read this rank's buffers
            torch.cuda.synchronize(self.device)
            self.barrier()
        super().close()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
