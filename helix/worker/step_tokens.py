"""Tokens of a step on their way from the device to rank 0's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from helix.engine.decision import Segment
from helix.engine.request import Logprobs, PromptLogprobs
from helix.errors import RankError
from helix.worker.clock import Moment
from helix.worker.step import PAST
from helix.worker.transfers import to_host
from kernels.tokens.reference import logprobs


class Summaries(NamedTuple):
    """Packed log-probabilities: of all slots, see `Shaper`; of prompts' tokens, by rank and order; None: not wanted."""

    drawn: Tensor | None = None
    scored: Tensor | None = None

    def on_host(self) -> Summaries:
        """Returns them copied to the host, like the tokens."""
        return Summaries(*(None if each is None else to_host(each) for each in self))


class StepTokens:
    """A step's tokens, copied to rank 0's host; the other ranks keep them on the device.

    Args:
        tokens: [n, m]: in each row the tokens of a sequence, then PAST.
        slots: slots of the rows; None: 0, 1, ..
        check: called with wait=False once the step has ended; raises if a collective of it failed.
        before: moment at which the step could begin.
        idle: moments between which the device waited for rank 0; None: it did not wait.
        summaries: log-probabilities.

    Attributes:
        end: moment at which the step's tokens are on the host.
        came: time at which they were read, by `time.perf_counter`.
    """

    def __init__(
        self,
        tokens: Tensor,
        slots: Sequence[int] | None,
        check: Callable[[bool], None],
        before: Moment,
        idle: tuple[Moment, Moment] | None = None,
        summaries: Summaries = Summaries(),  # noqa: B008
    ) -> None:
        self._tokens = to_host(tokens)
        self._drawn, self._scored = summaries.on_host()
        self._slots = range(len(tokens)) if slots is None else slots
        self._check = check
        self._before = before
        self._idle = idle
        self.end = Moment(tokens.device)
        self.came = 0.0

    @property
    def there(self) -> bool:
        """Whether the tokens are on the host, so that `read` does not wait."""
        return self.end.reached

    @property
    def seconds(self) -> float:
        """Duration of the step; valid after `read`."""
        return self.end.since(self._before)

    @property
    def busy_seconds(self) -> float:
        """Duration of the step without the time that the device waited for rank 0; valid after `read`."""
        idle = self._idle
        return self.seconds - (0.0 if idle is None else idle[1].since(idle[0]))

    def read(self) -> list[tuple[int, int]]:
        """Waits for the tokens; returns (slot, token) of each."""
        self.end.wait()
        self.came = time.perf_counter()
        self._check(False)
        taken = self._tokens != PAST
        slots = [self._slots[row] for row in taken.nonzero()[:, 0].tolist()]
        return _checked(list(zip(slots, self._tokens[taken].tolist(), strict=True)))

    def logprobs(self, slot: int, count: int) -> Logprobs:
        """Returns log-probabilities of a slot's token and of the `count` most likely ones; valid after `read`."""
        assert self._drawn is not None, "only shaped steps have log-probabilities"
        ids, values = (x[0].tolist() for x in logprobs(self._drawn[slot : slot + 1]))
        best = tuple(zip(ids[1 : 1 + count], values[1 : 1 + count], strict=True))
        return Logprobs(values[0], tuple((token, value) for token, value in best if token >= 0))

    def scored(self, prefill: Sequence[Segment]) -> Iterator[tuple[int, PromptLogprobs]]:
        """Yields slots and the log-probabilities of their prompts' scored tokens in a chunk; valid after `read`."""
        if self._scored is None:
            return
        ranks, done = len(self._scored), [0] * len(self._scored)
        for segment in (segment for segment in prefill if len(segment.scored)):
            home, count = segment.slot % ranks, len(segment.scored)
            ids, values = logprobs(self._scored[home, done[home] : done[home] + count])
            done[home] += count
            yield segment.slot, PromptLogprobs(segment.begin + 1, ids.int().numpy(), values.numpy())


def _checked(tokens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if min((token for _, token in tokens), default=0) < 0:
        raise RankError(
            "the model's logits are NaN: a weight, an activation or a rank's partial attention is not a number "
            "(try model.dtype=float32; if it stays, the checkpoint or this machine is at fault; where another rank "
            "says that it waited for one, that is the cause)"
        )
    return tokens
