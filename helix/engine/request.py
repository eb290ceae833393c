"""`Request`, and the updates that the engine reports about it."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from helix.sampling_params import SamplingParams

EMPTY_PROMPT = "the prompt is empty: it needs at least one token"


def outside_vocabulary(name: str, token: int, vocab: int) -> str:
    """Returns the message for a token id that the model does not have."""
    return f"{name} has token id {token}, but the model's vocabulary is [0, {vocab}): remove it"


class Grammar(Protocol):
    """State of a grammar that constrains one request's output, on rank 0."""

    def token_bitmask(self) -> np.ndarray:
        """Returns the allowed next tokens, one bit per token, lowest first, int32 [W]; never empty."""

    def accept_token(self, token: int) -> None:
        """Advances the grammar by a sampled token."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue.

    Attributes:
        id: unique among waiting and running requests.
        prompt: token ids; stored as int32 [n] if they fit.
        max_tokens: maximum tokens to generate, the EOS token included.
        priority: higher ones are admitted first.
        cache_salt: only requests with equal salts share cached prefixes, so that response times reveal no other
            prompts.
        num_prior_output_tokens: how many of the prompt's last tokens an earlier engine generated for this request:
            penalties and `min_tokens` count them as output.
        last_message_start: number of tokens before the last message of a chat, after which to keep what the next
            request may begin with; 0: unknown.
        grammar: in llguidance's format; None: unconstrained.
        matcher: state of `grammar`, which rank 0 creates from it.
    """

    id: str | int
    prompt: np.ndarray | Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: Hashable = None
    num_prior_output_tokens: int = 0
    last_message_start: int = 0
    grammar: str | None = None
    matcher: Grammar | None = None

    def __post_init__(self) -> None:
        if self.matcher is not None:
            object.__setattr__(self, "sampling", replace(self.sampling, masked=True))
        ids = self.prompt
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32):
            try:
                ids = np.asarray(array("i", ids))
            except OverflowError:  # outside any vocabulary: the engine refuses the request
                ids = np.array(ids, dtype=object)
        object.__setattr__(self, "prompt", ids)

    @property
    def prefix_salt(self) -> Hashable:
        """Salt of the prefix cache; unique if prompt log-probabilities are requested, since these need all logits."""
        return self.cache_salt if self.sampling.prompt_logprobs is None else (self.cache_salt, self.id)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at a sampled token, by the model's unprocessed logits.

    Attributes:
        sampled: log-probability of the sampled token.
        best: (token id, log-probability) of the most likely tokens, best first.
    """

    sampled: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, by the model's unprocessed logits.

    Attributes:
        ids: int32 [n, 1 + k], the token itself and the k most likely ones, best first.
        values: fp32 [n, 1 + k], their log-probabilities.
    """

    begin: int
    ids: np.ndarray
    values: np.ndarray


@dataclass(slots=True)
class RequestUpdate:
    """Progress of a request; the first update reports its admission.

    Attributes:
        cached_tokens: prefix hit at admission.
        num_computed_tokens: prompt tokens in the cache now.
        new_token_ids: tokens generated since the last update, the EOS token included.
        finish_reason: None while it runs, then `stop` (an end token, the last of `new_token_ids`), `length`, `abort` or
            `error`.
        reason: the cause of an `error`.
        logprobs: of `new_token_ids`, if requested.
        prompt_logprobs: if requested; positions may repeat.
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
