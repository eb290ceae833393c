"""HOP-B: overlaps one batch chunk's exchange with the next chunk's attention (Helix Parallelism, section 2.1.3).

    main stream   attend 0 | attend 1   | attend 2   | exchange 2
    side stream            | exchange 0 | exchange 1 |

Each CTA of an NCCL exchange needs a whole SM, and stream priority does not preempt attention, whose CTAs are resident
until it ends, two per SM. So attention leaves some SMs free and is launched slightly after the exchange: the GPU places
CTAs on the emptiest SMs, so each CTA of the exchange gets an SM for itself.

Attention stays on one stream. Exchanges follow in chunk order, the same on every rank, as collectives require; the last
one has nothing to overlap, and stays on the main stream. In a captured step the streams become branches of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
RESERVED_SMS = 4  # SMs that attention leaves free for an exchange whose CTAs take one each
# At least 2 us: two kernels of a graph that become ready together start within 1 to 2 us of each other.
LEAD_CYCLES = 4000


class Pipeline:
    """Runs attention in chunks, and overlaps each chunk's exchange with the attention of the next.

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
            attend: launches a chunk's attention on the current stream; `exchange` gets its result.
            exchange: launches a chunk's exchange on the current stream, possibly the side stream.
            head_start: delay attention so that the exchange that overlaps it starts first.
        """
        side = self._side_stream
        main = None if side is None else torch.cuda.current_stream(side.device)
        # Keep all results alive: the allocator may reuse memory freed on one stream while the other reads it.
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
                if chunks > 1:  # waiting for a stream without work would end the capture of a graph
                    main.wait_stream(side)
                exchange(chunk, attended[-1])
