"""Conversations of /v1/responses in memory, for requests that continue them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from launch.client.errors import ApiError


@dataclass
class StoredResponse:
    """An answer and what was asked for it, as JSON lists of items; answers that continue it share it.

    Attributes:
        previous: the answer that this one continues.
        response: the answer as the API returns it, as JSON without its output.
        holders: the store, if it lists this answer, and the held answers that continue it.
    """

    previous: StoredResponse | None
    items: tuple[bytes, ...]
    response: bytes = b""
    holders: int = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.items)) + len(self.response)

    @property
    def conversation(self) -> list[bytes]:
        """The items from the beginning of the conversation, as JSON lists."""
        found: list[bytes] = []
        node: StoredResponse | None = self
        while node is not None:
            found[:0] = node.items
            node = node.previous
        return found


@dataclass
class _Shelf:
    """The answers of one owner, the least recently used first; `size` counts shared bytes once."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0

    def hold(self, node: StoredResponse | None) -> None:
        while node is not None:
            node.holders += 1
            if node.holders > 1:
                return
            self.size += node.size
            node = node.previous

    def release(self, node: StoredResponse | None) -> None:
        while node is not None:
            node.holders -= 1
            if node.holders:
                return
            self.size -= node.size
            node = node.previous


class ResponseStore:
    """Answers by owner and id; only their owner finds them.

    Args:
        max_responses, max_bytes: limits per owner; the least recently used answers are dropped first.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._shelves: defaultdict[str | None, _Shelf] = defaultdict(_Shelf)

    @property
    def count(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return sum(shelf.size for shelf in self._shelves.values())

    def add(self, owner: str | None, name: str, stored: StoredResponse) -> None:
        shelf = self._shelves[owner]
        shelf.hold(stored)
        shelf.release(shelf.responses.pop(name, None))
        shelf.responses[name] = stored
        while len(shelf.responses) > self._max_responses or shelf.size > self._max_bytes:
            shelf.release(shelf.responses.popitem(last=False)[1])

    def get(self, owner: str | None, name: str) -> StoredResponse | None:
        """Returns an answer if it is stored; that does not count as a use."""
        return self._shelves[owner].responses.get(name) if owner in self._shelves else None

    def delete(self, owner: str | None, name: str) -> None:
        """Deletes an answer that is stored; those that continue it keep its items."""
        shelf = self._shelves[owner]
        shelf.release(shelf.responses.pop(name))

    def find(self, owner: str | None, name: str, param: str, given: str, advice: str = "") -> StoredResponse:
        """Returns an answer.

        Args:
            param, given: the request field that asks for it, and its value.
            advice: ends the error.

        Raises:
            ApiError: 404, it is not stored.
        """
        shelf = self._shelves.get(owner, _Shelf())
        if (stored := shelf.responses.get(name)) is None:
            what = f"{param}={given!r:.80} is not stored: its response had store=false, was dropped for newer ones "
            what += (
                "(serve.stored_responses, serve.stored_mib) or deleted, or is from before a restart or another key's"
            )
            raise ApiError(404, what + advice, param=param, code="response_not_found")
        shelf.responses.move_to_end(name)
        return stored
