"""Sums over ranks whose parts are not computed yet: the norm that follows says how they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.dense.linear import linear, linear_send, sends
from kernels.peers.mailbox import SumTarget


class PendingSum(Protocol):
    """A rank's part [N, H] of a sum over ranks that comes next, not yet made."""

    def compute(self) -> Tensor:
        """[N, H]"""

    def can_push(self, two_shot: bool) -> bool:
        """Whether `push` can compute it."""

    def push(self, sums: SumTarget) -> None:
        """Makes it where it is added up: phase 1 of `kernels.peers.all_reduce_norm`."""


@dataclass(frozen=True)
class PendingProjection:
    """The summand x W^T + b.

    Attributes:
        x: [N, K], this rank's columns of the input.
        weight: [H, K].
        bias: [H] on one rank, elsewhere None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def compute(self) -> Tensor:
        return linear(self.x, self.weight, self.bias)

    def can_push(self, two_shot: bool) -> bool:
        return sends(self.x, self.weight, two_shot)

    def push(self, sums: SumTarget) -> None:
        linear_send(self.x, self.weight, self.bias, sums)


def computed(x: Tensor | PendingSum) -> Tensor:
    return x if isinstance(x, Tensor) else x.compute()
