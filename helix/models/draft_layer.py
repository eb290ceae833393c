"""The contract of a layer that drafts; `helix.speculation.layer` runs it."""

from __future__ import annotations

from typing import Protocol

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
    """

    read: int
    width: int
    vocab_rows: range

    def ahead(self, cache: KVCache, step: Step, states: Tensor, policy: AttentionPolicy, *, own: bool) -> Tensor:
        """Computes states [N, width] of a step's tokens, and appends their keys.

        Args:
            step: tokens, with the positions of the tokens before them.
            states: states of the tokens before: the model's [N, read], or, if `own`, the layer's own [N, width].
        """

    def logits(self, states: Tensor) -> Tensor:
        """Computes this rank's logits [n, V_local] fp32 from its own states [n, width]."""
