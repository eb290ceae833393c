"""Requests on their way to an engine that serves, and words about them, from any thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Condition

from helix.events.request import Request


@dataclass(frozen=True)
class Abort:
    """The request with this id is to end now."""

    id: str | int


class Inbox:
    """What `Engine.serve` reads on rank 0; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._items: deque[Request | Abort] = deque()
        self._closed = False

    def submit(self, request: Request) -> None:
        """Raises RuntimeError where the inbox is closed."""
        self._put(request)

    def abort(self, request_id: str | int) -> None:
        """Ends a request, wherever it is; one that has ended already stays as it is."""
        self._put(Abort(request_id))

    def close(self) -> None:
        """Nothing more will come: the engine ends once all requests have. Aborts may still come."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> list[Request | Abort]:
        """All that has come since the last time, in order."""
        with self._changed:
            items = list(self._items)
            self._items.clear()
            return items

    def wait(self, seconds: float) -> bool:
        """Sleeps until something has come or the inbox is closed; False where nothing does within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self._closed, seconds)

    @property
    def pending(self) -> bool:
        """Whether something has come since the last time."""
        with self._changed:
            return bool(self._items)

    @property
    def ended(self) -> bool:
        """Whether it is closed and empty."""
        with self._changed:
            return self._closed and not self._items

    def _put(self, item: Request | Abort) -> None:
        with self._changed:
            if self._closed and isinstance(item, Request):
                raise RuntimeError(f"request {item.id!r} comes after the inbox was closed: make a new one to serve on")
            self._items.append(item)
            self._changed.notify()
