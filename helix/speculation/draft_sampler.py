"""Samples drafts, for drafters that run a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.speculation.base import Draft
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.sampling import distribution, sample, sample_drafts
from helix.worker.step import DecodeState
from kernels.tokens.accept import Distribution


class DraftSampler:
    """Samples the drafts of a step one after the other, with each request's temperature and filters.

    Args:
        logits: computes logits [rows, V_local] fp32 from hidden states [rows, H].
        columns: token ids of the logits' columns.
        comm: over which the logits are sharded.
        shared_noise: whether to use the target's noise, so that equal distributions give equal tokens. Else the noise
            is independent, and drafts are verified by rejection sampling.
        kind: of the step that verifies the drafts.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        columns: range,
        comm: Communicator,
        shared_noise: bool,
        kind: DecodeGraphKey,
    ) -> None:
        self.logits = logits
        self.columns = columns
        self.comm = comm
        self.shared_noise = shared_noise
        self.kind = kind
        self._tokens: list[Tensor] = []
        self._sampled_from: list[Distribution] = []

    def sample(self, hidden: Tensor, state: DecodeState, positions: Tensor) -> Tensor:
        """Samples tokens [rows] int64 for `positions` [rows], from hidden states [rows, H]."""
        logits, first = self.logits(hidden), self.columns.start
        sampling = state.sampling.rows(slice(0, len(positions)))
        if self.shared_noise or not self.kind.stochastic:
            flags = {"stochastic": self.kind.stochastic, "filtered": self.kind.filtered}
            tokens = sample(logits, first, positions, sampling, self.comm, **flags)
        else:
            q, best = distribution(logits[:, None], first, sampling, self.comm, filtered=self.kind.filtered)
            self._sampled_from.append(q)
            # Use new noise when a position is drafted again, at another distance: a rejected draft may have changed q,
            # through the keys that its verification selected.
            counters = positions + (len(self._tokens) << 32)
            tokens = sample_drafts(q, best, first, counters[:, None], sampling.seed, self.comm)[:, 0]
        self._tokens.append(tokens)
        return tokens

    def draft(self) -> Draft:
        """Returns all drafts; a row ends at its first invalid token."""
        proposed = torch.stack(self._tokens, 1)
        proposed = torch.where(proposed.cummin(1).values < 0, -1, proposed)
        return Draft(proposed, _concat(self._sampled_from) if self._sampled_from else None)


def _concat(parts: Sequence[Distribution]) -> Distribution:
    logits, best, last_key = (
        torch.cat([getattr(p, name) for p in parts], 1) for name in ("logits", "best", "last_key")
    )
    return Distribution(logits, best, last_key, parts[0].temperature, parts[0].min_p)
