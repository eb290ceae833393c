"""The contract of a mixer: the part of a layer in which tokens of a sequence see each other.

A mixer has two types. Its spec describes the checkpoint's shape, the data that a layer keeps of sequences, and its
cost; it builds a rank's part of the layer. That part computes queries, then the rank's summand of the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from comm.base import Communicator
from comm.hopb import Pipeline
from comm.pending import PendingSum
from helix.attention.base import AttentionPolicy
from helix.layers.rotary import Angles
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.memory.keeps import Keeps
from helix.memory.kv_cache import KVCache
from helix.steps.step import Step


@dataclass(frozen=True)
class LayerPlace:
    """Place of a layer in its model.

    Attributes:
        name: name of the layer in the checkpoint.
        index: index of the layer.
        pipeline: runs the HOP-B chunks of decode steps.
    """

    name: str
    index: int
    pipeline: Pipeline


class MixerSpec(Protocol):
    """Shape of one layer's mixer in the checkpoint; hashable."""

    @property
    def attends(self) -> bool:
        """Whether queries read keys of the sequence."""

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None if queries read the whole sequence, or none of it."""

    @property
    def weights(self) -> int:
        """Number of weights in all projections, over all ranks."""

    @property
    def multiplications(self) -> int:
        """Number of multiplications of a token's queries with one key and value, over all heads."""

    def keeps(self, layout: HelixLayout, rank: int, dtype: torch.dtype, kv: str = "auto") -> tuple[Keeps, ...]:
        """Lists the data that the layer keeps on a rank, for a model of `dtype` and this kv.dtype."""

    def buffers(self, layout: HelixLayout, rank: int) -> int:
        """Counts the activations per token of a prefill step on a rank."""

    def build(self, weights: Weights, comm: Communicator, layout: HelixLayout, place: LayerPlace) -> Mixer:
        """Builds this rank's part."""


class Mixer(Protocol):
    """Part of a layer's mixer on this rank."""

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Any:
        """Computes what `finish` takes from x [N, H], the same on every rank; appends the tokens' data to the cache."""

    def finish(self, q: Any, cache: KVCache, step: Step, policy: AttentionPolicy) -> PendingSum:
        """Computes this rank's part [N, H] of the output from the queries of `project`.

        The later half of a prefill step may run concurrently, since this reads only tokens appended before.
        """
