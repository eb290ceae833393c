"""Tokens to text and outputs while they arrive, and the stop texts in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from helix.request import Logprobs, Output, Request


class OutputStream:
    """The outputs of one request, token by token.

    Args:
        eos: the model's end tokens.
        tokenizer: as of `TextStream`.

    Attributes:
        ended: whether the last output was that of its end.
    """

    def __init__(self, request: Request, eos: Collection[int], tokenizer: Any | None) -> None:
        self._request = request
        self._ends = request.sampling.ends(eos)
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._text = TextStream(tokenizer, request.stop)
        self.ended = False

    def push(self, token: int, logprobs: Sequence[Logprobs] = ()) -> Output:
        """The output of one more token, with its log-probabilities where they are wanted."""
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
            delta += self._text.finish()
        name, prompt, new = self._request.id, len(self._request.prompt), (token,)
        if reason is None:
            return Output(name, prompt, (), delta, "", None, new_ids=new)
        ids, text = tuple(self._ids), self._text.text
        return Output(name, prompt, ids, delta, text, reason, new_ids=new, logprobs=tuple(self._logprobs))


class TextStream:
    """The text of one continuation, released as soon as it cannot change or become a stop text.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend, or None: no text.
        stop: texts that end the continuation; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...] = ()) -> None:
        self._said: list[str] = []
        self._stop = stop
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""  # the beginning of what may become a stop text

    @property
    def text(self) -> str:
        """All that was released."""
        return "".join(self._said)

    def push(self, token: int) -> tuple[str, bool]:
        """The text that one more token releases, and whether a stop text is complete."""
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        return self._release(self._decoder.step(self._tokenizer.backend_tokenizer, token) or "")

    def finish(self) -> str:
        """What is still held when the continuation ends, up to a stop text: an unfinished one, or a torn character."""
        if self._tokenizer is None:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        seen = self.text + self._held
        # A torn character keeps back the text of its token, in which a stop text may be complete.
        ready, _ = self._release(whole[len(seen) :] if whole.startswith(seen) else "")
        rest, self._held = self._held, ""
        self._said.append(rest)
        return ready + rest

    def _release(self, new: str) -> tuple[str, bool]:
        self._held += new
        places = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if places:
            ready, self._held = self._held[: min(places)], ""
            self._said.append(ready)
            return ready, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._said.append(ready)
        return ready, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
