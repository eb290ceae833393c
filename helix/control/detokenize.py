"""Tokens to text while they arrive, and the stop texts in it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one continuation, released as soon as it cannot change or become a stop text.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend, or None: no text.
        stop: texts that end the continuation; the text ends before the first of them.
        special: whether special tokens are text too.
    """

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...] = (), special: bool = False) -> None:
        self._said: list[str] = []
        self._stop = stop
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._special = special
        self._decoder = DecodeStream(skip_special_tokens=not special)
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
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=not self._special)
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
