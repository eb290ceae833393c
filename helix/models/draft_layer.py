"""The contract of a layer that drafts; `helix.speculation.layer` runs it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.memory.kv_cache import KVCache
from helix.steps.step import Step


class DraftLayer(Protocol):
    """Layer that drafts behind the model's last one: from a token and the state of the one before to its state.

    Row i takes a state of token i, the model's or the layer's own, and token i + 1; its keys lie where token i's do.

    Attributes:
        read, width: widths of the model's states, and of its own.
        vocab_rows: token ids of the columns of `logits`.
        choice: tokens that its indexer chooses for a first draft, and further ones read, too; 0: each reads its own.
    """

    read: int
    width: int
    vocab_rows: range
    choice: int

    @property
    def window(self) -> int | None:
        """Sliding window of its attention, in tokens; None: it reads all keys."""

    def append(self, cache: KVCache, step: Step, states: Tensor, *, own: bool) -> tuple[Any, Tensor]:
        """Adds the keys of a step's tokens, each from its token and the state before it alone, to the cache.

        Args:
            step: tokens, with the positions of the tokens before them.
            states: states of the tokens before: the model's [N, read], or, if `own`, the layer's own [N, width].

        Returns:
            What its mixer projects, and inputs [N, width] of `attend`, which may be called for some of the rows.
        """

    def attend(self, queries: Any, x: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Computes states [N, width] of a step's rows from what `append` returned for them.

        Args:
            policy: prepared for the step before a kernel that comes before this call: attention reads bounds early.
        """

    def logits(self, states: Tensor) -> Tensor:
        """Computes this rank's logits [n, V_local] fp32 from its own states [n, width]."""
