"""Incremental detokenization, with detection of stop texts."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from helix.tokenizer import Tokenizer

MAX_PENDING = 16  # tokens without text after which they are taken to be broken: a character has four bytes


class IncrementalDetokenizer:
    """Text of one continuation, released as soon as it can neither change nor become part of a stop text.

    Args:
        tokenizer: None: no text.
        stop: texts that end the continuation; the text ends before the first of them.
        special: whether special tokens appear in the text.
        min_tokens: a stop text that is complete within so many tokens does not end the continuation.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = (), special: bool = False, min_tokens: int = 0
    ) -> None:
        self._released: list[str] = []
        self._stop = stop
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._pending: list[int] = []  # tokens whose text is not out
        self._special = special
        self._decoder = DecodeStream(skip_special_tokens=not special)
        self._held_text = ""  # possible beginning of a stop text

    @property
    def text(self) -> str:
        """All released text."""
        return "".join(self._released)

    def push(self, token: int) -> tuple[str, bool]:
        """Decodes one more token; returns the text that it releases, and whether a stop text is complete."""
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        return self._release(self._decode_next(self._tokenizer, token))

    def finish(self) -> tuple[str, bool]:
        """Returns the text still held when the continuation ends, and whether it completes a stop text.

        It is a part of a stop text, or holds an incomplete character.
        """
        if self._tokenizer is None:
            return "", False
        whole = self._decode(self._tokenizer, self._ids)
        seen = self.text + self._held_text
        if not whole.startswith(seen):  # see `_decode_next`
            whole = seen + self._decode(self._tokenizer, self._pending)
        # An incomplete character holds back its token's text, which may contain a complete stop text.
        ready, stopped = self._release(whole[len(seen) :])
        rest, self._held_text = self._held_text, ""
        self._released.append(rest)
        return ready + rest, stopped

    def _decode_next(self, tokenizer: Tokenizer, token: int) -> str:
        """Decodes one more token; returns the text that cannot change any more."""
        self._pending.append(token)
        try:
            text = self._decoder.step(tokenizer.backend_tokenizer, token)
        except Exception:  # bytes that never became a character also spoil the text of bytes before them, which is out
            text = self._decode(tokenizer, self._pending)
            self._decoder = DecodeStream(self._pending, skip_special_tokens=not self._special)
        if text:
            self._pending = []
        elif len(self._pending) > MAX_PENDING:
            text = self._flush_broken(tokenizer)
        return text or ""

    def _flush_broken(self, tokenizer: Tokenizer) -> str:
        """Returns the text of pending tokens but the last ones: a character may begin in those, and in no others.

        A stream decodes all pending tokens for each new one, and broken ones would be pending for ever.
        """
        pending, whole = self._pending, self._decode(tokenizer, self._pending)
        for last in (3, 2, 1):  # whichever begins with a character
            parts = pending[:-last], pending[-last:]
            if "".join(self._decode(tokenizer, part) for part in parts) == whole:
                break
        self._pending, self._decoder = [], DecodeStream(skip_special_tokens=not self._special)
        return self._decode(tokenizer, parts[0]) + "".join(self._decode_next(tokenizer, token) for token in parts[1])

    def _decode(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=not self._special)

    def _release(self, new: str) -> tuple[str, bool]:
        old_length = len(self._held_text)  # what is complete within it came too early to count
        self._held_text += new
        positions = [
            at for stop in self._stop if (at := self._held_text.find(stop, max(0, old_length - len(stop) + 1))) >= 0
        ]
        if positions and len(self._ids) > self._min_tokens:
            ready, self._held_text = self._held_text[: min(positions)], ""
            self._released.append(ready)
            return ready, True
        keep = max((_overlap(self._held_text, stop) for stop in self._stop), default=0)
        ready, self._held_text = (
            self._held_text[: len(self._held_text) - keep],
            self._held_text[len(self._held_text) - keep :],
        )
        self._released.append(ready)
        return ready, False


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
