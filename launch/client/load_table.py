"""Requests in flight in all processes of a server, in shared memory."""

from __future__ import annotations

import mmap

import numpy as np

READY, IN_FLIGHT, WAITING, COLUMNS = range(4)


class LoadTable:
    """A row for each process of a server, which only that process writes, except that a dead one's row is cleared.

    Args:
        fd: file of `size(processes)` bytes that the processes share; -1: memory of this process alone.
        row: this process's.
    """

    def __init__(self, processes: int = 1, fd: int = -1, row: int = 0) -> None:
        memory = mmap.mmap(fd, self.size(processes))
        self._rows = np.frombuffer(memory, np.int64).reshape(processes, COLUMNS)
        self._row = row

    @staticmethod
    def size(processes: int) -> int:
        return 8 * COLUMNS * processes

    @property
    def all_ready(self) -> bool:
        return bool(self._rows[:, READY].all())

    @property
    def in_flight(self) -> int:
        """Sequences that have not finished."""
        return int(self._rows[:, IN_FLIGHT].sum())

    @property
    def waiting(self) -> int:
        """Sequences that the engine has not admitted."""
        return int(self._rows[:, WAITING].sum())

    def write(self, ready: bool, in_flight: int, waiting: int) -> None:
        self._rows[self._row] = ready, in_flight, waiting

    def clear(self, row: int) -> None:
        self._rows[row] = 0
