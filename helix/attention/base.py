"""The contract of an attention policy.

A policy decides which of this rank's keys each query reads, and returns a partial result over them: what the exchange
merges is whatever the ranks attended to, so a policy may leave keys out, but it must report the LSE of exactly the keys
it used, and never depend on another rank's shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helix.memory.kv_cache import LayerCache
from helix.steps.step import Step
from kernels.attention.split_kv import PartialAttention
from kernels.overlap import sm_count


@dataclass(frozen=True)
class LayerAttention:
    """What is the same for all queries of a layer.

    Attributes:
        window: its sliding window in tokens, or None.
        scale: factor on q.k.
        latent: width of the values, which are a part of the keys: latents; None: keys and values are kept apart.
        sinks: [Hq_local] fp32, the score of one more key of value 0 that every query of a head reads, or None; its
            weight is part of the LSE. Given to one rank of a kvp group alone.
        reserved_sms: room on the GPU to leave to kernels that run beside its own.
    """

    window: int | None
    scale: float
    latent: int | None = None
    sinks: Tensor | None = None
    reserved_sms: int = 0

    def sms(self, device: torch.device) -> int:
        """Multiprocessors for its kernels, at least one."""
        return max(1, sm_count(device) - self.reserved_sms)


class AttentionPolicy(ABC):
    """Attributes:
    from_tokens: from so many tokens on it reads a part of a sequence; None: always all that its layers allow.
    guesses: whether decode steps call `guess`.
    """

    from_tokens: int | None = None
    guesses: bool = False

    @abstractmethod
    def prepare(self, step: Step, windows: set[int | None]) -> None:
        """What all layers of a step share, computed before the first: attention reads it early.

        Args:
            windows: that the layers have.
        """

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        """Attention of a step's queries over this rank's shard, the step's own keys already appended.

        Args:
            q: [N, Hq_local, D], rotated.
            cache: the layer's part of the cache; of latents, q is absorbed, [N, Hq_local, R + P].
            step: the tokens' positions, bounds and block tables.

        Returns:
            What `merge`, to be called before the next step's or layer's attention, makes a partial output [N, Hq_local,
            D or R] in q's dtype and its natural-log LSE [N, Hq_local] fp32; for a query without keys here 0 and -inf
            (with sinks: the sink's score). An exchange may merge on its own.
        """

    def guess(self, queries: Callable[[], Tensor], cache: LayerCache, step: Step) -> None:
        """Prepares for a layer without a window while the one before it computes; what `attend` returns stays the same.

        Args:
            queries: makes the layer's queries [N, Hq_local, D] as they would be, had the layer before it added nothing.
                What it reads is kept until `attend` is called for the layer.
            cache: the layer's part of the cache; the step's own keys are not appended yet.
        """
        return


def rows_of(step: Step, rows: slice) -> Step:
    """The part of a decode step that is `rows` of its N tokens, whole sequences; what layers share is cut alike."""
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
        append_slots={window: slots[rows] for window, slots in step.append_slots.items()},
        first=step.first + rows.start // each,
        shared={key: tuple(of_tokens[rows] for of_tokens in made) for key, made in step.shared.items()},
    )
