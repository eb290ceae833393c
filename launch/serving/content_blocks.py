"""Chat answers as content blocks (reasoning, text or tool call), complete or as typed events."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from launch.answers.answer_parser import AnswerPart
from launch.client.answer import Answer
from launch.client.errors import ApiError

ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would make one for each event
Event = dict[str, Any]  # its `type` is the SSE event name


@dataclass
class Block:
    """Consecutive parts of one kind; each call is a separate block.

    Attributes:
        kind: content, thinking or call.
        call, name: id and function of a call.
        pieces: of the text, or of a call's arguments, so far.
    """

    index: int
    kind: str
    call: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockAnswer:
    """An answer with one choice as content blocks; subclasses define the format of an API.

    Attributes:
        blocks: the blocks so far.
        finish_reason: see `Delta`; set once it has finished.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None

    async def collect(self) -> dict[str, Any]:
        """Waits for the end and returns the complete answer; raises ApiError if generation failed."""
        async for _ in self._event_batches():
            pass
        return await self._collected()

    async def events(self) -> AsyncIterator[bytes]:
        try:
            for event in self._start_events():
                yield self._encode(event)
            async for events in self._event_batches():
                for event in events:
                    yield self._encode(event)
            async for event in self._end_events():
                yield self._encode(event)
        except ApiError as error:
            yield self._encode(self._error_event(error))

    async def _event_batches(self) -> AsyncIterator[list[Event]]:
        """Yields the events of each poll, or a heartbeat's events."""
        async for deltas in self.answer.deltas():
            events: list[Event] = [*self._heartbeat_events()] if deltas is None else []
            for _, one in deltas or ():
                for part in self.answer.parts(one):
                    events += self._part_events(part)
                self.finish_reason = one.finish_reason
            if self.finish_reason is not None and self.blocks:
                events += self._block_stop_events(self.blocks[-1])
            if events:
                yield events
                self.answer.sent()

    def _part_events(self, part: AnswerPart) -> Iterator[Event]:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != part.kind or part.kind == "call":
            if last is not None:
                yield from self._block_stop_events(last)
            last = Block(len(self.blocks), part.kind, part.id, part.name)
            self.blocks.append(last)
            yield from self._block_start_events(last)
        last.pieces.append(part.text)
        yield self._delta_event(last, part.text)

    def _encode(self, event: Event) -> bytes:
        return f"event: {event['type']}\ndata: {ENCODER.encode(event)}\n\n".encode()

    @abstractmethod
    async def _collected(self) -> dict[str, Any]:
        """Returns the complete answer."""

    @abstractmethod
    def _start_events(self) -> Iterator[Event]:
        """Yields the events before the first block."""

    @abstractmethod
    def _heartbeat_events(self) -> Iterator[Event]:
        """Yields the events that tell a client that its answer is still being computed."""

    @abstractmethod
    def _block_start_events(self, block: Block) -> Iterator[Event]:
        """Yields the events that start a block."""

    @abstractmethod
    def _delta_event(self, block: Block, text: str) -> Event:
        """Returns the event for more text of a block."""

    @abstractmethod
    def _block_stop_events(self, block: Block) -> Iterator[Event]:
        """Yields the events that end a block."""

    @abstractmethod
    def _end_events(self) -> AsyncIterator[Event]:
        """Yields the events after the last block."""

    @abstractmethod
    def _error_event(self, error: ApiError) -> Event:
        """Returns the event for an error that ends the stream."""


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parses a call's arguments; None if they are no JSON object, or one that a response cannot have."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # numbers may be infinite, letters surrogates
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
