"""Chat answers in blocks, whole or as typed events: a block is a thought, a text or a call."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from helix.answers.dialects import AnswerPart
from launch.client.choice import News
from launch.client.errors import ApiError
from launch.serving.answers import Answer
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


@dataclass(kw_only=True)
class BlockAnswer(Answer):
    """An answer of one choice, in blocks; how these look is up to each interface.

    Attributes:
        blocks: those so far.
        finish_reason: see `News`; set once it has ended.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None

    async def whole(self, heard: Callable[[News], None] = lambda news: None) -> dict[str, Any]:
        async for _ in self._steps(heard):
            pass
        return self._whole()

    async def events(self) -> AsyncIterator[bytes]:
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

    async def _steps(self, heard: Callable[[News], None] = lambda news: None) -> AsyncIterator[list[Event]]:
        """Yields the events of each piece of news; none of them in silence."""
        async for news in self.news():
            events: list[Event] = []
            for _, one in news:
                heard(one)
                for part in self.parts([one]):
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
