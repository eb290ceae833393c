"""Incremental detokenization with detection of stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers.decoders import DecodeStream

from helix.tokenizer import Tokenizer

MAX_PENDING = 16  # pending tokens before they count as invalid UTF-8: a character has at most four bytes
MAX_CONTEXT = 32  # tokens to look back for text before the first token


class IncrementalDetokenizer:
    """Detokenizes one choice; releases text once it can neither change nor become part of a stop string.

    Args:
        tokenizer: None: no text.
        stop: stop strings; the text ends before the first match.
        special: whether the text includes special tokens.
        min_tokens: ignore stop strings that are complete within this many tokens.
        prompt: token ids that the text continues: SentencePiece's decoders strip the space that begins a text.

    Attributes:
        matched_stop: the stop string that ended the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...] = (),
        special: bool = False,
        min_tokens: int = 0,
        prompt: Sequence[int] | np.ndarray = (),
    ) -> None:
        self.matched_stop: str | None = None
        self._released: list[str] = []
        self._stop = stop
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._pending: list[int] = []  # tokens whose text is not released
        self._special = special
        self._context: list[int] = []  # a token of the prompt
        self._context_text = ""
        for last in map(int, prompt[: -MAX_CONTEXT - 1 : -1]):
            if tokenizer is None:
                break
            text = self._decode(tokenizer, [last])
            # Bytes are decoded together: invalid ones that follow would change their text.
            is_byte = str(tokenizer.backend_tokenizer.id_to_token(last)).startswith("<0x")
            if text and "\ufffd" not in text and not is_byte:
                self._context, self._context_text = [last], text
                break
        self._decoder = DecodeStream(self._context, skip_special_tokens=not special)
        self._held_text = ""  # may be the beginning of a stop string

    @property
    def text(self) -> str:
        return "".join(self._released)

    def push(self, token: int) -> tuple[str, bool]:
        """Decodes a token; returns the text that it releases, and whether a stop string is complete."""
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        return self._release(self._decode_next(self._tokenizer, token))

    def finish(self) -> tuple[str, bool]:
        """Returns the text still held at the end, and whether it completes a stop string.

        Held text is the beginning of a stop string or an incomplete character.
        """
        if self._tokenizer is None:
            return "", False
        whole = self._decode(self._tokenizer, self._ids)
        seen = self.text + self._held_text
        if not whole.startswith(seen):  # see `_decode_next`
            whole = seen + self._decode(self._tokenizer, self._pending)
        # An incomplete character holds back the text of its token, which may contain a complete stop string.
        ready, stopped = self._release(whole[len(seen) :])
        rest, self._held_text = self._held_text, ""
        self._released.append(rest)
        return ready + rest, stopped

    def _decode_next(self, tokenizer: Tokenizer, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._decoder.step(tokenizer.backend_tokenizer, token)
        except Exception:  # invalid bytes would change the text of bytes before them, which is already released
            text = self._decode(tokenizer, self._pending)
            self._decoder = DecodeStream(self._pending, skip_special_tokens=not self._special)
        if text:
            self._pending = []
        elif len(self._pending) > MAX_PENDING:
            text = self._flush_broken(tokenizer)
        return text or ""

    def _flush_broken(self, tokenizer: Tokenizer) -> str:
        """Returns the text of all pending tokens but the last few, in which a character may begin.

        DecodeStream decodes all pending tokens for each new one, and invalid bytes would stay pending forever.
        """
        pending, whole = self._pending, self._decode(tokenizer, self._pending)
        for last in (3, 2, 1):  # the split that leaves a character whole
            parts = pending[:-last], pending[-last:]
            if "".join(self._decode(tokenizer, part) for part in parts) == whole:
                break
        self._pending, self._decoder = [], DecodeStream(self._context, skip_special_tokens=not self._special)
        return self._decode(tokenizer, parts[0]) + "".join(self._decode_next(tokenizer, token) for token in parts[1])

    def _decode(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        text = tokenizer.decode([*self._context, *ids], skip_special_tokens=not self._special)
        return text[len(self._context_text) :]

    def _release(self, new: str) -> tuple[str, bool]:
        old_length = len(self._held_text)  # a match within it came before min_tokens and does not count
        self._held_text += new
        matches = [
            (at, stop)
            for stop in self._stop
            if (at := self._held_text.find(stop, max(0, old_length - len(stop) + 1))) >= 0
        ]
        if matches and len(self._ids) > self._min_tokens:
            end, self.matched_stop = min(matches, key=lambda match: match[0])
            ready, self._held_text = self._held_text[:end], ""
            self._released.append(ready)
            return ready, True
        keep = max((_overlap(self._held_text, stop) for stop in self._stop), default=0)
        end = len(self._held_text) - keep
        ready, self._held_text = self._held_text[:end], self._held_text[end:]
        self._released.append(ready)
        return ready, False


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
