"""Chat answers in blocks, whole or as typed events: a block is a thought, a text or a call."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from launch.answers.dialects import AnswerPart
from launch.client.answer import Answer
from launch.client.errors import ApiError
from launch.serving.streams import COMMENT

Event = dict[str, Any]  # its `type` is the event's name


@dataclass
class Block:
    """A run of an answer's parts of one kind; each call is a block of its own.

    Attributes:
        kind: content, thinking or call.
        call, name: a call's id and function.
        text: text so far; of a call, its arguments.
    """

    index: int
    kind: str
    call: str
    name: str
    text: str = ""


class BlockAnswer:
    """An answer of one choice, in blocks; how these look is up to each interface.

    Attributes:
        blocks: those so far.
        finish_reason: see `News`; set once it has ended.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None

    async def whole(self) -> dict[str, Any]:
        """Waits for the end and returns the whole answer; raises ApiError if the continuation failed."""
        async for _ in self._steps():
            pass
        return self._whole()

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer as events; errors become an event of the stream."""
        try:
            for event in self._begun():
                yield self._written(event)
            async for events in self._steps():
                for event in events:
                    yield self._written(event)
                if not events:
                    yield COMMENT
            for event in self._ended():
                yield self._written(event)
        except ApiError as error:
            yield self._written(self._failed(error))

    async def _steps(self) -> AsyncIterator[list[Event]]:
        """Yields the events of each piece of news; none of them in silence."""
        async for news in self.answer.news():
            events: list[Event] = []
            for _, one in news:
                for part in self.answer.parts(one):
                    events += self._grown(part)
                self.finish_reason = one.finish_reason
            if self.finish_reason is not None and self.blocks:
                events += self._closed(self.blocks[-1])
            if events or not news:
                yield events

    def _grown(self, part: AnswerPart) -> Iterator[Event]:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != part.kind or part.kind == "call":
            if last is not None:
                yield from self._closed(last)
            last = Block(len(self.blocks), part.kind, part.id, part.name)
            self.blocks.append(last)
            yield from self._opened(last)
        last.text += part.text
        yield self._more(last, part.text)

    def _written(self, event: Event) -> bytes:
        return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """Describes the whole answer."""

    @abstractmethod
    def _begun(self) -> Iterator[Event]:
        """Yields the events before all blocks."""

    @abstractmethod
    def _opened(self, block: Block) -> Iterator[Event]:
        """Yields the events of a block's begin."""

    @abstractmethod
    def _more(self, block: Block, text: str) -> Event:
        """Describes more text of a block."""

    @abstractmethod
    def _closed(self, block: Block) -> Iterator[Event]:
        """Yields the events of a block's end."""

    @abstractmethod
    def _ended(self) -> Iterator[Event]:
        """Yields the events after all blocks."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Event:
        """Describes an error that ends the stream."""
