"""Worker processes for distributed tests: one pool per world size, started once, replaced after a failure.

`pool(4).run(fn, *args)` calls the top-level function `fn(rank, world_size, *args)` in four processes whose default
process group is initialized, and returns their results in rank order. gloo workers see no GPU; NCCL workers have one
each.

A worker that raises reports its traceback and exits, so that waiting peers see a closed connection rather
than a timeout. After any failure the whole pool is killed, as its process group may be broken; the next `run`
starts a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.exit_cleanup import at_exit

# A fork server, itself a fresh process that only imports: workers start in milliseconds instead of seconds, without the
# test process's threads. With GPUs it only imports torch: Triton's decorators depend on the worker's backend.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed", *([] if torch.cuda.is_available() else ["tests.e2e.checkpoints"])]
)

APART = "nccl, apart"  # a backend: GPUs without peer access, whose messages go through host memory
GRACE_S = 60.0  # for peers of a failed rank to report


class PoolError(RuntimeError):
    """At least one worker failed; the message has every rank's traceback."""


class Pool:
    """`world_size` processes with an initialized process group; started by the first `run`."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory = Path()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 200.0) -> list[Any]:
        """Returns the results of `fn(rank, world_size, *args)`, in rank order.

        Raises:
            PoolError: a rank raised, died, or had no result within `timeout_s`.
        """
        # Test modules may not have been importable when the workers started. Plain pickles copy tensors;
        # multiprocessing's own would share memory.
        task = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        self.start()
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        try:
            for connection in self._connections:
                with contextlib.suppress(ConnectionError):  # _collect reports workers that died since
                    connection.send_bytes(task)
            self._collect(results, errors, time.monotonic() + timeout_s)
            for rank in range(self.world_size) if not errors else ():
                if rank not in results:
                    errors[rank] = f"no result within {timeout_s} s\n{self._stack(rank)}"
        except BaseException:  # results of an interrupted run would be taken for the next one's
            self.close()
            raise
        if errors:
            self.close()
            raise PoolError("\n".join(f"--- rank {r} of {self.world_size}: {e}" for r, e in errors.items()))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self.processes:
            shutil.rmtree(self._directory)
        self.processes, self._connections = [], []

    def start(self) -> None:
        """Starts the workers unless they run; `run` does this, too."""
        if self.processes:
            return
        self._directory = Path(tempfile.mkdtemp(prefix="helix-pool-"))
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            arguments = (rank, self.world_size, self.backend, self._directory, theirs)
            process = _context.Process(target=_work, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    def _collect(self, results: dict[int, Any], errors: dict[int, str], deadline: float) -> None:
        pending = set(range(self.world_size))
        while pending:
            ready = wait([self._connections[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in [rank for rank in pending if self._connections[rank] in ready]:
                pending.remove(rank)
                try:
                    failed, answer = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE_S)
                    failed, answer = True, f"died with exit code {self.processes[rank].exitcode}"
                (errors if failed else results)[rank] = answer
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)

    def _stack(self, rank: int) -> str:
        path = self._directory / f"stack-{rank}"
        if not path.exists():
            return ""
        before, text, deadline = path.stat().st_size, "", time.monotonic() + GRACE_S
        os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        while f"in {_work.__name__}" not in text and time.monotonic() < deadline:  # one of the last frames
            time.sleep(0.05)
            text = path.read_text()[before:]
        return text


def _work(rank: int, world_size: int, backend: str, directory: Path, connection: Connection) -> None:
    """Main loop of a worker: receives tasks, sends `(failed, result or traceback)`."""
    with open(directory / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        try:
            _init(rank, world_size, backend, directory)
            while True:
                path, task = pickle.loads(connection.recv_bytes())
                sys.path[:] = path
                fn, args = pickle.loads(task)
                connection.send_bytes(pickle.dumps((False, fn(rank, world_size, *args))))
        except EOFError:  # the test process is gone
            os._exit(0)
        except BaseException:
            connection.send_bytes(pickle.dumps((True, traceback.format_exc())))
            os._exit(1)  # without clean-up that waits for peers


def _init(rank: int, world_size: int, backend: str, directory: Path) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = str(directory)  # workers are killed: their files are removed with the pool
    device = None
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        if backend == APART:
            backend, os.environ["NCCL_P2P_DISABLE"] = "nccl", "1"
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(str(directory / "rendezvous"), world_size)
    timeout = timedelta(seconds=120)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)


_pools: dict[tuple[int, str], Pool] = {}


def pool(world_size: int, backend: str = "gloo") -> Pool:
    """Returns the pool of this size and backend, shared by the test session."""
    return _pools.setdefault((world_size, backend), Pool(world_size, backend))


def close_all() -> None:
    """Kills the workers of all pools."""
    for each in _pools.values():
        each.close()


at_exit(close_all)
