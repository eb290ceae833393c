"""Chat answers in blocks, whole or as typed events: a block is a thought, a text or a call."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from launch.answers.chat_formats import AnswerPart
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
        finish_reason: see `Delta`; set once it has ended.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None

    async def collect(self) -> dict[str, Any]:
        """Waits for the end and returns the whole answer; raises ApiError if the continuation failed."""
        async for _ in self._event_batches():
            pass
        return self._collected()

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer as events; errors become an event of the stream."""
        try:
            for event in self._start_events():
                yield self._encode(event)
            async for events in self._event_batches():
                for event in events:
                    yield self._encode(event)
                if not events:
                    yield COMMENT
            for event in self._end_events():
                yield self._encode(event)
        except ApiError as error:
            yield self._encode(self._error_event(error))

    async def _event_batches(self) -> AsyncIterator[list[Event]]:
        """Yields the events of each piece of news; none of them in silence."""
        async for deltas in self.answer.deltas():
            events: list[Event] = []
            for _, one in deltas:
                for part in self.answer.parts(one):
                    events += self._part_events(part)
                self.finish_reason = one.finish_reason
            if self.finish_reason is not None and self.blocks:
                events += self._block_stop_events(self.blocks[-1])
            if events or not deltas:
                yield events

    def _part_events(self, part: AnswerPart) -> Iterator[Event]:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != part.kind or part.kind == "call":
            if last is not None:
                yield from self._block_stop_events(last)
            last = Block(len(self.blocks), part.kind, part.id, part.name)
            self.blocks.append(last)
            yield from self._block_start_events(last)
        last.text += part.text
        yield self._delta_event(last, part.text)

    def _encode(self, event: Event) -> bytes:
        return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()

    @abstractmethod
    def _collected(self) -> dict[str, Any]:
        """Describes the whole answer."""

    @abstractmethod
    def _start_events(self) -> Iterator[Event]:
        """Yields the events before all blocks."""

    @abstractmethod
    def _block_start_events(self, block: Block) -> Iterator[Event]:
        """Yields the events of a block's begin."""

    @abstractmethod
    def _delta_event(self, block: Block, text: str) -> Event:
        """Describes more text of a block."""

    @abstractmethod
    def _block_stop_events(self, block: Block) -> Iterator[Event]:
        """Yields the events of a block's end."""

    @abstractmethod
    def _end_events(self) -> Iterator[Event]:
        """Yields the events after all blocks."""

    @abstractmethod
    def _error_event(self, error: ApiError) -> Event:
        """Describes an error that ends the stream."""
