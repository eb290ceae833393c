"""Communicator over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from comm.base import Communicator, T, sum_in_rank_order
from comm.reports import ReportChannel

# torch 2.13 deprecates the old name, torch 2.11 does not have the new one.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Rank 0 may tokenize for minutes, or its caller pause, while the others wait for its next message. A rank that dies
# closes its connections, which ends all waits for it; a job's watchdog finds a rank that is stopped.
CONTROL_TIMEOUT = timedelta(days=1)
HOST_RATE = 2e10  # bytes/s through host memory


def p2p_disabled() -> bool:
    """Returns whether NCCL_P2P_DISABLE is set: messages go through host memory."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") != "0"


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of one micro-batch.

    Attributes:
        kvp: this rank's kvp group; None if it has no other rank.
    """

    world: dist.ProcessGroup
    kvp: dist.ProcessGroup | None


class TorchDistCommunicator(Communicator):
    """Communicator over the initialized default process group, which must outlive this object.

    World collectives of micro-batch 0 run on the default group, with the timeout it was initialized with. Every rank
    creates the kvp groups that have several but not all ranks, on GPUs all groups once more for micro-batch 1, and a
    gloo group for objects and barriers, so that the control plane never touches a GPU.

    Args:
        kvp_groups: a partition of the world, each group in ascending order; the same on every rank.
        timeout: deadline of tensor collectives on the groups created here, and for all ranks to arrive here.
            The control plane waits for CONTROL_TIMEOUT.

    Raises:
        ValueError: `kvp_groups` is not such a partition.
    """

    def __init__(self, kvp_groups: Sequence[Sequence[int]], device: torch.device | str, timeout: timedelta) -> None:
        rank, world_size = self._rank_and_world_size(kvp_groups)
        if sorted(r for group in kvp_groups for r in group) != list(range(world_size)):
            raise ValueError(f"kvp groups {kvp_groups} must contain each of the {world_size} ranks exactly once")
        if any(list(group) != sorted(group) for group in kvp_groups):
            raise ValueError(f"kvp groups {kvp_groups} must be in ascending order: process groups sort their ranks")
        super().__init__(rank, world_size, next(tuple(group) for group in kvp_groups if rank in group), device)
        self.capturable = self.device.type == "cuda"
        if p2p_disabled():
            self.wire_rate = HOST_RATE
        self._timeout = timeout
        self._created: list[dist.ProcessGroup] = []
        assert dist.group.WORLD is not None
        self._micro_batch_groups = [self._create_groups(dist.group.WORLD, kvp_groups)]
        if self.capturable and dist.get_world_size() > 1:
            self._micro_batch_groups.append(self._create_groups(self._new_group(None), kvp_groups))
        self._deadline = CONTROL_TIMEOUT
        self._gloo: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=self._deadline)
        self._report_channel: ReportChannel | None = None
        # A rank may close its connections only after all others have connected: creating the group does not wait.
        self._monitored_barrier(timeout)

    def _rank_and_world_size(self, kvp_groups: Sequence[Sequence[int]]) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def _new_group(self, ranks: Sequence[int] | None) -> dist.ProcessGroup:
        # Collective over the world; None: all ranks.
        group = dist.new_group(None if ranks is None else list(ranks), timeout=self._timeout)
        if ranks is None or self.rank in ranks:
            self._created.append(group)
        return group

    def _create_groups(self, world: dist.ProcessGroup, kvp_groups: Sequence[Sequence[int]]) -> ProcessGroups:
        mine = None
        for ranks in kvp_groups:  # every rank creates every group, in this order
            if len(ranks) > 1:
                group = world if len(ranks) == self.world_size else self._new_group(ranks)
                mine = group if self.rank in ranks else mine
        return ProcessGroups(world, mine)

    @property
    def _groups(self) -> ProcessGroups:
        return self._micro_batch_groups[min(self.micro_batch, len(self._micro_batch_groups) - 1)]

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), f"all_reduce of a non-contiguous tensor {list(x.shape)}"
        if self.world_size == 1:
            return x
        if x.is_cuda:
            dist.all_reduce(x, group=self._groups.world)
            return x
        # gloo sums bf16 in bf16, in an order that depends on an element's place in the buffer. Results must not change
        # with the batch, and must equal the other backends' results.
        return x.copy_(sum_in_rank_order(self.all_gather(x)))

    def all_gather(self, x: Tensor) -> Tensor:
        if self.world_size == 1:
            return x.contiguous()[None]
        out = x.new_empty(self.world_size, *x.shape)
        _all_gather_flat(out.view(-1), x.reshape(-1), group=self._groups.world)  # gloo takes no stacked output shape
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self.world_size == 1 or not x.is_cuda:
            return super().reduce_scatter(x)
        out = x.new_empty(x.shape[1:])
        dist.reduce_scatter_tensor(out.view(-1), x.view(-1), group=self._groups.world)
        return out

    def all_to_all(self, send: Tensor) -> Tensor:
        assert send.is_contiguous() and send.shape[0] == len(self.kvp_group), (
            f"all_to_all needs a contiguous [{len(self.kvp_group)}, ...], got {list(send.shape)}"
        )
        if self._groups.kvp is None:
            return send
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self._groups.kvp)
        return received

    def gather_in_group(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(self.kvp_group), *x.shape)
        if self._groups.kvp is None:
            return out.copy_(x)
        _all_gather_flat(out.view(-1), x.reshape(-1), group=self._groups.kvp)
        return out

    def broadcast_object(self, obj: T | None) -> T:
        if self.world_size == 1:
            return obj  # type: ignore[return-value]  # rank 0 has one
        objects: list[Any] = [obj]
        try:
            dist.broadcast_object_list(objects, src=0, group=self._control)
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise
            raise RuntimeError(
                f"rank {self.rank} waited {self._deadline.total_seconds():g} s (comm.timeout_s) for a message from "
                "rank 0: that rank hangs, or comm.timeout_s is too small"
            ) from error
        received: T = objects[0]
        return received

    def set_control_timeout(self, seconds: float | None) -> None:
        self._deadline = CONTROL_TIMEOUT if seconds is None else timedelta(seconds=seconds)
        _set_pg_timeout(self._deadline, self._control)

    def all_gather_object(self, obj: T) -> list[T]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, obj, group=self._control)
        return gathered

    @property
    def num_processes(self) -> int:
        return dist.get_world_size()

    def enable_reports(self) -> None:
        if self._report_channel is None and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
            self._report_channel = ReportChannel(group, self.rank, self._reports)
            self._monitored_barrier(self._timeout)  # as in `__init__`: all have connected

    def report(self, obj: Any) -> None:
        if self._report_channel is None:
            super().report(obj)
        else:
            self._report_channel.report(obj)

    def barrier(self) -> None:
        self._monitored_barrier(CONTROL_TIMEOUT)

    def _monitored_barrier(self, timeout: timedelta) -> None:
        # A monitored barrier names the ranks that did not arrive.
        dist.monitored_barrier(self._control, timeout=timeout, wait_all_ranks=True)

    @property
    def _control(self) -> dist.ProcessGroup:
        if self._gloo is None:
            raise RuntimeError(f"rank {self.rank} has closed its control plane (abort or close)")
        return self._gloo

    def abort(self, reason: str) -> None:
        self._drop_control()

    def close(self) -> None:
        if self._report_channel is not None:
            self._report_channel.close()
            self._report_channel = None
        self._drop_control()
        while self._created:
            dist.destroy_process_group(self._created.pop())

    def _drop_control(self) -> None:
        if self._gloo is not None:
            dist.destroy_process_group(self._gloo)
            self._gloo = None  # dropping the last reference closes its connections, which other ranks notice
