"""Ranks as threads of one process: the cheapest and strictest backend, for tests.

Every collective checks that all ranks called the same operation with the same shape and dtype. The run ends at once if
a rank fails, returns early or waits for something that can no longer happen.

One rank runs at a time, until it waits in a collective and wakes the next. Threads that compete for the interpreter at
every tensor operation are several times slower.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from comm.base import Communicator, T, sum_in_rank_order

R = TypeVar("R")


@dataclass
class _Rendezvous:
    calls: dict[int, str] = field(default_factory=dict)
    payloads: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    readers: int = 0


class LoopbackWorld:
    """The shared state of `world_size` threads, one per rank, all on one `device`.

    Args:
        timeout_s: deadline of every wait.
    """

    def __init__(self, world_size: int, timeout_s: float = 30.0, device: torch.device | str = "cpu") -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self.failure: tuple[int | None, BaseException] | None = None
        self.reports: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()  # guards everything below
        self._ended = threading.Event()
        self._pending: dict[tuple[tuple[int, ...], int], _Rendezvous] = {}
        self._call_counts: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._waiting: dict[int, str] = {}
        self._finished: set[int] = set()
        self._running: int | None = None
        self._ready = deque(range(world_size))  # ranks that can run
        self._run_locks = [threading.Lock() for _ in range(world_size)]  # released to let a rank run
        for lock in self._run_locks:
            lock.acquire()

    def communicator(self, rank: int, kvp_group: Sequence[int]) -> LoopbackCommunicator:
        return LoopbackCommunicator(self, rank, kvp_group)

    def start(self) -> None:
        with self._lock:
            self._run_next()

    @contextmanager
    def run_exclusive(self, rank: int) -> Iterator[None]:
        """Runs a rank while no other runs; a collective in which it waits lets the next rank run."""
        self._run_locks[rank].acquire()
        try:
            yield
        finally:
            with self._lock:
                if self._running == rank:
                    self._run_next()

    def let_others_run(self, rank: int) -> None:
        """Lets the ranks run that do not wait for this one, which polls for what they do."""
        with self._lock:
            if not self._ready or self._running != rank:
                return
            self._ready.append(rank)
            self._run_next()
        self._run_locks[rank].acquire()

    def abort(self, rank: int | None, error: BaseException) -> None:
        """Wakes every waiting rank with an error; the first call sets the rank to blame (None: none in particular)."""
        with self._lock:
            self._fail(rank, error)

    def finish(self, rank: int) -> None:
        """Marks a rank as done, so that ranks that wait for it fail at once."""
        with self._lock:
            self._finished.add(rank)
            if len(self._finished) == self.world_size:
                self._ended.set()
            self._check_progress()

    def wait(self) -> None:
        """Waits until all ranks have finished; raises the first failure, or RuntimeError at the deadline."""
        if not self._ended.wait(self.timeout_s):
            missing = sorted(set(range(self.world_size)) - self._finished)
            self.failure = self.failure or (
                None,
                RuntimeError(f"ranks {missing} did not finish within {self.timeout_s} s"),
            )
        if self.failure is not None:
            raise self.failure[1]

    def rendezvous(
        self,
        ranks: tuple[int, ...],
        rank: int,
        call: str,
        payload: Any,
        combine: Callable[[list[Any]], Any] = list,
    ) -> Any:
        """Waits until all `ranks` made the same `call`; returns `combine` of their payloads in rank order.

        All ranks get the same object. Pass a copy as payload if the original may change after the call.

        Raises:
            RuntimeError: the calls differ, a rank failed or returned, or the deadline passed.
        """
        with self._lock:
            key = (ranks, self._call_counts[ranks, rank])
            self._call_counts[ranks, rank] += 1
            entry = self._pending.setdefault(key, _Rendezvous())
            entry.calls[rank] = call
            entry.payloads[rank] = payload
            if waits := len(entry.calls) < len(ranks) and self.failure is None:
                self._waiting[rank] = f"{call} of ranks {ranks}"
                self._check_progress()
                if self._running == rank:
                    self._run_next()
            elif len(entry.calls) == len(ranks):
                self._ready.extend(member for member in ranks if self._waiting.pop(member, None))
        if waits and not self._run_locks[rank].acquire(timeout=self.timeout_s):
            with self._lock:
                if is_late := rank in self._waiting:
                    missing = [r for r in ranks if r not in entry.calls]
                    error = f"rank {rank} waited {self.timeout_s} s in {call} for ranks {missing}"
                    self._fail(None, RuntimeError(error))
                    if rank in self._ready:
                        self._ready.remove(rank)  # it runs now, concurrently with the one that holds the turn
            if not is_late:
                self._run_locks[rank].acquire()
        if len(entry.calls) < len(ranks):
            assert self.failure is not None
            culprit, cause = self.failure
            who = "" if culprit is None else f"rank {culprit} failed: {type(cause).__name__}: "
            raise RuntimeError(f"{who}{cause}")
        if len(set(entry.calls.values())) > 1:
            table = "; ".join(f"rank {r} called {entry.calls[r]}" for r in ranks)
            raise RuntimeError(f"ranks disagree on their collective: {table}")
        with self._lock:
            if not entry.readers:
                entry.result = combine([entry.payloads[r] for r in ranks])
            entry.readers += 1
            if entry.readers == len(ranks):
                del self._pending[key]
            return entry.result

    def _run_next(self) -> None:
        self._running = self._ready.popleft() if self._ready else None
        if self._running is not None:
            self._run_locks[self._running].release()

    def _fail(self, rank: int | None, error: BaseException) -> None:
        if self.failure is None:
            self.failure = (rank, error)
            self._ended.set()
        self._ready.extend(self._waiting)
        self._waiting.clear()
        if self._running is None:
            self._run_next()

    def _check_progress(self) -> None:
        if self._waiting and len(self._waiting) + len(self._finished) == self.world_size:
            table = [f"rank {r} in {call}" for r, call in sorted(self._waiting.items())]
            table += [f"rank {r} returned" for r in sorted(self._finished)]
            self._fail(None, RuntimeError(f"deadlock: no rank can go on: {'; '.join(table)}"))


class LoopbackCommunicator(Communicator):
    """Communicator of one rank of a `LoopbackWorld`; sums in rank order, in fp32 where the dtype is narrower."""

    def __init__(self, world: LoopbackWorld, rank: int, kvp_group: Sequence[int]) -> None:
        super().__init__(rank, world.world_size, kvp_group, world.device)
        self._shared = world
        self._world = tuple(range(world.world_size))
        self._reports = world.reports

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), f"all_reduce of a non-contiguous tensor {list(x.shape)}"
        return x.copy_(
            self._rendezvous_tensors(self._world, "all_reduce", x, lambda xs: sum_in_rank_order(torch.stack(xs)))
        )

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._rendezvous_tensors(self._world, "all_gather", x))

    def all_to_all(self, send: Tensor) -> Tensor:
        assert send.is_contiguous() and send.shape[0] == len(self.kvp_group), (
            f"all_to_all needs a contiguous [{len(self.kvp_group)}, ...], got {list(send.shape)}"
        )
        return torch.stack([s[self.kvp_rank] for s in self._rendezvous_tensors(self.kvp_group, "all_to_all", send)])

    def broadcast_object(self, obj: T | None) -> T:
        received: T = self._rendezvous_objects("broadcast_object", obj if self.rank == 0 else None)[0]
        return received

    def all_gather_object(self, obj: T) -> list[T]:
        return self._rendezvous_objects("all_gather_object", obj)

    def report(self, obj: Any) -> None:
        super().report(pickle.loads(pickle.dumps(obj)))

    def reports(self) -> list[tuple[int, Any]]:
        self._shared.let_others_run(self.rank)
        return super().reports()

    def barrier(self) -> None:
        self._shared.rendezvous(self._world, self.rank, "barrier", None)

    def abort(self, reason: str) -> None:
        self._shared.abort(self.rank, RuntimeError(reason))

    def close(self) -> None:
        pass

    def _rendezvous_tensors(
        self, ranks: tuple[int, ...], op: str, x: Tensor, combine: Callable[[list[Any]], Any] = list
    ) -> Any:
        call = f"{op}({str(x.dtype).removeprefix('torch.')} {list(x.shape)})"
        return self._shared.rendezvous(ranks, self.rank, call, x.clone(), combine)

    def _rendezvous_objects(self, op: str, obj: Any) -> list[Any]:
        # Pickled, as between processes: no rank may see another's object change.
        return [pickle.loads(data) for data in self._shared.rendezvous(self._world, self.rank, op, pickle.dumps(obj))]


def run_ranks(
    world_size: int,
    fn: Callable[[LoopbackWorld, int], R],
    timeout_s: float = 30.0,
    device: torch.device | str = "cpu",
) -> list[R]:
    """Runs `fn(world, rank)` in one thread per rank and returns the results in rank order.

    Raises:
        BaseException: the error of the rank that failed first, with a note that names the rank.
        RuntimeError: ranks deadlocked, or did not finish within `timeout_s`.
    """
    world = LoopbackWorld(world_size, timeout_s, device)
    results: dict[int, R] = {}

    def body(rank: int) -> None:
        with world.run_exclusive(rank):
            try:
                results[rank] = fn(world, rank)
                world.finish(rank)
            except BaseException as error:
                error.add_note(f"raised by rank {rank} of {world_size}")
                world.abort(rank, error)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    world.start()
    try:
        world.wait()
    finally:
        for thread in threads:
            thread.join(timeout=1.0)  # leaves a rank that is stuck in its own code: threads cannot be killed
    return [results[rank] for rank in range(world_size)]
