"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from helix.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: names the request in what comes out.
        prompt: token ids.
        max_new_tokens: at most so many tokens are drawn, the EOS token included.
        stop: texts that end the continuation; they are not part of the text.
    """

    id: str | int
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """What one request has become.

    Attributes:
        output_ids: all tokens drawn so far, the EOS token included.
        delta: the text that is new since the last output of this request.
        text: all the text so far; empty without a tokenizer.
        finish_reason: None while it goes on, then `stop` (EOS or a stop text), `length` or `error`.
        reason: why, where finish_reason is `error`.
    """

    id: str | int
    prompt_tokens: int
    output_ids: tuple[int, ...]
    delta: str
    text: str
    finish_reason: str | None
    reason: str | None = None
