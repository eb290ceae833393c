"""HOP-B: overlap of one batch chunk's exchange with the next chunk's attention (Helix Parallelism, section 2.1.3).

    main stream   attend 0 | attend 1   | attend 2   | exchange 2
    side stream            | exchange 0 | exchange 1 |

Programs that exchange over a library take a multiprocessor (SM) each, and stream priority does not preempt attention,
whose programs stay to its end, two on an SM. So attention that leaves some SMs free is launched a little later than the
exchange beside it: programs come to the emptiest SMs, and of those that come first each finds one for itself.

Attention stays on one stream. Exchanges come in the order of their chunks, the same on every rank, as collectives
require; the last one has nothing to run beside, and stays on the main stream. Inside a captured step the two streams
become two branches of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
RESERVED_SMS = 4  # that attention leaves free for an exchange whose programs take one each
# 2 us and more: two kernels of a graph, both ready when a third ends, start within 1 or 2 of each other.
LEAD_CYCLES = 4000


class Pipeline:
    """Runner of one attention phase in chunks, the exchange of each beside the attention of the next.

    Args:
        device: a GPU, which gets a side stream for the exchanges; None: no streams, the same calls in the same order.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._side_stream = None if device is None else torch.cuda.Stream(device, priority=-1)

    def run(
        self, chunks: int, attend: Callable[[int], T], exchange: Callable[[int, T], object], head_start: bool = False
    ) -> None:
        """Attends and exchanges all chunks.

        Args:
            attend: computes the argument of `exchange` for a chunk, on the current stream.
            exchange: exchanges a chunk, on the current stream, which may then be the side stream.
            head_start: an exchange has to be on the GPU before the attention beside it.
        """
        side = self._side_stream
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
                if head_start:
                    torch.cuda._sleep(LEAD_CYCLES)
            else:
                if chunks > 1:  # a stream that nothing was given would end the capture of a graph
                    main.wait_stream(side)
                exchange(chunk, attended[-1])
