"""Drafts with noise of their own: tokens are distributed as the target's, also where refused drafts change others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comm.loopback import LoopbackWorld, run_ranks
from helix.speculation.acceptance import accepted_candidates
from helix.speculation.draft_sampler import DraftSampler
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.sampling import SamplingState
from kernels.tokens.best_token import best_of_ranks
from tests.unit.test_sampling import chi_square, chi_square_limit

SEQUENCES, VOCAB = 20_000, 4
UNIFORM = torch.zeros(VOCAB)


def test_a_position_that_is_drafted_again_has_new_noise() -> None:
    """The second step's q depends on a draft that the first one refused, as keys chosen by its scores do."""

    def body(world: LoopbackWorld, rank: int) -> Tensor:
        comm, kind = world.communicator(rank, (0,)), DecodeGraphKey(SEQUENCES, 2, stochastic=True)
        sampling = SamplingState.create(SEQUENCES, "cpu")
        sampling.temperature.fill_(1)
        sampling.seed.copy_(torch.arange(SEQUENCES))
        state: Any = SimpleNamespace(sampling=sampling)

        def step(length: int, p: list[Tensor], q: list[Tensor]) -> tuple[Tensor, Tensor]:
            """The drafts, and the token behind the last one of them that is kept."""
            drawing = DraftSampler(lambda x: x, range(VOCAB), comm, False, kind)
            at = torch.full((SEQUENCES, 1), length + 1)
            for place, logits in enumerate(q):
                drawing.sample(logits.expand(SEQUENCES, -1).contiguous(), state, at[:, 0] + place)
            draft = drawing.draft()
            assert draft.sampled_from is not None
            logits = torch.stack(p).expand(SEQUENCES, -1, -1).flatten(0, 1)
            positions = (at + torch.arange(len(p))).flatten()
            sampled = accepted_candidates(
                logits, 0, draft.tokens, draft.sampled_from, positions, sampling, comm, filtered=False
            )
            assert sampled.accepted is not None
            first = torch.where(sampled.accepted > 0, draft.tokens[:, 0], best_of_ranks(sampled.pairs)[1])
            return draft.tokens, first

        never = torch.tensor([0.0, 0.0, 0.0, -torch.inf])
        refused, _ = step(10, [never, UNIFORM, UNIFORM], [torch.tensor([-100.0, -100.0, -100.0, 0.0]), UNIFORM])
        sure = torch.tensor([3.0, 0.0, 0.0, 0.0])
        by_refused = torch.where(refused[:, 1:] == 0, sure, UNIFORM)
        return step(11, [UNIFORM, UNIFORM, UNIFORM], [by_refused, UNIFORM])[1]

    counts = torch.bincount(run_ranks(1, body, timeout_s=60.0)[0], minlength=VOCAB)
    expected = torch.full((VOCAB,), SEQUENCES / VOCAB, dtype=torch.float64)
    assert chi_square(counts, expected) < chi_square_limit(VOCAB)
