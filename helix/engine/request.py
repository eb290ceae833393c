"""Requests to the engine, and its updates."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from helix.sampling_params import SamplingParams


class Grammar(Protocol):
    """Grammar that an answer must follow, token by token; one per request, on rank 0."""

    def token_bitmask(self) -> np.ndarray:
        """Returns the mask of the allowed next tokens, a bit per token, lowest first, int32 [W]; never empty."""

    def accept_token(self, token: int) -> None:
        """Advances the grammar by the drawn token."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue.

    Attributes:
        id: identifies the request in updates and aborts; unique among running requests.
        prompt: token ids, from any sequence of integers; stored as int32 [n] if they fit.
        max_tokens: most tokens to draw, the EOS token included.
        priority: higher ones are admitted first.
        drawn: number of the prompt's last tokens that an earlier engine drew for this request: penalties and the least
            length count them as drawn.
        salt: only requests of the same salt share cached prefixes, so that response times reveal no other prompts.
        grammar: grammar of the answer in llguidance's format; None: unconstrained.
        matcher: where the answer is in its grammar; rank 0 makes it of the text.
    """

    id: str | int
    prompt: np.ndarray | Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: Hashable = None
    num_prior_output_tokens: int = 0
    grammar: str | None = None
    matcher: Grammar | None = None

    def __post_init__(self) -> None:
        if self.matcher is not None:
            object.__setattr__(self, "sampling", replace(self.sampling, masked=True))
        ids = self.prompt
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32):
            try:
                ids = np.asarray(array("i", ids))
            except OverflowError:  # beyond any vocabulary: the engine refuses the request
                ids = np.array(ids, dtype=object)
        object.__setattr__(self, "prompt", ids)

    @property
    def prefix_salt(self) -> Hashable:
        """Equal for requests that share cached prefixes; scores of a prompt need the logits of all of its tokens."""
        return self.cache_salt if self.sampling.prompt_logprobs is None else (self.cache_salt, self.id)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at a drawn token, of the unmodified model.

    Attributes:
        drawn: log-probability of the drawn token.
        best: (token id, log-probability) of the most likely tokens, best first.
    """

    sampled: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of a prompt, of the unmodified model.

    Attributes:
        begin: position of the first of them.
        ids: int32 [n, 1 + k], the token itself and the k most likely ones, best first.
        values: fp32 [n, 1 + k], their log-probabilities.
    """

    begin: int
    ids: np.ndarray
    values: np.ndarray


@dataclass(slots=True)
class RequestUpdate:
    """News of a request: tokens, prefill progress, or its end; the first one reports its admission.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens found in the cache at admission.
        prefilled: prompt tokens in the cache now.
        new_token_ids: tokens drawn since the last update, the EOS token included.
        finish_reason: None while it runs, then `stop` (an end token, the last of `new_token_ids`), `length`, `abort` or
            `error`.
        reason: the cause of an `error`.
        logprobs: those of `new_token_ids`, if requested.
        scored: tokens of the prompt with their log-probabilities, if requested; positions may come again.
    """

    id: str | int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_computed_tokens: int = 0
    new_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    reason: str | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
