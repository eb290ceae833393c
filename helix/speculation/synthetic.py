"""Drafts that are kept at a set rate, whatever the model says: for benchmarks alone."""

from __future__ import annotations

from helix.events.decision import StepKind
from helix.speculation.base import Draft, Drafter
from helix.steps.step import DecodeState
from kernels.tokens.synthetic_drafts import synthetic_drafts


class SyntheticDrafter(Drafter):
    """Stands for drafts of a known quality where weights are random, and nothing that is drawn means anything.

    Args:
        limit: the most tokens proposed for each sequence and step.
        acceptance: chance of each draft, given that those before it were kept.
        seed: of the drafts and of what becomes of them.
        vocab: tokens that the model knows.
    """

    def __init__(self, limit: int, acceptance: float, seed: int, vocab: int) -> None:
        super().__init__(limit)
        self.acceptance = acceptance
        self.seed = seed
        self.vocab = vocab

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        lengths = state.lengths[: kind.rows]
        tokens, outcome = synthetic_drafts(lengths, kind.drafts, self.acceptance, self.seed, self.vocab)
        return Draft(tokens, outcome=outcome)
