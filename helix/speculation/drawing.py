"""How drafters that run a model draw what they propose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.events.decision import StepKind
from helix.models import Decoder
from helix.speculation.base import Draft
from helix.steps.sampling import distribution, draw, sample
from helix.steps.step import DecodeState
from kernels.reference.uniform import DRAFT
from kernels.tokens.accept import Distribution


class DraftDrawing:
    """Draws a step's drafts, one after the other, with each request's own temperature and filters.

    Args:
        comm: over which the logits are sharded.
        shared: with the noise that the target will draw with: what both would say is the same wherever the two
            distributions are. Otherwise with noise of its own, and drafts are kept by rejection.
        kind: of the step that verifies them.
    """

    def __init__(self, model: Decoder, comm: Communicator, shared: bool, kind: StepKind) -> None:
        self.model = model
        self.comm = comm
        self.shared = shared
        self.kind = kind
        self._tokens: list[Tensor] = []
        self._sampled_from: list[Distribution] = []

    def draw(self, hidden: Tensor, state: DecodeState, positions: Tensor) -> Tensor:
        """Tokens [rows] int64 for `positions` [rows], from hidden [rows, H]."""
        logits, first = self.model.logits(hidden), self.model.embedding.rows.start
        sampling = state.sampling.rows(slice(0, len(positions)))
        if self.shared or not self.kind.stochastic:
            flags = {"stochastic": self.kind.stochastic, "filtered": self.kind.filtered}
            tokens = sample(logits, first, positions, sampling, self.comm, **flags)
        else:
            q, best = distribution(logits[:, None], first, sampling, self.comm, filtered=self.kind.filtered)
            self._sampled_from.append(q)
            tokens = draw(q, best, first, positions[:, None], sampling.seed, DRAFT, self.comm)[:, 0]
        self._tokens.append(tokens)
        return tokens

    def draft(self) -> Draft:
        """All that was drawn; nothing behind a row that is broken."""
        proposed = torch.stack(self._tokens, 1)
        proposed = torch.where(proposed.cummin(1).values < 0, -1, proposed)
        return Draft(proposed, _joined(self._sampled_from) if self._sampled_from else None)


def _joined(parts: Sequence[Distribution]) -> Distribution:
    """Distributions of the same sequences at several positions, one after the other."""
    logits, best, last_key = (
        torch.cat([getattr(p, name) for p in parts], 1) for name in ("logits", "best", "last_key")
    )
    return Distribution(logits, best, last_key, parts[0].temperature, parts[0].min_p)
