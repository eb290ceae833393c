"""The `AttentionPolicy` interface.

A policy selects which of this rank's keys each query reads, and returns partial attention over them. The exchange
merges the ranks' partials by LSE. So a policy may skip keys, but must report the LSE of exactly the keys it read, and
must not depend on another rank's shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from kernels.overlap import sm_count


@dataclass(frozen=True)
class LayerAttention:
    """Attention parameters of a layer.

    Attributes:
        window: sliding window in tokens, or None.
        scale: factor on q.k.
        latent: width of the values inside stored latents; None: keys and values are stored separately.
        sinks: [Hq_local] fp32, or None: learned attention sinks, each head's score of an extra key of value 0. Part of
            the LSE, so only one rank of a kvp group gets them.
        reserved_sms: SMs to leave to concurrent kernels.
        chunk: index of the HOP-B chunk; its splits stay unmerged until the next layer's attention of this chunk.
        topk: tokens that the indexer selects per query (`Step.selected`); None: no indexer.
    """

    window: int | None
    scale: float
    latent: int | None = None
    sinks: Tensor | None = None
    reserved_sms: int = 0
    chunk: int = 0
    topk: int | None = None

    def sms(self, device: torch.device) -> int:
        return max(1, sm_count(device) - self.reserved_sms)


class AttentionPolicy(ABC):
    """Decides which keys queries read.

    Attributes:
        from_tokens: shortest sequence of which only a part is read; None: all keys are always read.
        prefetches: whether decode steps call `prefetch`.
    """

    from_tokens: int | None = None
    prefetches: bool = False

    @abstractmethod
    def prepare(self, step: Step, windows: set[int | None]) -> None:
        """Computes what all layers of a step share, before the first layer.

        Args:
            windows: the layers' windows, None for full attention.
        """

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        """Attends a step's queries to this rank's KV shard, which already contains the step's own keys.

        Args:
            q: [N, Hq_local, D], rotated; with latents absorbed, [N, Hq_local, R + P].

        Returns:
            Splits whose `merge_states` gives the partial output [N, Hq_local, D or R] in q's dtype and its natural-log
            LSE [N, Hq_local] fp32; for a query without local keys 0 and -inf (with sinks: the sink's score). Merge
            them, here or in the exchange, before the next attention of the same chunk.
        """

    def prefetch(self, queries: Callable[[], Tensor], cache: LayerCache, step: Step) -> None:
        """Prefetches for a layer without a window while the previous layer computes; does not change `attend`'s result.

        Args:
            queries: computes approximate queries [N, Hq_local, D], as if the previous layer added nothing. Its inputs
                stay alive until `attend` is called for the layer.
            cache: does not contain the step's own keys yet.
        """
        return


def slice_step(step: Step, rows: slice) -> Step:
    """Returns the part of a decode step with `rows` of its N tokens, which must be whole sequences."""
    each = len(step.tokens) // len(step.slots)
    sequences = slice(rows.start // each, rows.stop // each)
    return replace(
        step,
        tokens=step.tokens[rows],
        positions=step.positions[rows],
        starts=step.starts[rows],
        live=step.live[rows],
        slots=step.slots[sequences],
        tables={window: table[sequences] for window, table in step.tables.items()},
        slot_mappings={window: slots[rows] for window, slots in step.slot_mappings.items()},
        first=step.first + rows.start // each,
        shared={key: tuple(per_token[rows] for per_token in made) for key, made in step.shared.items()},
    )
