"""One continuation as a client sees it: its tokens as text, up to a stop text, and what the text is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helix.control.detokenize import TextStream
from launch.serving.core import Flight
from launch.serving.dialects import Parser, Part
from launch.serving.tokens import Tokens


@dataclass
class News:
    """What is new of a continuation.

    Attributes:
        ids: tokens drawn, without those behind its end.
        text: of a completion, or
        parts: of a chat.
        finish_reason: stop, length, tool_calls, abort or error, once it has ended.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.ids or self.finish_reason)


class Choice:
    """A continuation under way, read as it comes; whoever reads it late gets it in larger pieces.

    Args:
        abort: called where it ends before the engine says so.
        parser: takes the text apart; None: it is a completion's.
        special: whether special tokens are text too.

    Attributes:
        tokens: drawn so far.
        ended: why, once it has ended.
    """

    def __init__(
        self,
        index: int,
        flight: Flight,
        tokens: Tokens,
        stop: Sequence[str],
        stop_ids: Sequence[int],
        eos: Sequence[int],
        abort: Callable[[Flight, str], None],
        parser: Parser | None = None,
        special: bool = False,
    ) -> None:
        self.index = index
        self.flight = flight
        self.tokens = 0
        self.ended: str | None = None
        self._parser = parser
        self._stop_ids = frozenset(stop_ids)
        self._eos = frozenset(eos)
        self._abort = abort
        special = special or (parser is not None and parser.wants_special)
        self._text = TextStream(tokens.tokenizer, tuple(stop), special=special)

    def take(self) -> News:
        """What has come since the last call."""
        news, flight = News(), self.flight
        if self.ended is not None:
            return news
        fresh = flight.drawn[self.tokens :]
        said: list[str] = []
        stopped = False
        for at, token in enumerate(fresh):
            news.ids.append(token)
            last = flight.finish_reason == "stop" and at + 1 == len(fresh) and token in self._eos
            if token in self._stop_ids or last:
                self.ended = "stop"
                break
            text, stopped = self._text.push(token)
            said.append(text)
            if stopped:
                self.ended = "stop"
                break
        news.logprobs = flight.logprobs[self.tokens : self.tokens + len(news.ids)]
        self.tokens += len(news.ids)
        self.ended = self.ended or flight.finish_reason
        if self.ended is not None and not stopped:
            said.append(self._text.finish())
        news.text = "".join(said)
        if self._parser is not None:
            news.parts = self._parser.feed(news.text)
            if self.ended is not None:
                news.parts += self._parser.finish()
            if self._parser.full:
                self.ended = "stop"
        if self.ended is not None:
            self._abort(flight, self.ended)
        news.finish_reason = self.ended
        if self.ended == "stop" and self._parser is not None and self._parser.calls:
            news.finish_reason = "tool_calls"
        return news
