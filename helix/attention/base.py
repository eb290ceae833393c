"""The contract of an attention policy.

A policy decides which of this rank's keys each query reads, and returns a partial result over them: what the exchange
merges is whatever the ranks attended to, so a policy may leave keys out, but it must report the LSE of exactly the keys
it used, and never depend on another rank's shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from helix.step import Step


class AttentionPolicy(ABC):
    @abstractmethod
    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, step: Step, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of a step's queries over this rank's shard, the step's own keys already appended.

        Args:
            q: [N, Hq_local, D], rotated.
            keys, values: one layer's cache [pages, page_size, Hkv_local, D].
            step: the tokens' positions, bounds and block tables.
            window: the layer's sliding window in tokens, or None.
            scale: factor on q.k.

        Returns:
            Partial output [N, Hq_local, D] in q's dtype and natural-log LSE [N, Hq_local] fp32; for a query
            without keys here 0 and -inf.
        """
