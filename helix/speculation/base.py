"""The contract of a drafter.

A decode step appends a sequence's last token and its drafts, draws a token after each, and accepts those drafts that
equal the drawn tokens. Every draw depends only on the seed, the position and the tokens before it, so tokens are the
same as without drafts. A drafter may propose anything: it affects only speed.

A drafter that samples its drafts may provide their distributions: then drafts are accepted by rejection sampling
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
        tokens: ids [rows, n] int64; -1: no token here or after.
        sampled_from: distributions from which they were drawn, over this rank's columns; None: accepted if equal to the
            drawn tokens.
        forced_tokens: [rows, n] tokens to take as drawn at their positions, instead of the model's; for benchmarks.
    """

    tokens: Tensor
    sampled_from: Distribution | None = None
    forced_tokens: Tensor | None = None


class Drafter(SequenceObserver):
    """Base of drafters, which propose tokens; it follows the sequences' events.

    Args:
        limit: most tokens proposed per sequence and step.

    Attributes:
        verify_policy: attention policy of steps with drafts, instead of the target's dense one; None: the target's.
        may_lag: whether its cache may lack drawn tokens, so that their pages cannot be shared.
        wants_prefill_events: whether it takes the event `on_prefill`.
        needs_hidden_states: whether it reads the states of all tokens of prompts.
        has_own_pages: whether it has as many pages as the cache, which are not shared between sequences.
        lacking: like `KVCache.recomputed_tokens`, for its own cache.
    """

    verify_policy: AttentionPolicy | None = None
    may_lag = False
    wants_prefill_events = False
    needs_hidden_states = False
    has_own_pages = False
    recomputed_tokens = 0.0

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def catch_up(self, state: DecodeState) -> None:
        """Catches up with earlier steps without drafts, before a step with drafts; may wait for the device."""

    def check(self, wait: bool = True) -> None:
        """Checks its own collectives, by `Communicator.check`."""

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        """Proposes `kind.drafts` tokens, from 1 to `limit`, for each of the first `kind.rows` slots.

        The result is the same on all ranks and of fixed shape. It is part of a captured step: no waits for the host.
        """
        raise NotImplementedError


def check_states(cache: KVCache, drafter: str) -> None:
    """Raises ValueError if layers keep states, and a drafter runs several steps of their model before one is taken."""
    if cache.has_states:
        raise ValueError(
            f"speculation.drafter={drafter} runs several steps before tokens are taken, and layers that keep a state "
            "replay one step alone: set speculation=ngram"
        )


class NoDrafts(Drafter):
    """Drafter that proposes nothing: every step draws one token."""

    def __init__(self) -> None:
        super().__init__(0)
