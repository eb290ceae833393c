"""Outputs with text, from tokens as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from helix.control.detokenize import TextStream
from helix.events.request import Logprobs, Output, PromptLogprobs, Request


class OutputStream:
    """Outputs of one request, token by token.

    Args:
        eos: the model's end tokens.
        tokenizer: see `TextStream`.

    Attributes:
        ended: whether the last output was the final one.
        scored: parts of the prompt with their log-probabilities, so far.
    """

    def __init__(self, request: Request, eos: Collection[int], tokenizer: Any | None) -> None:
        self._request = request
        self._ends = request.sampling.ends(eos)
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._text = TextStream(tokenizer, request.stop, min_tokens=request.sampling.min_tokens)
        self.ended = False
        self.scored: list[PromptLogprobs] = []

    def push(self, token: int, logprobs: Sequence[Logprobs] = ()) -> Output:
        """Returns the output of one more token, with its log-probabilities if requested."""
        self._ids.append(token)
        self._logprobs += logprobs
        delta, stopped = self._text.push(token)
        reason = None
        if token in self._ends or stopped:
            reason = "stop"
        elif len(self._ids) == self._request.max_new_tokens:
            reason = "length"
        self.ended = reason is not None
        if reason and not stopped:
            rest, stopped = self._text.finish()
            delta += rest
            reason = "stop" if stopped else reason
        name, prompt, new = self._request.id, len(self._request.prompt), (token,)
        if reason is None:
            return Output(name, prompt, (), delta, "", None, new_ids=new)
        ids, text = tuple(self._ids), self._text.text
        told, scored = tuple(self._logprobs), tuple(self.scored)
        return Output(name, prompt, ids, delta, text, reason, new_ids=new, logprobs=told, scored=scored)
