"""One continuation from a client's view: its tokens as text up to a stop text, and the parts of the text.

Rank 0 decides where tokens end, at an end token or the limit; where a text ends is decided here: at a stop text, or
behind the only call that an answer may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.answers.dialects import AnswerPart, Parser
from launch.client.core import Flight
from launch.client.detokenize import TextStream
from launch.client.schemas import Chat, Completion
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

    @classmethod
    def joined(cls, pieces: Sequence[News]) -> News:
        """Merges consecutive news of one continuation."""
        return cls(
            [token for one in pieces for token in one.ids],
            [logprobs for one in pieces for logprobs in one.logprobs],
            "".join(one.text for one in pieces),
            [part for one in pieces for part in one.parts],
            pieces[-1].finish_reason,
        )


class Choice:
    """A running continuation, read incrementally; later reads get larger pieces.

    Args:
        body: the request that it is of.
        abort: cancels a continuation; called, with its finish reason, if it ends before the engine reports its end.
        parser: splits the text into parts; None: it stays a text.

    Attributes:
        parsed: whether there is a parser.
        tokens: number of tokens drawn so far.
        ended: the finish reason, once it has ended.
        stop: the stop text at which it ended.
    """

    def __init__(
        self,
        index: int,
        flight: Flight,
        tokens: Tokens,
        body: Chat | Completion,
        abort: Callable[[Flight, str], None],
        parser: Parser | None,
    ) -> None:
        self.index = index
        self.flight = flight
        self.parsed = parser is not None
        self.tokens = 0
        self.ended: str | None = None
        self.stop: str | None = None
        self._stops = tuple(body.stop or ())
        self._tokens = tokens
        self._parser = parser
        self._abort = abort
        self._silent = body.max_tokens == 0  # what is drawn is no part of the answer
        self._special = not body.skip_special_tokens or (parser is not None and parser.wants_special)
        self._text = TextStream(tokens.tokenizer, self._stops, self._special, body.min_tokens or 0)

    def abort(self, finish_reason: str) -> None:
        """Cancels the continuation if it has not ended."""
        self._abort(self.flight, finish_reason)

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
            if flight.finish_reason == "stop" and at + 1 == len(fresh):  # an end token is no text
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
            self.abort(self.ended)
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
