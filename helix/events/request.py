"""What goes into the engine and what comes out."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from helix.events.sampling_params import SamplingParams


class Grammar(Protocol):
    """What an answer has to look like, told token by token; of one request, on rank 0."""

    def allowed(self) -> np.ndarray:
        """A bit for each token of the vocabulary that may come next, lowest first, int32 [W]; at least one is set."""

    def take(self, token: int) -> None:
        """The next token is this one."""


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        id: names the request in what comes out, and when it is to be aborted; no other one under way has the same.
        prompt: token ids, from any sequence of integers; kept as int32 [n] where they fit.
        max_new_tokens: at most so many tokens are drawn, the EOS token included.
        stop: texts that end the continuation; they are not part of the text.
        priority: a higher one is admitted first.
        drawn: so many of the prompt's last tokens are the answer of an engine that ended: penalties and a least length
            count them as drawn.
        salt: what is cached under another one is not seen, so that nobody learns from a fast answer what others sent.
        grammar: what the answer has to look like; None: anything.
    """

    id: str | int
    prompt: np.ndarray | Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    priority: int = 0
    salt: Hashable = None
    drawn: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.grammar is not None:
            object.__setattr__(self, "sampling", replace(self.sampling, masked=True))
        ids = self.prompt
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32):
            try:
                ids = np.asarray(array("i", ids))
            except OverflowError:  # no vocabulary has such an id: the engine refuses the request
                ids = np.array(ids, dtype=object)
        object.__setattr__(self, "prompt", ids)


@dataclass(frozen=True)
class Logprobs:
    """How likely a drawn token was, by the model alone.

    Attributes:
        drawn: log-probability of the token that was drawn.
        best: (token id, log-probability) of the most likely ones, best first.
    """

    drawn: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Delta:
    """New tokens of one request; the first one without any says that it is admitted.

    Attributes:
        cached_tokens: of the prompt, so many were in the cache when it was admitted.
        prefilled: of the prompt, so many are in the cache.
        new_ids: tokens drawn since the last one, the EOS token included.
        finish_reason: None while it goes on, then `stop` (EOS), `length`, `abort` or `error`.
        reason: why, where finish_reason is `error`.
        logprobs: of `new_ids`, where the request wants them.
    """

    id: str | int
    prompt_tokens: int
    cached_tokens: int
    prefilled: int
    new_ids: tuple[int, ...]
    finish_reason: str | None
    reason: str | None
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class Output:
    """What is new of one request, and all of it where it has ended: what an output costs does not grow with the text.

    Attributes:
        new_ids: tokens drawn since the last output of this request, the EOS token included.
        delta: the text that is new since then.
        output_ids: all tokens, once the request has ended; empty before.
        text: all the text, once the request has ended; empty before, and without a tokenizer.
        finish_reason: None while it goes on, then `stop` (EOS or a stop text), `length` or `error`.
        reason: why, where finish_reason is `error`.
        logprobs: of `output_ids`, where the request wants them.
    """

    id: str | int
    prompt_tokens: int
    output_ids: tuple[int, ...]
    delta: str
    text: str
    finish_reason: str | None
    reason: str | None = None
    new_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
