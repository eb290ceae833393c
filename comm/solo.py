"""A world of one rank, for layers that run without communication (`replicated`) although other ranks exist."""

from __future__ import annotations

import torch
from torch import Tensor

from comm.base import Communicator, T


class SoloCommunicator(Communicator):
    """Communicator of a single rank: every collective returns its input."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(0, 1, (0,), device)
        self.capturable = self.device.type == "cuda"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def all_to_all(self, send: Tensor) -> Tensor:
        return send

    def broadcast_object(self, obj: T | None) -> T:
        return obj  # type: ignore[return-value]  # rank 0 has one

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def barrier(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
