"""A drafter with a fixed acceptance rate, independent of the model: for benchmarks only."""

from __future__ import annotations

from helix.events.decision import StepKind
from helix.speculation.base import Draft, Drafter
from helix.steps.step import DecodeState
from kernels.tokens.synthetic_drafts import synthetic_drafts


class SyntheticDrafter(Drafter):
    """Drafter of a given quality, for models with random weights.

    Args:
        limit: most tokens proposed per sequence and step.
        acceptance: probability of each draft's acceptance, given that those before it were accepted.
        seed: seed of the drafts and their acceptance.
        vocab: size of the vocabulary.
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
