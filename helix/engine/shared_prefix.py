"""Which decoding sequences have the same first pages, so that decode attention reads these once for all of them.

Sequences that share a prefix have equal page numbers in equal columns of their block tables (`helix.engine.prefix`), so
the tables themselves are a tree of shared runs of columns. Runs may follow each other, for example a system prompt of
all sequences and a document of some:

    slot 0     [ 7 8 ][ 3 4 9 ] 11
    slot 1     [ 7 8 ][ 3 4 9 ] 12       (0, 1, 2: columns 0-1) and (0, 1: columns 2-4)
    slot 2     [ 7 8 ]  5 6
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np

from helix.engine.scheduler_output import SharedPrefix
from helix.worker.graph_keys import SHARED_PREFIXES


def shared_prefixes(
    pages: Mapping[int, np.ndarray], min_pages: float, limit: int = SHARED_PREFIXES[-1], min_slots: int = 2
) -> tuple[SharedPrefix, ...]:
    """Finds the shared runs of columns that save the most reads; those of a slot follow each other without a gap.

    Args:
        pages: by slot, the pages int32 [n] of its block table that other sequences may share.
        min_pages: minimum page reads that a run must save: its columns times all its slots but one.
        limit: maximum number of runs.
        min_slots: minimum number of a run's slots, at least two.
    """
    found: list[SharedPrefix] = []
    runs: list[tuple[int, int, list[int], int]] = []  # heap of (-saved pages, begin, slots, end)

    def add_runs(slots: list[int], begin: int, at: int) -> None:
        """Adds the runs of `slots` from column `begin` on, which have equal pages up to column `at`."""
        pending = [(slots, at)]
        while pending:
            slots, at = pending.pop()
            by_page: dict[int, list[int]] = {}
            for slot in slots:
                if at < len(pages[slot]):
                    by_page.setdefault(int(pages[slot][at]), []).append(slot)
            for members in by_page.values():
                if len(members) < min_slots:
                    continue
                width = min(len(pages[slot]) for slot in members)
                columns = np.stack([pages[slot][at:width] for slot in members])
                equal = np.append((columns == columns[0]).all(0), False)
                end = at + int(equal.argmin())
                saved = (len(members) - 1) * (end - begin)
                if saved >= min_pages:
                    heappush(runs, (-saved, begin, members, end))
                else:
                    pending.append((members, end))  # a longer run of fewer slots may be worth it

    add_runs(sorted(pages), 0, 0)
    while runs and len(found) < limit:
        _, begin, slots, end = heappop(runs)
        found.append(SharedPrefix(tuple(slots), begin, end))
        add_runs(slots, end, end)
    return tuple(found)
