"""Overlap of two halves of a long prompt chunk: one computes while the other's messages are in flight.

    main stream   turn 0 | turn 1 | turn 2 |        | join
    side stream          | turn 0 | turn 1 | turn 2 |

Each collective belongs to a half's stream, so that only this half waits for it. The second half runs a turn behind the
first: it may read what the first wrote in earlier turns. All ranks launch the turns, and so their collectives, in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LEAST = 2048  # tokens of a half: smaller messages gain nothing, and use boxes (`comm.symm_mem`) bound to one stream


class Turns:
    """Runner of the two halves of a step.

    Args:
        device: a GPU, which gets a side stream for the second half; None: no streams, the same calls in the same order.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._side = None if device is None else torch.cuda.Stream(device)

    def run(self, first: Iterator[Tensor | None], second: Iterator[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Runs both halves turn by turn and returns their results; both have the same number of turns.

        Args:
            first, second: yield None at the end of a turn and their result in the last; launch kernels on the current
                stream, each in its own memory.
        """
        side = self._side
        main = None if side is None else torch.cuda.current_stream(side.device)
        while True:
            if side is not None and main is not None:
                side.wait_stream(main)  # for the first half's earlier turns, not the one launched next
            found = next(first)
            with torch.cuda.stream(side):
                last = next(second)
            if found is not None and last is not None:
                break
        if side is not None and main is not None:
            main.wait_stream(side)
        return found, last
