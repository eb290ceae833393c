"""The transport contract of the runtime, and the Helix re-partition on top of it.

The exchange turns "all heads over my KV shard" into "my heads over the whole KV sequence" (Helix Parallelism,
section 2.1.2). One all-to-all inside the kvp group carries one message per destination k:

    [ outputs  N x hmax x D, model dtype | gap | LSE  N x hmax, fp32 | gap ]        hmax = max(shares)

Lanes beyond shares[k] are padding, so that every message of the group has the same size; the gaps keep outputs and
LSEs on boundaries that a kernel can load in 16-byte vectors. Every rank of the group has to take part in every
exchange, also with no tokens and also when its own share is zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

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
        packed: uint8 [K, bytes], row k to kvp rank k.
        shape: tokens, lanes, values per head and dtype of the partials inside.
    """

    packed: Tensor
    shape: tuple[int, int, int, torch.dtype]


class Communicator(ABC):
    """One rank's endpoint for all communication between ranks.

    Tensor collectives run on the current stream of `device`, allocate what they return, and must be called by all
    ranks of their group in the same order. The control plane (objects, barrier) runs on the CPU, and waits for as long
    as rank 0's host may be busy with something else, not only for as long as a collective may take.

    Args:
        rank: this rank in the world.
        world_size: W.
        kvp_group: world ranks that hold the same heads and split the KV sequence, in kvp order; contains `rank`.
        device: where the tensors live.

    Attributes:
        capturable: whether the tensor collectives can be part of a CUDA graph.
        wire_rate: assumed bytes/s of a rank's messages to all its peers together, beyond the first kilobytes.
        micro_batch: which half of a step communicates, 0 or 1 (`comm.dual_batch_overlap`): neither's messages wait for
            the other's. What is sent beside a whole step is half 1's.
        single_stream: whether nothing communicates beside the current stream.
        fuses_all_reduce_norm: whether sums of long chunks and the norm behind them are one kernel, if `single_stream`.
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
        """Gathers `x [...]`, of one shape on all ranks, from every rank -> `[W, ...]` in rank order.

        The result may alias `x` when W = 1.
        """

    def gather_rows(self, x: Tensor) -> Tensor:
        """Gathers rows `x [N, ...]`, of one shape on all ranks, side by side -> `[N, W, ...]` in rank order."""
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
        """Gathers `x [...]`, of one shape on all ranks of the kvp group -> `[K, ...]` in kvp order."""
        return self.all_to_all(x.expand(len(self.kvp_group), *x.shape).contiguous())

    def all_reduce_norm(
        self, x: Tensor | PartialSum, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Normalises (RMSNorm) `residual` plus the sum of `x` over the world; bitwise equal on all ranks.

        Args:
            x: [N, H] contiguous, this rank's summand; may be overwritten.
            residual: [N, H], the same on all ranks; None adds nothing.
            weight: [H].
            eps: added to the mean square.

        Returns:
            The normalised rows and the sum, each [N, H] in x's dtype.
        """
        return rms_norm(self.all_reduce(materialize(x)), weight, eps, residual)

    def check(self, wait: bool = True) -> None:
        """Raises RuntimeError if a collective of a step timed out waiting for a peer; its results are then invalid.

        Args:
            wait: wait for the work queued on the current stream; False checks finished collectives only, without delay.
        """
        return

    def exchange(self, out: Tensor, lse: Tensor, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        """Turns partial attention of all the group's heads into exact attention of this rank's: the Helix re-partition.

        Args:
            out: [N, sum(shares), D], model dtype; attention over this rank's KV shard (0 where the shard is empty).
            lse: [N, sum(shares)], fp32; natural-log log-sum-exp of the scores (-inf where the shard is empty).
            shares: heads that kvp ranks 0..K-1 keep: contiguous runs in this order, zero allowed; the same on all.
            result: written if given; contiguous.

        Returns:
            [N, shares[kvp_rank], D] in the dtype of `out`, summed in fp32 in kvp order. NaN in means NaN out.

        Raises:
            ValueError: shapes or dtypes do not fit each other.
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
        """Returns whether each program of an exchange takes a whole multiprocessor, as a library's do.

        Args:
            N, D, dtype, shares: tokens, values per head, their dtype, and the heads of each rank.
        """
        return True

    def pack(self, partial: PartialAttention, shares: Sequence[int]) -> PackedPartials:
        """Merges the splits of `partial` into messages: the first part of `merge_states_exchange`, on this rank
        alone.
        """
        packed = pack_partials(partial, shares, self._head_offsets_of(shares))
        return PackedPartials(packed, _message_shape(partial, shares))

    def exchange_packed(self, sent: PackedPartials, shares: Sequence[int], result: Tensor | None = None) -> Tensor:
        """Exchanges and combines what was packed: the rest of `merge_states_exchange`."""
        partials, part_lse = partial_views(self.all_to_all(sent.packed), *sent.shape)
        local_heads = shares[self.kvp_rank]
        return merge_states(partials[:, :, :local_heads], part_lse[:, :, :local_heads], out=result)

    def _head_offsets_of(self, shares: Sequence[int]) -> Tensor:
        """Returns each rank's first head and the end, int32 on the device; cached, so that capture finds it."""
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
        """Sends rank 0's picklable object to every rank and returns it; the argument of other ranks is ignored."""

    def set_control_timeout(self, seconds: float | None) -> None:
        """Limits later waits of the control plane to `seconds`, then RuntimeError; None restores the first limit."""
        return

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Gathers every rank's picklable object, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank's host has arrived; does not wait for work queued on a GPU."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Closes the control plane after this rank failed: pending waits of other ranks raise RuntimeError."""

    @abstractmethod
    def close(self) -> None:
        """Releases what this communicator created; a second call does nothing."""


def check_partials(out: Tensor, lse: Tensor, shares: Sequence[int]) -> None:
    """Raises ValueError unless partials `[N, heads, D]`, their LSE `[N, heads]` and the heads' shares fit together."""
    if out.dim() != 3 or not out.is_floating_point():
        raise ValueError(f"out must be a floating-point [N, heads, D], got {out.dtype} {list(out.shape)}")
    if lse.shape != out.shape[:2] or lse.dtype != torch.float32 or lse.device != out.device:
        raise ValueError(
            f"lse must be torch.float32 {list(out.shape[:2])} on {out.device} to fit out {list(out.shape)}, "
            f"got {lse.dtype} {list(lse.shape)} on {lse.device}"
        )
    if min(shares) < 0 or sum(shares) != out.shape[1]:
        raise ValueError(f"shares {list(shares)} must be >= 0 and add up to the {out.shape[1]} heads of out")


def pack_partials(parts: PartialAttention, shares: Sequence[int], starts: Tensor) -> Tensor:
    """Packs partials of all the group's heads into messages, uint8 `[K, bytes]`, merging them on the way.

    Args:
        starts: [K + 1] int32, the first head of each rank, and the end.
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

    Both are multiples of 64 bytes: Triton proves alignment only from strides divisible by 16 elements, here of fp32.
    A message is never empty, so that no transport has to handle zero bytes.
    """

    def padded(size: int) -> int:
        return -(-size // 64) * 64

    lse_offset = padded(N * hmax * D * dtype.itemsize)
    return lse_offset, lse_offset + max(64, padded(N * hmax * torch.float32.itemsize))


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """Adds `[W, ...]` -> `[...]` of the same dtype in rank order; below fp32 in fp32 with a single rounding."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
