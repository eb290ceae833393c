"""HOP-B: overlap of one batch chunk's exchange with the next chunk's attention (Helix Parallelism, section 2.1.3).

    main stream   attend 0 | attend 1   | attend 2   | exchange 2
    side stream            | exchange 0 | exchange 1 |

Attention stays on one stream. Exchanges come in the order of their chunks, the same on every rank, as collectives
require; the last one has nothing to run beside, and stays on the main stream. Inside a captured step the two streams
become two branches of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
# SMs that attention leaves free for the exchange: stream priority does not preempt a persistent grid.
RESERVED_SMS = 4


class Pipeline:
    """Runner of one attention phase in chunks, the exchange of each beside the attention of the next.

    Args:
        device: a GPU, which gets a side stream for the exchanges; None: no streams, the same calls in the same order.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._side = None if device is None else torch.cuda.Stream(device, priority=-1)

    def run(self, chunks: int, attend: Callable[[int], T], exchange: Callable[[int, T], object]) -> None:
        """Attends and exchanges all chunks.

        Args:
            attend: computes the argument of `exchange` for a chunk, on the current stream.
            exchange: exchanges a chunk, on the current stream, which may then be the side stream.
        """
        side = self._side
        main = None if side is None else torch.cuda.current_stream(side.device)
        # All live to the end: the allocator may reuse memory freed by one stream while the other reads it.
        attended: list[T] = []
        for chunk in range(chunks):
            attended.append(attend(chunk))
            if side is None or main is None:
                exchange(chunk, attended[-1])
            elif chunk < chunks - 1:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    exchange(chunk, attended[-1])
            else:
                if chunks > 1:  # a stream that nothing was given would end the capture of a graph
                    main.wait_stream(side)
                exchange(chunk, attended[-1])
