"""HOP-B: the exchange of one chunk of the batch beside the attention of the next (Helix Parallelism, section 2.1.3).

    main stream   attend 0 | attend 1   | attend 2   |            | join
    side stream            | exchange 0 | exchange 1 | exchange 2 |

Attention stays on one stream, so its launches may share a workspace; all exchanges of a step are on the side stream in
the order of their chunks, the same on every rank, which is what collectives ask for. Inside a captured step the two
streams become two branches of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# A persistent grid is not preempted, whatever a stream's priority: attention leaves so much room for the exchange.
RESERVED_SMS = 4


class Pipeline:
    """Runs the chunks of one attention phase after another, the exchange of each beside what follows.

    Args:
        device: a GPU, whose side stream the exchanges go to; None: no streams, the same calls in the same order.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._side = None if device is None else torch.cuda.Stream(device, priority=-1)

    def run(
        self,
        chunks: Sequence[slice],
        attend: Callable[[slice], T],
        exchange: Callable[[T], Tensor],
    ) -> Tensor:
        """Attention of all chunks, exchanged: what `exchange` returns of each, one after the other.

        Args:
            chunks: runs of rows, in order.
            attend: gives what `exchange` takes of a chunk, by kernels on the current stream.
            exchange: makes [rows, ...] of it, by kernels on the current stream too, which is the side stream.
        """
        # All are kept to the end: what one stream has freed, the allocator may hand out while the other reads it.
        attended: list[T] = []
        exchanged: list[Tensor] = []
        for rows in chunks:
            attended.append(attend(rows))
            if self._side is None:
                exchanged.append(exchange(attended[-1]))
                continue
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
            with torch.cuda.stream(self._side):
                exchanged.append(exchange(attended[-1]))
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        return torch.cat(exchanged)
