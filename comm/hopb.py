"""HOP-B: overlap of one batch chunk's exchange with the next chunk's attention (Helix Parallelism, section 2.1.3).

    main stream   attend 0 | attend 1   | attend 2   |            | join
    side stream            | exchange 0 | exchange 1 | exchange 2 |

Attention stays on one stream, so its launches may share a workspace; all exchanges of a step are on the side stream in
the order of their chunks, the same on every rank, as collectives require. Inside a captured step the two
streams become two branches of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

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

    def run(
        self,
        chunks: Sequence[slice],
        attend: Callable[[slice], T],
        exchange: Callable[[T], Tensor],
    ) -> Tensor:
        """Attends and exchanges all chunks; returns the results of `exchange`, concatenated.

        Args:
            chunks: runs of rows, in order.
            attend: computes the argument of `exchange` for a chunk, on the current stream.
            exchange: computes [rows, ...] from it, on the current stream, which is then the side stream.
        """
        # All tensors live to the end: the allocator may reuse memory freed by one stream while the other reads it.
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
