"""The contract of a mixer: the part of a layer in which tokens of a sequence see each other.

A mixer has two types. Its spec (`helix.layers.specs`) describes the checkpoint's shape, the data that a layer keeps of
sequences, and its cost. A rank's part of the layer, which is made of it (`helix.models.decoder.MIXERS`), computes
queries, then the rank's summand of the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from comm.hopb import Pipeline
from comm.pending import PendingSum
from helix.attention.base import AttentionPolicy
from helix.layers.rotary import Angles
from helix.worker.kv_cache import KVCache
from helix.worker.step import Step


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


class Mixer(Protocol):
    """Part of a layer's mixer on this rank."""

    def project(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Any:
        """Computes what `finish` takes from x [N, H], the same on every rank; appends the tokens' data to the cache."""

    def finish(self, q: Any, cache: KVCache, step: Step, policy: AttentionPolicy) -> PendingSum:
        """Computes this rank's part [N, H] of the output from the queries of `project`.

        The later half of a prefill step may run concurrently, since this reads only tokens appended before.
        """
