"""To be replaced by `helix.inbox` and `Engine.serve`: one request at a time, over `Engine.generate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Condition

from helix.engine import Engine
from helix.request import Output, Request


class Inbox:
    """Requests on their way into an engine; any thread may call any method."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[Request] = deque()
        self._aborted: set[str | int] = set()
        self.closed = False

    def submit(self, request: Request) -> None:
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def abort(self, name: str | int) -> None:
        with self._changed:
            self._aborted.add(name)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()

    def is_aborted(self, name: str | int) -> bool:
        return self.closed or name in self._aborted

    def next(self, timeout_s: float) -> Request | None:
        """The oldest request; None where none has come for so long, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.closed, timeout_s)
            return self._waiting.popleft() if self._waiting and not self.closed else None


def serve(engine: Engine, inbox: Inbox, heartbeat_s: float) -> Iterator[Output]:
    """Serves what comes until the inbox is closed; a collective call, which yields outputs on rank 0."""
    if engine.comm.rank:
        word = ""
        while (word := engine.comm.broadcast_object(word)) != "end":
            if word == "next":
                for _ in engine.generate(()):
                    pass
        return
    while not inbox.closed:
        request = inbox.next(heartbeat_s)
        if request is not None and inbox.is_aborted(request.id):
            yield Output(request.id, len(request.prompt), (), "", "", "abort")
        elif request is not None:
            engine.comm.broadcast_object("next")
            outputs = engine.generate([request])
            for output in outputs:
                yield output
                if inbox.is_aborted(request.id) and output.finish_reason is None:
                    outputs.close()  # type: ignore[attr-defined]
                    yield Output(request.id, len(request.prompt), (), "", "", "abort")
        elif not inbox.closed:
            engine.comm.broadcast_object("idle")
    engine.comm.broadcast_object("end")
