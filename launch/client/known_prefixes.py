"""Long texts and their token ids, for texts that begin with them: a conversation's next turn sends all turns again."""

from __future__ import annotations

import sys
from threading import Lock
from typing import AnyStr, Generic

import numpy as np

MIN_CHARS = 1 << 14  # shorter texts are read in less than a millisecond
MAX_PREFIXES, MAX_BYTES = 16, 1 << 26


class KnownPrefixes(Generic[AnyStr]):
    """The latest texts, up to a number and a size; thread-safe."""

    def __init__(self) -> None:
        self._latest: list[tuple[AnyStr, np.ndarray]] = []  # the latest one first
        self._lock = Lock()

    def find(self, text: AnyStr) -> tuple[AnyStr, np.ndarray]:
        """Returns a known text that `text` begins with, mostly an empty one, and its ids [n] int32."""
        for known in self._latest:
            if text.startswith(known[0]):
                return known
        return text[:0], np.empty(0, dtype=np.int32)

    def add(self, text: AnyStr, ids: np.ndarray, continued: AnyStr) -> None:
        """Adds a text; it replaces the known text that it continues."""
        if len(text) < MIN_CHARS:
            return
        with self._lock:
            latest: list[tuple[AnyStr, np.ndarray]] = [(text, ids)]
            latest += (known for known in self._latest if known[0] is not continued)
            del latest[MAX_PREFIXES:]
            while sum(sys.getsizeof(known[0]) + known[1].nbytes for known in latest) > MAX_BYTES:
                latest.pop()
            self._latest = latest
