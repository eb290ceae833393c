"""The `Drafter` interface.

A decode step appends a sequence's last token and its drafts, samples a token after each, and accepts the drafts that
equal the sampled tokens. Samples depend only on the seed, the position and the preceding tokens, so tokens are the same
as without drafts, whatever a drafter proposes.

A drafter that samples its drafts may return their distributions: then drafts are verified by rejection sampling
(`helix.speculation.acceptance`), which accepts more of them; tokens differ, but have the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import KVCache
from helix.worker.sequence_observer import SequenceObserver
from helix.worker.step import DecodeState
from kernels.tokens.accept import Distribution


@dataclass(frozen=True)
class Draft:
    """Proposed next tokens of several sequences.

    Attributes:
        tokens: [rows, n] int64; -1: no draft from here on.
        sampled_from: distributions that they were sampled from, over this rank's columns; None: a draft is accepted if
            it equals the sampled token.
        forced_tokens: [rows, n] tokens to emit instead of the model's samples; for benchmarks.
    """

    tokens: Tensor
    sampled_from: Distribution | None = None
    forced_tokens: Tensor | None = None


class Drafter(SequenceObserver):
    """Base class of drafters.

    Args:
        limit: maximum number of drafts per sequence and step.

    Attributes:
        verify_policy: attention policy of steps with drafts; None: the target's.
        may_lag: whether its cache may lack sampled tokens, so that their pages cannot be shared.
        wants_prefill_events: whether it needs `on_prefill`.
        needs_hidden_states: whether it reads the hidden states of all prompt tokens.
        has_own_pages: whether it has as many pages as the KV cache, not shared between sequences.
        recomputed_tokens: like `KVCache.recomputed_tokens`, for its own cache.
        resumes_from_snapshots: whether it can continue a prompt after a snapshot of the KV cache.
    """

    verify_policy: AttentionPolicy | None = None
    may_lag = False
    wants_prefill_events = False
    needs_hidden_states = False
    has_own_pages = False
    recomputed_tokens = 0.0
    resumes_from_snapshots = True

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def catch_up(self, state: DecodeState) -> None:
        """Catches up with earlier steps without drafts, before a step with drafts; may wait for the device."""

    @property
    def paged_tensors(self) -> list[Tensor]:
        """The paged tensors of its own cache, if that has the same page numbers as the target's."""
        return []

    def check(self, wait: bool = True) -> None:
        """Calls `Communicator.check` for its own collectives."""

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        """Proposes `kind.drafts` tokens, from 1 to `limit`, for each of the first `kind.rows` rows.

        The result has a fixed shape and is equal on all ranks. CUDA graphs capture the call, so it must not sync.
        """
        raise NotImplementedError


def check_states(cache: KVCache, drafter: str) -> None:
    """Raises ValueError if the model has recurrent states, which cannot run several steps ahead of verification."""
    if cache.has_states:
        raise ValueError(
            f"speculation.drafter={drafter} runs several steps before verification, but recurrent states can roll back "
            "only one: set speculation=ngram"
        )


class NoDrafts(Drafter):
    """Proposes nothing: every step samples one token per sequence."""

    def __init__(self) -> None:
        super().__init__(0)
