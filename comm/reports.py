"""Messages from the ranks to rank 0 that nobody waits for, over a gloo group of their own.

Collectives go one way and in one order; these come whenever a rank has finished something. Each rank queues its
messages for a thread that sends them, and a thread of rank 0 receives them from any rank. The group is separate from
the control plane, so that a receive that is still posted keeps none of its connections open after `abort`.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

LOG = logging.getLogger("helix.comm")
CLOSED = -1  # length of a rank's last message


class ReportChannel:
    """This rank's end of the channel.

    Args:
        group: a gloo group of all processes, not used for anything else; destroyed by `close`.
        deliver: receives (rank, object) on rank 0.
        rank: the rank that this process is, or emulates.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, deliver: deque[tuple[int, Any]]) -> None:
        self._group, self._rank, self._deliver = group, rank, deliver
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        run = self._receive if dist.get_rank() == 0 else self._send
        self._thread = threading.Thread(target=run, name=f"reports of rank {rank}", daemon=True)
        self._thread.start()

    def report(self, obj: Any) -> None:
        if dist.get_rank() == 0:
            self._deliver.append((self._rank, obj))
        else:
            self._outgoing.put(pickle.dumps((self._rank, obj)))

    def close(self) -> None:
        """Sends what is queued, then destroys the group; waits for at most a second."""
        self._outgoing.put(None)
        self._thread.join(timeout=1.0)  # rank 0 waits for the other ranks' last messages
        dist.destroy_process_group(self._group)

    def _send(self) -> None:
        try:
            while (data := self._outgoing.get()) is not None:
                dist.send(torch.tensor([len(data)]), dst=0, group=self._group)
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=0, group=self._group)
            dist.send(torch.tensor([CLOSED]), dst=0, group=self._group)
        except RuntimeError as error:  # rank 0 has gone, which the control plane reports
            LOG.debug("rank %d cannot report any more: %s", self._rank, error)

    def _receive(self) -> None:
        size, left = torch.empty(1, dtype=torch.int64), dist.get_world_size() - 1
        try:
            while left:
                source = dist.recv(size, group=self._group)
                if (length := int(size)) == CLOSED:
                    left -= 1
                    continue
                data = torch.empty(length, dtype=torch.uint8)
                dist.recv(data, src=source, group=self._group)
                self._deliver.append(pickle.loads(data.numpy().tobytes()))
        except RuntimeError as error:  # a rank has gone
            LOG.debug("rank 0 receives no more reports: %s", error)
