"""Partial sums over ranks, computed lazily: the norm that follows decides how (after DTensor's `Partial`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.dense.linear import can_send, linear, linear_send
from kernels.peers.ll_protocol import SumTarget
from kernels.scaled import Matrix


class PartialSum(Protocol):
    """A rank's summand [N, H] of the next all-reduce, not computed yet."""

    def compute(self) -> Tensor:
        """Computes the summand, [N, H]."""

    def can_push(self, two_shot: bool) -> bool:
        """Returns whether `push` supports this summand."""

    def push(self, sums: SumTarget) -> None:
        """Computes into the reducing ranks' memory: phase 1 of `kernels.peers.all_reduce_norm`."""


@dataclass(frozen=True)
class PartialProjection:
    """The summand x W^T + b.

    Attributes:
        x: [N, K], this rank's columns of the input.
        weight: [H, K].
        bias: [H] on one rank, elsewhere None.
    """

    x: Tensor
    weight: Matrix
    bias: Tensor | None

    def compute(self) -> Tensor:
        return linear(self.x, self.weight, self.bias)

    def can_push(self, two_shot: bool) -> bool:
        return can_send(self.x, self.weight, two_shot)

    def push(self, sums: SumTarget) -> None:
        linear_send(self.x, self.weight, self.bias, sums)


def materialize(x: Tensor | PartialSum) -> Tensor:
    """Computes a partial sum; returns a tensor as it is."""
    return x if isinstance(x, Tensor) else x.compute()
