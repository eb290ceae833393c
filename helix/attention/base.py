"""The contract of an attention policy.

A policy chooses which of this rank's keys each query reads, and returns a partial output over them. The exchange merges
the keys that ranks attended to: so a policy may omit keys, but it must report the LSE of exactly the keys it read, and
never depend on another rank's shard.
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
    """Parameters of attention that all queries of a layer share.

    Attributes:
        window: its sliding window in tokens, or None.
        scale: factor on q.k.
        latent: width of the values inside stored latents; None: keys and values are stored separately.
        sinks: [Hq_local] fp32, or None: each head's score of an additional key of value 0 that every query reads; it is
            part of the LSE. Given to only one rank of a kvp group.
        reserved_sms: number of multiprocessors to leave to concurrent kernels.
        chunk: index of the chunk of rows, whose attention directly follows that of the chunk before; its parts
            stay until the next layer's attention of this chunk.
        topk: tokens that a query reads where an indexer chose them (`Step.selected`); None: there is no indexer.
    """

    window: int | None
    scale: float
    latent: int | None = None
    sinks: Tensor | None = None
    reserved_sms: int = 0
    chunk: int = 0
    topk: int | None = None

    def sms(self, device: torch.device) -> int:
        """Returns the number of multiprocessors for its kernels, at least one."""
        return max(1, sm_count(device) - self.reserved_sms)


class AttentionPolicy(ABC):
    """Choice of the keys that queries read.

    Attributes:
        from_tokens: length from which on only a part of a sequence is read; None: always all that layers allow.
        prefetches: whether decode steps call `prefetch`.
    """

    from_tokens: int | None = None
    prefetches: bool = False

    @abstractmethod
    def prepare(self, step: Step, windows: set[int | None]) -> None:
        """Computes the data that all layers of a step share, before the first layer.

        Args:
            windows: windows of the layers, None for those without one.
        """

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        """Attends with a step's queries to this rank's shard, to which the step's own keys are already appended.

        Args:
            q: [N, Hq_local, D], rotated.
            cache: the layer's part of the cache; with latents, q is absorbed, [N, Hq_local, R + P].
            step: the tokens' positions, bounds and block tables.

        Returns:
            A result whose `merge` gives the partial output [N, Hq_local, D or R] in q's dtype and its natural-log LSE
            [N, Hq_local] fp32; for a query without keys here 0 and -inf (with sinks: the sink's score). It must be
            merged, here or in the exchange, before the next attention of the same chunk.
        """

    def prefetch(self, queries: Callable[[], Tensor], cache: LayerCache, step: Step) -> None:
        """Prepares a layer without a window while the layer before it computes; never changes results of `attend`.

        Args:
            queries: computes the layer's queries [N, Hq_local, D] as if the layer before it added nothing. Its inputs
                stay alive until `attend` is called for the layer.
            cache: the layer's part of the cache; the step's own keys are not appended yet.
        """
        return


def slice_step(step: Step, rows: slice) -> Step:
    """Returns the part of a decode step with `rows` of its N tokens, whole sequences; shared tensors are cut alike."""
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
