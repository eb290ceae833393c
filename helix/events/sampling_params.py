"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from kernels.tokens.top_tokens import TOP

_FP32_MAX = torch.finfo(torch.float32).max
_INT32_MAX, _INT64_MAX = torch.iinfo(torch.int32).max, torch.iinfo(torch.int64).max

MOST_TOKENS = 300  # most tokens with a setting of their own in a request


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; real numbers are used as fp32.

    Changes of logits precede the temperature, in the order of the attributes. Reported probabilities are those of the
    unmodified model.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (smallest id among equals).
        top_k: only the k best tokens are drawn; 0 is off.
        top_p: of those, only the fewest best tokens whose probabilities sum to top_p; 1 is off.
        min_p: of those, only tokens at least min_p times as likely as the best one; 0 is off.
        seed: fixes, with the position, every draw: what else is in the batch and the layout change nothing.
        logit_bias: token id -> number added to its logit.
        min_tokens: least length of the answer before `stop_token_ids` or the model's end tokens can be drawn, or a stop
            text counts.
        repetition_penalty: divides positive logits of tokens in the prompt or the answer, multiplies others; 1 is off.
        frequency_penalty: subtracted from a token's logit for each time that it is in the answer.
        presence_penalty: subtracted from the logit of a token that is in the answer.
        masked: rank 0 sends a mask of the allowed tokens before each draw.
        stop_token_ids: tokens that end the answer, besides the model's own.
        ignore_eos: the model's own end tokens do not end the answer.
        logprobs: number of most likely tokens reported besides each drawn one; None: no log-probabilities.
        prompt_logprobs: the same for each token of the prompt but the first, which are then all computed: no prefix of
            it is taken from the cache.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    masked: bool = False
    stop_token_ids: Sequence[int] = field(default=(), hash=False)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Ranges exclude NaN, which compares false.
        real, integer = (int, float), (int,)
        self._require("temperature", real, lambda x: 0 <= x <= _FP32_MAX, "a finite number >= 0 (fp32), 0 = greedy")
        self._require("top_k", integer, lambda x: 0 <= x <= _INT64_MAX, "an integer in [0, 2**63), 0 = off")
        self._require("top_p", real, lambda x: 0 < x <= 1, "a number in (0, 1], 1 = off")
        self._require("min_p", real, lambda x: 0 <= x <= 1, "a number in [0, 1], 0 = off")
        self._require("seed", integer, lambda x: 0 <= x <= _INT64_MAX, "an integer in [0, 2**63)")
        self._require("min_tokens", integer, lambda x: 0 <= x <= _INT32_MAX, "an integer in [0, 2**31), 0 = off")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, real, lambda x: -2 <= x <= 2, "a number in [-2, 2], 0 = off")
        self._require("repetition_penalty", real, lambda x: 0.01 <= x <= 100, "a number in [0.01, 100], 1 = off")
        for name in ("masked", "ignore_eos"):
            self._require(name, (bool,), lambda x: True, "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._require(name, integer, lambda x: 0 <= x <= TOP, f"an integer in [0, {TOP}], or none")

        def short(x: Sized) -> bool:
            return len(x) <= MOST_TOKENS

        def is_id(x: int) -> bool:
            return 0 <= x <= _INT32_MAX

        self._require("stop_token_ids", (list, tuple), short, f"a list of at most {MOST_TOKENS} token ids")
        self._require("logit_bias", (Mapping,), short, f"values of at most {MOST_TOKENS} token ids")
        for token in self.stop_token_ids:
            _check("stop_token_ids token", token, integer, is_id, "an integer in [0, 2**31)")
        for token, bias in self.logit_bias.items():
            _check("logit_bias token", token, integer, is_id, "an integer in [0, 2**31)")
            _check(f"logit_bias of token {token}", bias, real, lambda x: -100 <= x <= 100, "a number in [-100, 100]")

    def _require(self, name: str, types: tuple[type, ...], inside: Callable[[Any], bool], accepted: str) -> None:
        _check(name, getattr(self, name), types, inside, accepted)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k or top-p is on; min-p costs nothing and does not count."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def changes_logits(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return self.masked or bool(self.logit_bias) or self.min_tokens > 0 or penalties != (0, 0, 1)

    @cached_property  # the scheduler looks at it for each decision
    def is_shaped(self) -> bool:
        """Whether its steps shape logits or report log-probabilities; such sequences take no drafts."""
        return self.changes_logits or self.logprobs is not None

    def ends(self, eos: Collection[int]) -> set[int]:
        """Returns the tokens that end the answer, given the model's end tokens `eos`."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos)}


def _check(name: str, value: Any, types: tuple[type, ...], inside: Callable[[Any], bool], accepted: str) -> None:
    is_bool = isinstance(value, bool) and bool not in types
    if is_bool or not isinstance(value, types) or not inside(value):
        raise ValueError(f"sampling parameter {name} = {value!r:.500}: must be {accepted}")
