"""Log-probabilities of prompts, for completions with `echo` and `logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.engine.decision import Segment
from helix.models.decoder import Decoder
from helix.worker.transfers import to_device
from kernels.tokens.top_tokens import WIDTH, top_of_rank, top_of_ranks

SCORED = 64  # prompt tokens scored at a time: their logits take no more memory than those of a decode step


class PromptScores:
    """Log-probabilities of the prompt tokens of a prefill chunk, computed on every rank.

    Args:
        comm: the communicator of all ranks.
        segments: the chunk.
        most: number of its scored tokens; in mode dp, that of the rank with the most.
        ranks: number of ranks that own whole sequences; 1 except in mode dp.

    Attributes:
        count: scored tokens of this rank's sequences.
    """

    def __init__(self, model: Decoder, comm: Communicator, segments: Sequence[Segment], most: int, ranks: int) -> None:
        self._model, self._comm, self._ranks = model, comm, ranks
        device = model.weights.device
        rows, begin = [], 0
        for segment in segments:
            rows.append(torch.arange(begin, begin + len(segment.scored)))
            begin += segment.end - segment.begin
        following = [torch.from_numpy(segment.scored).long() for segment in segments]
        self.count = sum(map(len, following))
        self._summaries = torch.zeros(most, WIDTH, dtype=torch.int64, device=device)
        if self.count:
            both = torch.stack([torch.cat(rows), torch.cat(following)])
            # Padded with the last one: a single shape, so one compiled kernel.
            both = torch.cat([both, both[:, -1:].expand(2, -self.count % SCORED)], 1)
            self._rows, self._following = to_device(both, device)

    def add(self, hidden: Tensor) -> None:
        """Scores the token after each row of the normalised hidden states [N, H]; a collective of `model.own`."""
        model, own = self._model, self._model.own
        for begin in range(0, self.count, SCORED):
            rows, following = (x[begin : begin + SCORED].contiguous() for x in (self._rows, self._following))
            top = top_of_rank(model.logits(hidden[rows]), following, model.embedding.rows.start)
            end = min(begin + SCORED, self.count)
            self._summaries[begin:end] = top_of_ranks(own.all_gather(top))[: end - begin]

    def of_all(self) -> Tensor:
        """Returns the summaries of all ranks [dp, most, WIDTH]; a collective in mode dp."""
        return self._summaries[None] if self._ranks == 1 else self._comm.all_gather(self._summaries)
