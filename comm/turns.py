"""Two halves of a long prompt chunk take turns in the layers: one computes while the other's messages are on their way.

    main stream   turn 0 | turn 1 | turn 2 |        | join
    side stream          | turn 0 | turn 1 | turn 2 |

Each collective belongs to a half's stream, so that only this half waits for it. The second half comes a turn behind the
first: it may read what the first has written in the turns before. Ranks launch the turns in one order, and with it
their collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LEAST = 2048  # tokens of a half: smaller messages take less time, and boxes (`comm.symm_mem`) that one stream may use


class Turns:
    """Runs the halves of a step.

    Args:
        device: a GPU, whose side stream the second half goes to; None: no streams, the same calls in the same order.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._side = None if device is None else torch.cuda.Stream(device)

    def run(self, first: Iterator[Tensor | None], second: Iterator[Tensor | None]) -> tuple[Tensor, Tensor]:
        """The results of two halves of as many turns each.

        Args:
            first, second: give None where the other is to go on, and their result at last; by kernels on the current
                stream, each in memory of its own.
        """
        side = self._side
        main = None if side is None else torch.cuda.current_stream(side.device)
        while True:
            if side is not None and main is not None:
                side.wait_stream(main)  # for the first half's turns so far, not the one that it starts now
            found = next(first)
            with torch.cuda.stream(side):
                last = next(second)
            if found is not None and last is not None:
                break
        if side is not None and main is not None:
            main.wait_stream(side)
        return found, last
