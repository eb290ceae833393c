"""The `Communicator` interface, and the Helix exchange built on it.

The exchange turns "all heads over my KV shard" into "my heads over the whole KV sequence" (Helix Parallelism,
section 2.1.2). It is one all-to-all in the kvp group, with one message per destination rank:

    [ outputs  N x hmax x D, model dtype | gap | LSE  N x hmax, fp32 | gap ]        hmax = max(shares)

Rank k uses the first shares[k] lanes; the rest pads all messages to one size. The gaps align outputs and LSEs for
16-byte vector loads. Every rank of the group takes part in every exchange, even with no tokens or a share of zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from comm.partial import PartialSum, materialize
from kernels.attention.merge_states import merge_states
from kernels.attention.merge_states_pack import merge_states_pack
from kernels.attention.split_kv import PartialAttention
from kernels.dense.rms_norm import rms_norm

T = TypeVar("T")


@dataclass(frozen=True)
class PackedPartials:
    """The messages that a rank sends in an exchange.

    Attributes:
        packed: uint8 [K, bytes]; row k goes to kvp rank k.
        shape: tokens, lanes, head size and dtype of the packed partials.
    """

    packed: Tensor
    shape: tuple[int, int, int, torch.dtype]


class Communicator(ABC):
    """A rank's handle to its peers: every collective and control message goes through it.

    Tensor collectives run on the current stream of `device`, allocate their results, and must be called by all ranks
    of the group in the same order. The control plane (objects, barrier) runs on the CPU, with a longer timeout than
    the collectives, since rank 0's host may be busy with something else.

    Args:
        kvp_group: world ranks that hold the same heads and split the KV sequence, in kvp order; contains `rank`.

    Attributes:
        capturable: whether CUDA graphs can capture the tensor collectives.
        wire_rate: assumed bandwidth from a rank to all its peers together, bytes/s, beyond the first kilobytes.
        micro_batch: the micro-batch whose collectives are launched, 0 or 1 (`comm.dual_batch_overlap`); each has
            its own process groups. Messages that overlap a step that is not split count as micro-batch 1.
        single_stream: whether all communication is on the current stream.
        fuses_all_reduce_norm: whether all-reduce and norm of long chunks are one kernel, if `single_stream`.
    """

    capturable = False
    micro_batch = 0
    single_stream = True
    fuses_all_reduce_norm = False
    wire_rate = 2e11  # NVLink: docs/results/kernels.md#collectives

    def __init__(self, rank: int, world_size: int, kvp_group: Sequence[int], device: torch.device | str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.kvp_group = tuple(kvp_group)
        self.device = torch.device(device)
        self._head_offsets: dict[tuple[int, ...], Tensor] = {}
        self._reports: deque[tuple[int, Any]] = deque()
        if not 0 <= rank < world_size or rank not in self.kvp_group:
            raise ValueError(f"rank {rank} must be in [0, {world_size}) and in its kvp group {self.kvp_group}")

    @property
    def kvp_rank(self) -> int:
        return self.kvp_group.index(self.rank)

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums a contiguous tensor over the world, in place; bitwise equal on all ranks. Returns `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers `x [...]`, the same shape on all ranks -> `[W, ...]` in rank order.

        The result may alias `x` when W = 1.
        """

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gathers rows `x [N, ...]`, the same shape on all ranks -> `[N, W, ...]` in rank order."""
        return self.all_gather(x).transpose(0, 1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sums a contiguous `x [W, ...]` over the world; returns row `rank` of the sum, `[...]`. May overwrite `x`."""
        return self.all_reduce(x)[self.rank]

    @abstractmethod
    def all_to_all(self, send: Tensor) -> Tensor:
        """Sends row k of `send [K, ...]` (contiguous) to kvp rank k -> `[K, ...]`: row k came from kvp rank k.

        The result may alias `send` when K = 1.
        """

    def gather_in_group(self, x: Tensor) -> Tensor:
        """Gathers `x [...]`, the same shape on all ranks of the kvp group -> `[K, ...]` in kvp order."""
        return self.all_to_all(x.expand(len(self.kvp_group), *x.shape).contiguous())

    def all_reduce_norm(
        self, x: Tensor | PartialSum, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """All-reduces `x`, adds `residual` and applies RMSNorm; bitwise equal on all ranks.

        Args:
            x: [N, H] contiguous, this rank's partial sum; may be overwritten.
            residual: [N, H], the same on all ranks; None adds nothing.
            weight: [H].

        Returns:
            The normalized rows and the sum, each [N, H] in x's dtype.
        """
        return rms_norm(self.all_reduce(materialize(x)), weight, eps, residual)

    def check(self, wait: bool = True) -> None:
        """Raises RuntimeError if a collective of a step timed out waiting for a peer; its results are then invalid.

        Args:
            wait: wait for the work queued on the current stream; False checks only finished collectives, at once.
        """
        return

    def exchange(self, out: Tensor, lse: Tensor, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        """Exchanges partial attention of all heads of the group for the exact attention of this rank's heads.

        Args:
            out: [N, sum(shares), D], model dtype; attention over this rank's KV shard (0 where the shard is empty).
            lse: [N, sum(shares)], fp32; natural-log log-sum-exp of the scores (-inf where the shard is empty).
            shares: number of heads of kvp ranks 0..K-1, contiguous in this order, may be 0; the same on all ranks.
            result: output buffer, contiguous; None allocates one.

        Returns:
            [N, shares[kvp_rank], D] in the dtype of `out`, summed in fp32 in kvp order. NaN in means NaN out.

        Raises:
            ValueError: shapes or dtypes do not match.
        """
        self._check_partials(out, lse, shares)
        return self._exchange(PartialAttention(out, lse), shares, result)

    def merge_states_exchange(
        self, partial: PartialAttention, shares: Sequence[int], result: Tensor | None = None
    ) -> Tensor:
        """Merges the splits of `partial` and exchanges the result, as `exchange` does."""
        return self._exchange(partial, shares, result)

    def _exchange(self, partial: PartialAttention, shares: Sequence[int], result: Tensor | None) -> Tensor:
        return self.exchange_packed(self.pack(partial, shares), shares, result)

    def takes_sms(self, N: int, D: int, dtype: torch.dtype, shares: Sequence[int]) -> bool:
        """Returns whether each CTA of an exchange of N tokens, head size D, needs a whole SM, as NCCL's do."""
        return True

    def pack(self, partial: PartialAttention, shares: Sequence[int]) -> PackedPartials:
        """Merges the splits of `partial` into messages: the local half of `merge_states_exchange`."""
        packed = pack_partials(partial, shares, self._head_offsets_of(shares))
        return PackedPartials(packed, _message_shape(partial, shares))

    def exchange_packed(self, sent: PackedPartials, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        """Exchanges and merges packed messages: the other half of `merge_states_exchange`."""
        partials, part_lse = partial_views(self.all_to_all(sent.packed), *sent.shape)
        local_heads = shares[self.kvp_rank]
        return merge_states(partials[:, :, :local_heads], part_lse[:, :, :local_heads], out=result)

    def _head_offsets_of(self, shares: Sequence[int]) -> Tensor:
        # Cached: a CUDA graph capture must not copy from the host.
        key = tuple(shares)
        if key not in self._head_offsets:
            heads = torch.tensor([0, *key]).cumsum(0)
            self._head_offsets[key] = heads.to(self.device, torch.int32)
        return self._head_offsets[key]

    def _check_partials(self, out: Tensor, lse: Tensor, shares: Sequence[int]) -> None:
        if len(shares) != len(self.kvp_group):
            raise ValueError(f"shares {list(shares)} must have one entry for each rank of kvp group {self.kvp_group}")
        check_partials(out, lse, shares)

    @abstractmethod
    def broadcast_object(self, obj: T | None) -> T:
        """Broadcasts rank 0's picklable object; the other ranks' argument is ignored."""

    def set_control_timeout(self, seconds: float | None) -> None:
        """Sets the control plane's timeout (then RuntimeError) to `seconds`; None restores the default."""
        return

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Gathers every rank's picklable object, in rank order."""

    @property
    def num_processes(self) -> int:
        """Number of processes that report; fewer than ranks if some ranks are emulated."""
        return self.world_size

    def enable_reports(self) -> None:
        """Prepares `report` and `reports`; a collective call."""
        return

    def report(self, obj: Any) -> None:
        """Sends a picklable object to rank 0, from any thread and in this rank's order; nobody waits for it."""
        self._reports.append((self.rank, obj))

    def reports(self) -> list[tuple[int, Any]]:
        """Returns (rank, object) of what has arrived on rank 0 since the last call, its own included."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank's host has arrived, not for work queued on GPUs."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Closes the control plane after this rank failed; other ranks that wait raise RuntimeError."""

    @abstractmethod
    def close(self) -> None:
        """Frees what this communicator created; a second call does nothing."""


def check_partials(out: Tensor, lse: Tensor, shares: Sequence[int]) -> None:
    """Raises ValueError unless partials `[N, heads, D]`, LSEs `[N, heads]` and `shares` match."""
    if out.dim() != 3 or not out.is_floating_point():
        raise ValueError(f"out must be a floating-point [N, heads, D], got {out.dtype} {list(out.shape)}")
    if lse.shape != out.shape[:2] or lse.dtype != torch.float32 or lse.device != out.device:
        raise ValueError(
            f"lse must be torch.float32 {list(out.shape[:2])} on {out.device} to match out {list(out.shape)}, "
            f"got {lse.dtype} {list(lse.shape)} on {lse.device}"
        )
    if min(shares) < 0 or sum(shares) != out.shape[1]:
        raise ValueError(f"shares {list(shares)} must be >= 0 and add up to the {out.shape[1]} heads of out")


def pack_partials(parts: PartialAttention, shares: Sequence[int], starts: Tensor) -> Tensor:
    """Merges the splits of `parts` into messages, uint8 `[K, bytes]`.

    Args:
        starts: [K + 1] int32, each rank's first head, then the number of heads.
    """
    shape = _message_shape(parts, shares)
    send = parts.out.new_empty(len(shares), message_bytes(*shape)[1], dtype=torch.uint8)
    merge_states_pack(parts, *partial_views(send, *shape), shares, starts)
    return send


def _message_shape(parts: PartialAttention, shares: Sequence[int]) -> tuple[int, int, int, torch.dtype]:
    return parts.lse.shape[:-1].numel(), max(shares), parts.out.shape[-1], parts.out.dtype


def partial_views(messages: Tensor, N: int, hmax: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views messages, uint8 `[K, bytes]`, as outputs `[K, N, hmax, D]` and LSEs `[K, N, hmax]` (fp32); no copy."""
    lse_offset, end = message_bytes(N, hmax, D, dtype)
    out_bytes, lse_bytes = N * hmax * D * dtype.itemsize, N * hmax * torch.float32.itemsize
    assert messages.shape[1] == end, f"messages of {messages.shape[1]} bytes, expected {end}"
    out = messages[:, :out_bytes].view(dtype).view(len(messages), N, hmax, D)
    lse = messages[:, lse_offset : lse_offset + lse_bytes].view(torch.float32).view(len(messages), N, hmax)
    return out, lse


def message_bytes(N: int, hmax: int, D: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the offset of the LSEs in a message and the message's length, in bytes.

    Both are multiples of 64 bytes: Triton infers alignment only from strides divisible by 16 elements, here of fp32.
    Messages are never empty, so that no backend has to handle zero bytes.
    """

    def padded(size: int) -> int:
        return -(-size // 64) * 64

    lse_offset = padded(N * hmax * D * dtype.itemsize)
    return lse_offset, lse_offset + max(64, padded(N * hmax * torch.float32.itemsize))


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """Sums `[W, ...]` -> `[...]` in rank order; 16-bit floats are summed in fp32 and rounded once."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
