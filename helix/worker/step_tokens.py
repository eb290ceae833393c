"""Tokens of a step on their way from the device to rank 0's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from helix.engine.request import Logprobs, PromptLogprobs
from helix.engine.scheduler_output import PrefillChunk
from helix.errors import RankError
from helix.worker.clock import TimedEvent
from helix.worker.step import PLACEHOLDER_TOKEN_ID
from helix.worker.transfers import to_host
from kernels.tokens.reference import logprobs


class Summaries(NamedTuple):
    """Packed log-probabilities of sampled tokens by slot, see `LogitsProcessor`, and of prompt tokens by rank."""

    sampled: Tensor | None = None
    prompt: Tensor | None = None

    def on_host(self) -> Summaries:
        return Summaries(*(None if each is None else to_host(each) for each in self))


class StepTokens:
    """A step's tokens, copied asynchronously to rank 0's host.

    Args:
        tokens: [n, m]: in each row the tokens of a sequence, then PLACEHOLDER_TOKEN_ID.
        slots: slots of the rows; None: 0, 1, ..
        check: called with wait=False after the step; raises if one of its collectives failed.
        before: when the step could begin.
        idle: begin and end of the device's wait for rank 0; None: it did not wait.

    Attributes:
        end: when the tokens are on the host.
    """

    def __init__(
        self,
        tokens: Tensor,
        slots: Sequence[int] | None,
        check: Callable[[bool], None],
        before: TimedEvent,
        idle: tuple[TimedEvent, TimedEvent] | None = None,
        summaries: Summaries = Summaries(),  # noqa: B008
    ) -> None:
        self._tokens = to_host(tokens)
        self._sampled, self._prompt = summaries.on_host()
        self._slots = range(len(tokens)) if slots is None else slots
        self._check = check
        self._before = before
        self._idle = idle
        self.end = TimedEvent(tokens.device)
        self.read_at = 0.0

    @property
    def ready(self) -> bool:
        return self.end.reached

    @property
    def seconds(self) -> float:
        """Duration of the step; valid after `read`."""
        return self.end.since(self._before)

    @property
    def busy_seconds(self) -> float:
        """Duration of the step without the device's wait for rank 0; valid after `read`."""
        idle = self._idle
        return self.seconds - (0.0 if idle is None else idle[1].since(idle[0]))

    def read(self) -> list[tuple[int, int]]:
        """Waits for the tokens; returns (slot, token) of each."""
        self.end.wait()
        self.read_at = time.perf_counter()
        self._check(False)
        valid = self._tokens != PLACEHOLDER_TOKEN_ID
        slots = [self._slots[row] for row in valid.nonzero()[:, 0].tolist()]
        return _checked(list(zip(slots, self._tokens[valid].tolist(), strict=True)))

    def logprobs(self, slot: int, count: int) -> Logprobs:
        """Returns log-probabilities of a slot's token and of the `count` most likely ones; valid after `read`."""
        assert self._sampled is not None, "the step did not process logits"
        ids, values = (x[0].tolist() for x in logprobs(self._sampled[slot : slot + 1]))
        best = tuple(zip(ids[1 : 1 + count], values[1 : 1 + count], strict=True))
        return Logprobs(values[0], tuple((token, value) for token, value in best if token >= 0))

    def prompt_logprobs(self, prefill: Sequence[PrefillChunk]) -> Iterator[tuple[int, PromptLogprobs]]:
        """Yields slots and the log-probabilities of their prompt tokens in a chunk; valid after `read`."""
        if self._prompt is None:
            return
        ranks, done = len(self._prompt), [0] * len(self._prompt)
        for chunk in (chunk for chunk in prefill if len(chunk.logprob_token_ids)):
            dp_rank, count = chunk.slot % ranks, len(chunk.logprob_token_ids)
            ids, values = logprobs(self._prompt[dp_rank, done[dp_rank] : done[dp_rank] + count])
            done[dp_rank] += count
            yield chunk.slot, PromptLogprobs(chunk.begin + 1, ids.int().numpy(), values.numpy())


def _checked(tokens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if min((token for _, token in tokens), default=0) < 0:
        raise RankError(
            "the model's logits are NaN: a weight, an activation or a rank's partial attention is not a number "
            "(if another rank reports a timeout, that is the cause; else try model.dtype=float32, and if the logits "
            "are still NaN, check the checkpoint and this machine)"
        )
    return tokens
