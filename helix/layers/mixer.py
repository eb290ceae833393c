"""The contract of a mixer: the part of a layer in which tokens of a sequence see each other.

A mixer has two types. Its spec says what the checkpoint has, what a layer keeps of sequences, and what it costs; it
builds the layer's part of a rank. That part makes queries, then a rank's summand of the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from comm.base import Communicator
from comm.hopb import Pipeline
from comm.pending import PendingSum
from helix.attention.base import AttentionPolicy
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.memory.keeps import Keeps
from helix.memory.kv_cache import KVCache
from helix.steps.step import Step


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer stands in its model.

    Attributes:
        name: of the layer in the checkpoint.
        index: of the layer.
        pipeline: runs the chunks that decode steps are cut into.
    """

    name: str
    index: int
    pipeline: Pipeline


class MixerSpec(Protocol):
    """One layer's mixer, as the checkpoint has it; hashable."""

    @property
    def attends(self) -> bool:
        """Whether queries read keys of the sequence."""

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None where queries read the whole sequence, or none of it."""

    @property
    def weights(self) -> int:
        """Numbers in all projections, those of all ranks together."""

    @property
    def multiplications(self) -> int:
        """Multiplications of a token's queries with one key and value, over all heads."""

    def keeps(self, layout: HelixLayout, rank: int, dtype: torch.dtype) -> tuple[Keeps, ...]:
        """Lists what the layer keeps on a rank, numbers of the model being of `dtype`."""

    def buffers(self, layout: HelixLayout, rank: int) -> int:
        """Counts the numbers that a token of a prefill step takes on a rank."""

    def build(self, weights: Weights, comm: Communicator, layout: HelixLayout, place: LayerPlace) -> Mixer:
        """Makes this rank's part."""


class Mixer(Protocol):
    """This rank's part of a layer's mixer."""

    def project(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        """Makes queries of x [N, H], which is the same on every rank; appends what the layer keeps of tokens."""

    def finish(self, q: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> PendingSum:
        """Makes this rank's part [N, H] of the output from what `project` gave.

        A later half of a prefill step may run beside this, as far as it reads nothing but tokens appended before.
        """
