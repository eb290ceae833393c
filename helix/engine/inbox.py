"""Thread-safe queue of requests and aborts to a serving engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Condition

from helix.engine.request import Request


@dataclass(frozen=True)
class Abort:
    """Ends the request with this id."""

    id: str | int


class Inbox:
    """Queue that `Engine.serve` reads on rank 0; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._items: deque[Request | Abort] = deque()
        self._closed = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Inbox:
        """Creates a closed inbox: the engine serves these requests, then returns."""
        inbox = cls()
        for request in requests:
            inbox.submit(request)
        inbox.close()
        return inbox

    def submit(self, request: Request) -> None:
        """Queues a request; raises RuntimeError if the inbox is closed."""
        self._put(request)

    def abort(self, request_id: str | int) -> None:
        """Queues the abort of a request; it has no effect on a request that has ended."""
        self._put(Abort(request_id))

    def close(self) -> None:
        """Refuses further requests: the engine returns once all have ended. Aborts are still accepted."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def drain(self) -> list[Request | Abort]:
        """Returns everything queued since the last call, in order."""
        with self._changed:
            items = list(self._items)
            self._items.clear()
            return items

    def wait(self, seconds: float) -> bool:
        """Waits until an item is queued or the inbox is closed meanwhile; returns False after `seconds`."""
        with self._changed:
            was_closed = self._closed
            return self._changed.wait_for(lambda: bool(self._items) or self._closed > was_closed, seconds)

    @property
    def pending(self) -> bool:
        with self._changed:
            return bool(self._items)

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._closed and not self._items

    def _put(self, item: Request | Abort) -> None:
        with self._changed:
            if self._closed and isinstance(item, Request):
                raise RuntimeError(f"cannot submit request {item.id!r}, the inbox is closed: create a new Inbox")
            self._items.append(item)
            self._changed.notify()
