"""Log-probabilities of prompts, for completions with `echo` and `logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comm.base import Communicator
from helix.engine.scheduler_output import PrefillChunk
from helix.models.decoder import Decoder
from helix.worker.transfers import to_device
from kernels.tokens.top_tokens import WIDTH, top_of_rank, top_of_ranks

SCORED = 64  # prompt tokens scored at a time: their logits take no more memory than a decode step's


class PromptScores:
    """Log-probabilities of the prompt tokens of a prefill chunk, computed on every rank.

    Args:
        max_tokens: number of scored tokens; in mode dp, the maximum over ranks.
        ranks: number of DP ranks.

    Attributes:
        count: scored tokens of this rank's sequences.
    """

    def __init__(
        self, model: Decoder, comm: Communicator, chunks: Sequence[PrefillChunk], max_tokens: int, ranks: int
    ) -> None:
        self._model, self._comm, self._ranks = model, comm, ranks
        device = model.weights.device
        rows, begin = [], 0
        for chunk in chunks:
            rows.append(torch.arange(begin, begin + len(chunk.logprob_token_ids)))
            begin += chunk.end - chunk.begin
        following = [torch.from_numpy(chunk.logprob_token_ids).long() for chunk in chunks]
        self.count = sum(map(len, following))
        self._summaries = torch.zeros(max_tokens, WIDTH, dtype=torch.int64, device=device)
        if self.count:
            both = torch.stack([torch.cat(rows), torch.cat(following)])
            # Pad with the last one: a single shape, so one compiled kernel.
            both = torch.cat([both, both[:, -1:].expand(2, -self.count % SCORED)], 1)
            self._rows, self._following = to_device(both, device)

    def add(self, hidden: Tensor) -> None:
        """Scores the token after each row of the normalized hidden states [N, H], over `model.attn_group`."""
        model, attn_group = self._model, self._model.attn_group
        for begin in range(0, self.count, SCORED):
            rows, following = (x[begin : begin + SCORED].contiguous() for x in (self._rows, self._following))
            top = top_of_rank(model.logits(hidden[rows]), following, model.embedding.rows.start)
            end = min(begin + SCORED, self.count)
            self._summaries[begin:end] = top_of_ranks(attn_group.all_gather(top))[: end - begin]

    def all_ranks(self) -> Tensor:
        """Returns the summaries of all ranks [dp, max_tokens, WIDTH]; a collective in mode dp."""
        return self._summaries[None] if self._ranks == 1 else self._comm.all_gather(self._summaries)
