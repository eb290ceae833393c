"""Answers that follow a grammar: which tokens may come next, by llguidance, on rank 0's host."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

PROBE = ' \n\t{"a": [1, "é😀", null]}'  # of what answers are made


class Grammars:
    """Makes grammars for a model.

    Args:
        path: of its `tokenizer.json`.
        vocab: tokens that the model can draw.
        eos: its end tokens.

    Raises:
        ValueError: it has no end, or the tokenizer's tokens do not spell what they stand for.
    """

    def __init__(self, path: Path, vocab: int, eos: Collection[int]) -> None:
        if not eos:
            raise ValueError("the model has no end token, with which an answer could end")
        self._tokenizer = LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab, eos_token=sorted(eos))
        if self._tokenizer.decode_bytes(self._tokenizer.tokenize_str(PROBE)) != PROBE.encode():
            raise ValueError(f"{path}: the bytes of its tokens are not those of the text")
        self._ends = np.zeros(-(-vocab // 32), np.uint32)
        for token in eos:
            self._ends[token // 32] |= np.uint32(1 << token % 32)

    def begun(self, grammar: str, drawn: Collection[int] = ()) -> BegunGrammar:
        """The rest of an answer of which some tokens are drawn already.

        Args:
            grammar: as llguidance reads it.

        Raises:
            ValueError: it cannot be followed.
        """
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {matcher.get_error()}")
        begun = BegunGrammar(matcher, self._ends.view(np.int32))
        for token in drawn:
            begun.take(token)
        return begun


class BegunGrammar:
    """A `helix.request.Grammar`; behind its end only end tokens may come."""

    def __init__(self, matcher: LLMatcher, ends: np.ndarray) -> None:
        self._matcher = matcher
        self._ends = ends

    def allowed(self) -> np.ndarray:
        if self._matcher.is_stopped():
            return self._ends
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._ends)]
        return mask if mask.any() else self._ends

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
