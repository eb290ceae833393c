"""One continuation from a client's view: its tokens as text up to a stop text, and the parts of the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from helix.answers.dialects import AnswerPart, Parser
from helix.control.detokenize import TextStream
from launch.client.core import Flight
from launch.client.tokens import Tokens


@dataclass
class News:
    """The news of a continuation since the last call.

    Attributes:
        ids: tokens drawn, without those after its end.
        text: new text of a completion.
        parts: new parts of a chat's answer.
        finish_reason: stop, length, tool_calls, abort or error, once it has ended.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text: str = ""
    parts: list[AnswerPart] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.ids or self.finish_reason)


class Choice:
    """A running continuation, read incrementally; later reads get larger pieces.

    Args:
        abort: called if it ends before the engine reports its end.
        parser: splits the text into parts; None for a completion.
        silent: what is drawn is no part of the answer, which is empty.
        special: whether the text includes special tokens.
        min_tokens: see `TextStream`.

    Attributes:
        tokens: number of tokens drawn so far.
        ended: the finish reason, once it has ended.
        stop: the stop text at which it ended.
    """

    def __init__(
        self,
        index: int,
        flight: Flight,
        tokens: Tokens,
        stop: Sequence[str],
        stop_ids: Sequence[int],
        eos: Collection[int],
        abort: Callable[[Flight, str], None],
        parser: Parser | None = None,
        special: bool = False,
        min_tokens: int = 0,
        silent: bool = False,
    ) -> None:
        self.index = index
        self.flight = flight
        self.tokens = 0
        self.ended: str | None = None
        self.stop: str | None = None
        self._stops = tuple(stop)
        self._tokens = tokens
        self._parser = parser
        self._stop_ids = frozenset(stop_ids)
        self._eos = frozenset(eos)
        self._abort = abort
        self._silent = silent
        self._special = special or (parser is not None and parser.wants_special)
        self._text = TextStream(tokens.tokenizer, self._stops, self._special, min_tokens)

    def take(self) -> News:
        """Returns the news since the last call."""
        news, flight = News(), self.flight
        if self.ended is not None:
            return news
        if self._silent and (reason := flight.finish_reason) is not None:
            news.finish_reason = self.ended = "length" if reason == "stop" else reason
        if self._silent:
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
            text, stopped = self._text.finish()
            said.append(text)
            self.ended = "stop" if stopped else self.ended
        self.stop = self._stop_text() if stopped else None
        news.text = "".join(said)
        if self._parser is not None:
            news.parts = self._parser.feed(news.text)
            if self.ended is not None:
                news.parts += self._parser.finish(cut=stopped or self.ended != "stop")
            if self._parser.full:
                self.ended = "stop"
        if self.ended is not None:
            self._abort(flight, self.ended)
        news.finish_reason = self.ended
        if self.ended == "stop" and self._parser is not None and self._parser.calls:
            news.finish_reason = "tool_calls"
        return news

    def _stop_text(self) -> str | None:
        """Finds which of the stop texts follows the text."""
        ids = self.flight.drawn[: self.tokens]
        whole = self._tokens.decode(ids, special=self._special)
        rest = whole.removeprefix(self._text.text)
        return next((stop for stop in self._stops if rest.startswith(stop)), None)
