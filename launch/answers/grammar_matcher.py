"""Token masks for structured outputs, computed by llguidance on rank 0's host."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

PROBE = ' \n\t{"a": [1, "é😀", null]}'  # typical output, to check the tokenizer
CACHE_SIZE = 8  # compiled grammars
# All ranks wait while rank 0 computes a mask: about 10 ms at most. Memory: about 2 KB per lexer state.
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=100_000,
    max_items_in_row=20_000,  # enough for an object with 5,000 optional properties
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarMatcherFactory:
    """Creates grammar matchers for a model.

    Args:
        path: the model's `tokenizer.json`; may have fewer or more tokens than the model has logits.
        vocab: number of logits, and of bits of a mask; grammars cannot use tokens beyond.
        eos: the model's end tokens.

    Raises:
        ValueError: the model has no end token, or the bytes of tokens do not match their text.
    """

    def __init__(self, path: Path, vocab: int, eos: Collection[int]) -> None:
        eos = sorted(token for token in eos if token < vocab)
        if not eos:
            raise ValueError("the model has no end token, so a constrained answer could not end")
        text = path.read_text(encoding="utf-8")
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=vocab, eos_token=eos)
        except ValueError:  # the tokenizer has more tokens than the model
            self._tokenizer = LLTokenizer(_TruncatedTokenizer(LLTokenizer(text), vocab, eos[0]), eos_token=eos)  # type: ignore[arg-type]
        if self._tokenizer.decode_bytes(self._tokenizer.tokenize_str(PROBE)) != PROBE.encode():
            raise ValueError(f"{path}: decoding tokens to bytes does not give back the text")
        self._eos_mask = np.zeros(-(-vocab // 32), np.uint32)
        for token in eos:
            self._eos_mask[token // 32] |= np.uint32(1 << token % 32)
        self._compiled = lru_cache(CACHE_SIZE)(self._compile)

    def create_matcher(self, grammar: str, drawn: Collection[int] = ()) -> GrammarMatcher:
        """Creates the matcher of an answer whose first tokens are `drawn`.

        Args:
            grammar: in llguidance's format.

        Raises:
            ValueError: the grammar is invalid.
        """
        matcher = GrammarMatcher(self._compiled(grammar).deep_copy(), self._eos_mask.view(np.int32))
        for token in drawn:
            matcher.accept_token(token)
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds grammars that no token can start
        if matcher.is_error():
            raise ValueError(_error_message(matcher))
        return matcher


class _TruncatedTokenizer:
    """A tokenizer for llguidance (its `TokenizerWrapper`) with only the tokens below `vocab`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, whole: LLTokenizer, vocab: int, eos: int) -> None:
        self.eos_token_id = eos
        self.tokens = [whole.decode_bytes([token]) for token in range(vocab)]
        self.special_token_ids = [token for token in range(vocab) if whole.is_special_token(token)]
        self._whole = whole

    def __call__(self, text: str) -> list[int]:
        return self._whole.tokenize_str(text)


class GrammarMatcher:
    """Matcher of one answer, a `helix.engine.request.Grammar`; after the grammar's end it allows only end tokens."""

    def __init__(self, matcher: LLMatcher, eos_mask: np.ndarray) -> None:
        self._matcher = matcher
        self._eos_mask = eos_mask

    @property
    def error(self) -> str | None:
        """Why the rest of the answer is unconstrained; None if there was no error."""
        if not self._matcher.is_error():
            return None
        return f"the grammar cannot be followed further: {_error_message(self._matcher)}"

    def token_bitmask(self) -> np.ndarray:
        if self._matcher.is_stopped():
            return self._eos_mask
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._eos_mask)]
        return mask if mask.any() else self._eos_mask

    def accept_token(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def _error_message(matcher: LLMatcher) -> str:
    """Returns llguidance's error message without the grammar's text."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if error.startswith("NoExtension"):
        return "no text matches it"
    _, is_expression, what = error.rpartition("\nerror: ")
    return (what if is_expression else error).partition("\n ")[0]
